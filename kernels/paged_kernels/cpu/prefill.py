"""Causal attention of ragged query chunks over the paged cache (CPU).

Contract: the prefill rows of `ops.paged_attention`. A work item is (sequence, tile of query tokens, kv head).
Its rows are the tile's tokens times the query heads that share the kv head, in panels of PANEL rows:

    queries   q[panel][d][row]   transposed once per item, so that rows lie along the vector lanes
    keys      k[t][d]            a tile of tokens fetched page by page, widened to float32, used by all panels
    scores    s[t][row]          per panel; masked only where the tile crosses the diagonal or the window's start
    output    o[row][d]          accumulated in float32 with the usual online softmax

Tiles of keys lie at multiples of their size whatever the batch, the chunk or the thread count: a row's bits depend
on its own sequence alone, since a tile that a row does not see at all leaves its sums as they are.
"""

from functools import cache

import numpy as np
import torch
from numba import carray

from paged_kernels.cpu.decode import attention_fields, softmax_scale
from paged_kernels.cpu.micro import (
    BUILD_TAG,
    PANEL,
    add_values,
    copy_row,
    load_row,
    panel_scores,
    panel_softmax,
)
from paged_kernels.cpu.primitives import fetch_add, pointer
from paged_kernels.cpu.runtime import UNBOUNDED, Arguments, compile_kernel, element_type, launch, thread_count

_ROWS = 64  # query rows per item; fewer when that would leave threads idle
_PARALLEL_PRODUCTS = 1 << 20  # multiply-adds per product; below this, waking threads costs more than the work
PREFILL_ARGUMENTS = Arguments(
    "query k_cache v_cache tables lens starts out tile_seq tile_at",
    "seqs tiles tokens_per_tile heads group block_size window table_row query_token query_head out_token out_head "
    "k_block k_head k_token v_block v_head v_token",
    "scale",
)


def _key_tile(head_dim: int) -> int:
    """Tokens per tile: keys and values of a tile together stay near 32 KiB."""
    return 64 if head_dim <= 64 else 32


@cache
def build_prefill(head_dim: int, element: type):
    """The kernel for one head size. Longer than a screen because of what `prefill` in it says."""
    tag, dim, tile = BUILD_TAG, head_dim, _key_tile(head_dim)

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
        heads, per_token, block_size = args.heads, args.group, args.block_size
        panels = (args.tokens_per_tile * per_token + PANEL - 1) // PANEL
        query = np.zeros(panels * dim * PANEL, dtype=np.float32)
        o = np.empty(panels * PANEL * dim, dtype=np.float32)
        top = np.empty(panels * PANEL, dtype=np.float32)
        norm = np.empty(panels * PANEL, dtype=np.float32)
        alpha = np.empty(panels * PANEL, dtype=np.float32)
        keys = np.zeros(tile * dim, dtype=np.float32)
        values = np.empty(tile * dim, dtype=np.float32)
        s = np.empty(tile * PANEL, dtype=np.float32)
        buffer = np.empty(dim, dtype=np.float32)
        position = np.empty(panels * PANEL, dtype=np.int64)
        done = 0
        while True:
            item = fetch_add(counter, 0)
            if item >= items:
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
                at = (first + r // per_token) * args.query_token + q_head * args.query_head
                load_row(buffer, 0, q, at, args.scale, dim)
                base = (r // PANEL) * dim * PANEL + r % PANEL
                for d in range(dim):
                    query[base + d * PANEL] = buffer[d]
            for r in range(panels * PANEL):
                top[r] = -np.inf
                norm[r] = 0.0
                position[r] = pos0 + r // per_token
            for i in range(panels * PANEL * dim):
                o[i] = 0.0
            oldest = max(0, pos0 - args.window + 1)  # the first token that any row sees
            for t0 in range(oldest // tile * tile, pos0 + count, tile):
                stop = min(t0 + tile, pos0 + count)
                t = max(t0, oldest)
                while t < stop:
                    page = t // block_size
                    many = min((page + 1) * block_size, stop) - t
                    block = np.int64(tables[seq * args.table_row + page])
                    within = t - page * block_size
                    k_at = block * args.k_block + head * args.k_head + within * args.k_token
                    v_at = block * args.v_block + head * args.v_head + within * args.v_token
                    for i in range(many):
                        copy_row(keys, (t - t0 + i) * dim, kc, k_at + i * args.k_token, dim)
                        copy_row(values, (t - t0 + i) * dim, vc, v_at + i * args.v_token, dim)
                    t += many
                for panel in range((rows + PANEL - 1) // PANEL):
                    row0 = panel * PANEL
                    span = min(stop, position[min(rows, row0 + PANEL) - 1] + 1) - t0
                    skip = max(0, position[row0] - args.window + 1 - t0)
                    if span <= skip:
                        continue
                    panel_scores(s, keys, (span + 3) // 4 * 4, query, row0 * dim, dim)
                    for t in range(max(0, position[row0] + 1 - t0), span):
                        for lane in range(PANEL):
                            if t0 + t > position[row0 + lane]:
                                s[t * PANEL + lane] = -np.inf
                    # Before `oldest` there are no keys: scores from 0 to `skip` are masked, their values never read.
                    for t in range(min(span, position[row0 + PANEL - 1] - args.window + 1 - t0)):
                        for lane in range(PANEL):
                            if t0 + t <= position[row0 + lane] - args.window:
                                s[t * PANEL + lane] = -np.inf
                    panel_softmax(s, span, top, norm, alpha, row0)
                    for r in range(row0, row0 + PANEL):
                        load_row(o, r * dim, o, r * dim, alpha[r], dim)
                    seen = span - skip
                    add_values(o, row0 * dim, s, skip * PANEL, 1, PANEL, values, skip * dim, dim, seen, PANEL, dim)
            for r in range(rows):
                q_head = head * per_token + r % per_token
                inverse = np.float32(0.0) if norm[r] == 0.0 else np.float32(1.0) / norm[r]
                at = (first + r // per_token) * args.out_token + q_head * args.out_head
                load_row(out, at, o, r * dim, inverse, dim)

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
    tokens = max(1, _ROWS // group)
    while tokens * group > PANEL and -(-total // tokens) * heads < 2 * threads:
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
