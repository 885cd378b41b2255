"""Causal attention of ragged query chunks over the paged cache (CPU).

Contract: the prefill rows of `ops.paged_attention`. A work item is (sequence, tile of query tokens, kv head).
Its rows are the tile's tokens times the query heads that share the kv head:

    queries   q[row][d]          copied side by side, ROWS at a time
    keys      k[d][t]            a tile of tokens fetched page by page, packed as panels of `products`, used by all rows
    scores    s[row][t]          masked only where the tile crosses the diagonal or the window's start
    weights   p[row][t]          in the cache's own type
    values    v[t][d]            packed likewise
    output    o[row][d]          accumulated in float32 with the usual online softmax

Tiles of keys lie at multiples of their size whatever the batch, the chunk or the thread count: a row's bits depend
on its own sequence alone, since a tile that a row does not see at all leaves its sums as they are.
"""

from functools import cache

import numpy as np
import torch
from numba import carray

from paged_kernels.cpu.amx import (
    AMX_TAG,
    TILE_DEPTH,
    TILE_ROWS,
    block_product,
    configure_tiles,
    has_tiles,
    release_tiles,
)
from paged_kernels.cpu.decode import attention_fields, softmax_scale
from paged_kernels.cpu.micro import code_tag, copy_row, load_row, row_softmax
from paged_kernels.cpu.primitives import fetch_add, pointer
from paged_kernels.cpu.products import PANEL_OUTPUTS, ROW_BLOCKS
from paged_kernels.cpu.runtime import UNBOUNDED, Arguments, compile_kernel, element_type, launch, thread_count
from paged_kernels.cpu.tiles import LANES, TILE_TAG, look_up, pack_keys, pack_values

ROWS = ROW_BLOCKS[0]
"""Query rows multiplied at a time, without AMX."""

_ITEM_ROWS = 64  # query rows per item; fewer when that would leave threads idle
_PARALLEL_PRODUCTS = 1 << 20  # multiply-adds per product; below this, waking threads costs more than the work
PREFILL_ARGUMENTS = Arguments(
    "query k_cache v_cache tables lens starts out tile_seq tile_at",
    "seqs tiles tokens_per_tile heads group block_size window table_row query_token query_head out_token out_head "
    "k_block k_head k_token v_block v_head v_token",
    "scale",
)


def _key_tile(head_dim: int) -> int:
    """Tokens per tile, a multiple of the panels' outputs: keys and values of a tile together stay near 32 KiB."""
    return 64 if head_dim <= 64 else 32


