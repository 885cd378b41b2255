"""Causal attention of ragged query chunks over the paged cache (CPU).

Contract: the prefill rows of `ops.paged_attention`. A work item is (sequence, tile of query tokens, kv head).
Its rows are the tile's tokens times the query heads that share the kv head, in panels of PANEL rows:

    queries   q[panel][d][row]   transposed once per item, so that rows lie along the vector lanes
    keys      k[t][d]            a tile of tokens fetched page by page, widened to float32, used by all panels
    scores    s[t][row]          per panel; causal mask only where the tile crosses the diagonal
    output    o[row][d]          accumulated in float32 with the usual online softmax

Tiles of keys start at position 0 whatever the batch, the chunk or the thread count: a row's bits depend on its
own sequence alone.
"""

import math
from functools import cache

import numpy as np
import torch
from numba import njit, prange

from paged_kernels.cpu.micro import (
    BUILD_TAG,
    PANEL,
    add_values,
    copy_row,
    fetch_add,
    load_row,
    panel_scores,
    panel_softmax,
)
from paged_kernels.cpu.runtime import COMPILE_OPTIONS, PARALLEL_LOCK, flat, use_threads

_ROWS = 64  # query rows per item; fewer when that would leave threads idle


def _key_tile(head_dim: int) -> int:
    """Tokens per tile: keys and values of a tile together stay near 32 KiB."""
    return 64 if head_dim <= 64 else 32


@cache
def _build(head_dim: int, group: int):
    """The kernel for one head size and group; one function for the reason given in `decode._build`."""
    tag, dim, rows_per_token, tile = BUILD_TAG, head_dim, group, _key_tile(head_dim)

    def kernel(q, q_t, q_h, kc, k_s, vc, v_s, tables, lens, starts, block_size, scale, out, o_t, o_h,
               tile_seq, tile_at, tokens_per_tile, heads, counter, workers):  # fmt: skip
        for _worker in prange(workers):
            _ = tag
            panels = (tokens_per_tile * rows_per_token + PANEL - 1) // PANEL
            query = np.zeros(panels * dim * PANEL, dtype=np.float32)
            o = np.empty(panels * PANEL * dim, dtype=np.float32)
            m = np.empty(panels * PANEL, dtype=np.float32)
            norm = np.empty(panels * PANEL, dtype=np.float32)
            alpha = np.empty(panels * PANEL, dtype=np.float32)
            keys = np.zeros(tile * dim, dtype=np.float32)
            values = np.empty(tile * dim, dtype=np.float32)
            s = np.empty(tile * PANEL, dtype=np.float32)
            row_buf = np.empty(dim, dtype=np.float32)
            while True:
                item = fetch_add(counter)
                if item >= tile_seq.size * heads:
                    break
                index = item // heads
                head = item - index * heads
                seq = np.int64(tile_seq[index])
                begin, q_end = np.int64(starts[seq]), np.int64(starts[seq + 1])
                first = begin + np.int64(tile_at[index])
                count = min(np.int64(tokens_per_tile), q_end - first)
                rows = count * rows_per_token
                pos0 = np.int64(lens[seq]) - (q_end - begin) + (first - begin)
                for r in range(rows):
                    token = r // rows_per_token
                    q_head = head * rows_per_token + r - token * rows_per_token
                    load_row(row_buf, 0, q, (first + token) * q_t + q_head * q_h, scale, dim)
                    base = (r // PANEL) * dim * PANEL + r % PANEL
                    for d in range(dim):
                        query[base + d * PANEL] = row_buf[d]
                o[:] = 0.0
                norm[:] = 0.0
                m[:] = -np.inf
                context = pos0 + count
                for t0 in range(0, context, tile):
                    stop = min(t0 + tile, context)
                    t = t0
                    while t < stop:
                        page = t // block_size
                        many = min((page + 1) * block_size, stop) - t
                        block = np.int64(tables[seq, page])
                        within = t - page * block_size
                        k_at = block * k_s[0] + head * k_s[1] + within * k_s[2]
                        v_at = block * v_s[0] + head * v_s[1] + within * v_s[2]
                        for i in range(many):
                            copy_row(keys, (t - t0 + i) * dim, kc, k_at + i * k_s[2], dim)
                            copy_row(values, (t - t0 + i) * dim, vc, v_at + i * v_s[2], dim)
                        t += many
                    for panel in range((rows + PANEL - 1) // PANEL):
                        row0 = panel * PANEL
                        last_row = min(rows, row0 + PANEL) - 1
                        low = pos0 + row0 // rows_per_token
                        span = min(stop, pos0 + last_row // rows_per_token + 1) - t0
                        if span <= 0:
                            continue
                        padded = (span + 3) // 4 * 4
                        panel_scores(s, keys, padded, query, row0 * dim, dim)
                        for t in range(max(0, low + 1 - t0), span):
                            for lane in range(PANEL):
                                if t0 + t > pos0 + (row0 + lane) // rows_per_token:
                                    s[t * PANEL + lane] = -np.inf
                        panel_softmax(s, span, m, norm, alpha, row0)
                        for r in range(row0, row0 + PANEL):
                            load_row(o, r * dim, o, r * dim, alpha[r], dim)
                        add_values(o, row0 * dim, s, 0, 1, PANEL, values, 0, dim, span, PANEL, dim)
                for r in range(rows):
                    token = r // rows_per_token
                    q_head = head * rows_per_token + r - token * rows_per_token
                    inverse = np.float32(0.0) if norm[r] == 0.0 else np.float32(1.0) / norm[r]
                    at = (first + token) * o_t + q_head * o_h
                    load_row(out, at, o, r * dim, inverse, dim)

    return njit(parallel=True, **COMPILE_OPTIONS)(kernel)


def _tiles(query_lens: np.ndarray, tokens: int):
    """(sequence, first query token within it) of every tile, as two int32 arrays."""
    counts = (np.maximum(query_lens, 0).astype(np.int64) + tokens - 1) // tokens
    ends = np.cumsum(counts)
    seq = np.repeat(np.arange(query_lens.size, dtype=np.int32), counts)
    within = np.arange(seq.size, dtype=np.int64) - np.repeat(ends - counts, counts)
    return seq, (within * tokens).astype(np.int32)


def prefill_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """query, out: [total_q, num_q_heads, head_dim] addressed by query_start_loc; writes out's rows."""
    heads, block_size = k_cache.shape[1], k_cache.shape[2]
    group = query.shape[1] // heads
    starts = query_start_loc.numpy()
    query_lens = np.diff(starts)
    kernel = _build(query.shape[2], group)
    with PARALLEL_LOCK:
        workers = use_threads()
        tokens = max(1, _ROWS // group)
        while tokens * group > PANEL and -(-int(query_lens.sum()) // tokens) * heads < 2 * workers:
            tokens = -(-tokens // 2)
        tile_seq, tile_at = _tiles(query_lens, tokens)
        kernel(
            flat(query), query.stride(0), query.stride(1),
            flat(k_cache), k_cache.stride(), flat(v_cache), v_cache.stride(),
            block_tables.numpy(), seq_lens.numpy(), starts, block_size,
            np.float32(scale * math.log2(math.e)), flat(out), out.stride(0), out.stride(1),
            tile_seq, tile_at, tokens, heads, np.zeros(1, dtype=np.int64), workers,
        )  # fmt: skip