@cache
def build_prefill(head_dim: int, element: type):
    """The kernel for one head size. Longer than a screen because of what `prefill` in it says."""
    tag, dim, tile = TILE_TAG + AMX_TAG + code_tag(), head_dim, _key_tile(head_dim)
    width, step = -(-head_dim // PANEL_OUTPUTS) * PANEL_OUTPUTS, 1 if element is np.float32 else 2
    by_tiles = element is np.uint16 and head_dim % TILE_DEPTH == 0 and has_tiles()
    # Query rows multiplied at a time; tokens that scores and weighted sums are computed for go by whole ones of these.
    most, score_unit, sum_unit = (TILE_ROWS, TILE_DEPTH, TILE_DEPTH) if by_tiles else (ROWS, LANES, step)

    def prefill(arguments, taken, items):
        """Longer than a screen because the sizes must reach the intrinsics as literals of one function: numba's
        disk cache cannot key on a closure that holds another compiled function."""
        _ = tag
        args = carray(arguments, 1)[0]
        q = carray(pointer(args.query), UNBOUNDED, element)
        kc = carray(pointer(args.k_cache), UNBOUNDED, element)
        vc = carray(pointer(args.v_cache), UNBOUNDED, element)
        out = carray(pointer(args.out), UNBOUNDED, element)
        tables = carray(pointer(args.tables), UNBOUNDED, np.int32)
        lens = carray(pointer(args.lens), args.seqs, np.int32)
        starts = carray(pointer(args.starts), args.seqs + 1, np.int32)
        tile_seq = carray(pointer(args.tile_seq), args.tiles, np.int32)
        tile_at = carray(pointer(args.tile_at), args.tiles, np.int32)
        counter = carray(taken, 1)
        heads, per_token = args.heads, args.group
        height = (args.tokens_per_tile * per_token + most - 1) // most * most
        query = np.zeros(height * dim, dtype=element)
        keys = np.zeros(tile * dim, dtype=element)
        values = np.zeros(tile * width, dtype=element)
        s = np.zeros(height * tile, dtype=np.float32)
        p = np.zeros(height * tile, dtype=element)
        o = np.empty(height * width, dtype=np.float32)
        top = np.empty(height, dtype=np.float32)
        norm = np.empty(height, dtype=np.float32)
        alpha = np.empty(height, dtype=np.float32)
        k_at = np.empty(tile + LANES, dtype=np.int64)
        v_at = np.empty(tile + LANES, dtype=np.int64)
        configure_tiles(most)
        done = 0
        while True:
            item = fetch_add(counter, 0)
            if item >= items:
                release_tiles(most)
                return done
            done += 1
            # The last tiles see the longest contexts: taking them first evens out the finish.
            index = args.tiles - 1 - item // heads
            head = item % heads
            seq = np.int64(tile_seq[index])
            begin, q_end = np.int64(starts[seq]), np.int64(starts[seq + 1])
            first = begin + np.int64(tile_at[index])
            count = min(args.tokens_per_tile, q_end - first)
            rows = count * per_token
            pos0 = np.int64(lens[seq]) - (q_end - first)  # position of the tile's first token
            for r in range(rows):
                q_head = head * per_token + r % per_token
                copy_row(query, r * dim, q, (first + r // per_token) * args.query_token + q_head * args.query_head, dim)
            for r in range(height):
                top[r] = -np.inf
                norm[r] = 0.0
            for i in range(height * width):
                o[i] = 0.0
            oldest = max(0, pos0 - args.window + 1)  # the first token that any row sees
            for t0 in range(oldest // tile * tile, pos0 + count, tile):
                skip, stop = max(0, oldest - t0), min(tile, pos0 + count - t0)
                look_up(args, tables, k_at, v_at, skip, seq, head, t0 + skip, stop - skip)
                # Nobody sees these; their addresses must be those of something.
                for i in range(skip):
                    k_at[i], v_at[i] = k_at[skip], v_at[skip]
                for i in range(stop, tile):
                    k_at[i], v_at[i] = k_at[stop - 1], v_at[stop - 1]
                for i in range(0, stop, LANES):
                    half = i % PANEL_OUTPUTS
                    pack_keys(keys, (i - half) * dim + half * step, kc, k_at, i, dim)
                for i in range(0, (stop + sum_unit - 1) // sum_unit * sum_unit, step):
                    pack_values(values, i * PANEL_OUTPUTS, tile * PANEL_OUTPUTS, vc, v_at, i, dim)
                for row in range(0, rows, most):
                    last = min(rows, row + most) - 1
                    span = min(stop, pos0 + last // per_token + 1 - t0)
                    if span <= 0 or t0 + tile <= pos0 + row // per_token - args.window + 1:
                        continue
                    for i in range(0, span, PANEL_OUTPUTS):
                        from_q, to = row * dim, row * tile + i
                        block_product(s, to, tile, 0, query, from_q, dim, keys, i * dim, dim, most)
                    blocks = (span + score_unit - 1) // score_unit * (score_unit // LANES)
                    for r in range(row, row + most):
                        position = pos0 + min(r, rows - 1) // per_token - t0
                        for i in range(max(0, position + 1), blocks * LANES):
                            s[r * tile + i] = -np.inf
                        for i in range(min(span, position - args.window + 1)):
                            s[r * tile + i] = -np.inf
                        row_softmax(s, r * tile, blocks, args.scale, p, r * tile, top, norm, alpha, r)
                        if alpha[r] != 1.0:
                            load_row(o, r * width, o, r * width, alpha[r], width)
                    depth = (span + sum_unit - 1) // sum_unit * sum_unit
                    for i in range(0, width, PANEL_OUTPUTS):
                        from_p, to, at = row * tile, row * width + i, i * tile
                        block_product(o, to, width, 1, p, from_p, tile, values, at, depth, most)
            for r in range(rows):
                q_head = head * per_token + r % per_token
                inverse = np.float32(0.0) if norm[r] == 0.0 else np.float32(1.0) / norm[r]
                at = (first + r // per_token) * args.out_token + q_head * args.out_head
                load_row(out, at, o, r * width, inverse, dim)

    return compile_kernel(prefill, PREFILL_ARGUMENTS)


def _tiles(query_lens: np.ndarray, tokens: int):
    """(sequence, first query token within it) of every tile, as two int32 arrays."""
    counts = (query_lens.astype(np.int64) + tokens - 1) // tokens
    ends = np.cumsum(counts)
    seq = np.repeat(np.arange(query_lens.size, dtype=np.int32), counts)
    within = np.arange(seq.size, dtype=np.int64) - np.repeat(ends - counts, counts)
    return seq, (within * tokens).astype(np.int32)


def plan_prefill(query_lens: np.ndarray, heads: int, group: int, threads: int) -> tuple[dict, int]:
    """A step's own argument fields, for sequences of so many query tokens, and its number of work items."""
    total = int(query_lens.sum())
    tokens = max(1, _ITEM_ROWS // group)
    while tokens * group > 2 * ROWS and -(-total // tokens) * heads < 2 * threads:
        tokens = -(-tokens // 2)
    tile_seq, tile_at = _tiles(query_lens, tokens)
    fields = {
        "tile_seq": tile_seq, "tile_at": tile_at, "seqs": query_lens.size, "tiles": tile_seq.size,
        "tokens_per_tile": tokens, "group": group,
    }  # fmt: skip
    return fields, tile_seq.size * heads


def prefill_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
) -> None:
    """query, out: [total_q, num_q_heads, head_dim] addressed by query_start_loc; writes out's rows.

    Each row sees the last `window` tokens up to its own.
    """
    heads, (q_heads, dim) = k_cache.shape[1], query.shape[1:]
    query_lens = np.diff(query_start_loc.numpy())
    queries = query_lens.astype(np.int64)
    seen = np.minimum(seq_lens.numpy(), queries + window)
    products = int((queries * seen).sum()) * q_heads * dim
    threads = thread_count() if products >= _PARALLEL_PRODUCTS else 1
    fields, items = plan_prefill(query_lens, heads, q_heads // heads, threads)
    where = attention_fields(query, k_cache, v_cache, block_tables, seq_lens, out)
    record = PREFILL_ARGUMENTS.pack(
        **where, **fields, starts=query_start_loc, window=window, scale=softmax_scale(scale)
    )
    launch(build_prefill(dim, element_type(query.dtype)), record, items, threads)
