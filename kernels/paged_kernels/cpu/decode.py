"""Attention of one query token per sequence over the paged cache (CPU, split over the context).

Contract: the decode rows of `ops.paged_attention`. Every context is cut into chunks of SPLIT_TOKENS; a work
item is (chunk, kv head) and handles the query heads that share the kv head, reading keys and values through
the block table in place. Chunk results are merged by their running maxima and sums (the split-KV scheme of
Flash-Decoding). The cut does not depend on the batch or the thread count, so neither do the result's bits.
"""

import math
from functools import cache

import numpy as np
import torch
from numba import njit, prange

from paged_kernels.cpu.micro import BUILD_TAG, add_values, fetch_add, group_scores, load_row, prefetch, row_softmax
from paged_kernels.cpu.runtime import COMPILE_OPTIONS, PARALLEL_LOCK, flat, use_threads

SPLIT_TOKENS = 512
_TILE = 64  # tokens per online-softmax step; a multiple of 16


@cache
def _build(head_dim: int, group: int):
    """The kernel for one head size and group. Longer than a screen because numba's disk cache cannot key
    on a closure that holds another compiled function, and the literals must reach the intrinsics."""
    tag, dim, rows, tile = BUILD_TAG, head_dim, group, _TILE

    def kernel(q, q_t, q_h, kc, k_s, vc, v_s, tables, lens, block_size, scale, out, o_t, o_h,
               chunk_seq, chunk_at, heads, acc, m, norm, alpha, counter, workers):  # fmt: skip
        for _worker in prange(workers):
            _ = tag
            query = np.empty(rows * dim, dtype=np.float32)
            scores = np.empty(rows * tile, dtype=np.float32)
            while True:
                item = fetch_add(counter)
                if item >= chunk_seq.size * heads:
                    break
                chunk = item // heads
                head = item - chunk * heads
                seq = np.int64(chunk_seq[chunk])
                start = (chunk - chunk_at[seq]) * SPLIT_TOKENS
                end = min(np.int64(lens[seq]), start + SPLIT_TOKENS)
                row0 = item * rows
                for g in range(rows):
                    m[row0 + g] = -np.inf
                    norm[row0 + g] = 0.0
                    load_row(query, g * dim, q, seq * q_t + (head * rows + g) * q_h, scale, dim)
                acc[row0 * dim : (row0 + rows) * dim] = 0.0
                for t0 in range(start, end, tile):
                    stop = min(t0 + tile, end)
                    t = t0
                    while t < stop:
                        page = t // block_size
                        many = min((page + 1) * block_size, stop) - t
                        block = np.int64(tables[seq, page])
                        within = t - page * block_size
                        at = block * k_s[0] + head * k_s[1] + within * k_s[2]
                        v_at = block * v_s[0] + head * v_s[1] + within * v_s[2]
                        for i in range(many):
                            prefetch(vc, v_at + i * v_s[2])
                            group_scores(scores, t - t0 + i, tile, query, kc, at + i * k_s[2], rows, dim)
                        t += many
                    blocks = (stop - t0 + 15) // 16
                    for g in range(rows):
                        for i in range(stop - t0, blocks * 16):
                            scores[g * tile + i] = -np.inf
                        row_softmax(scores, g * tile, blocks, m, norm, alpha, row0 + g)
                        at = (row0 + g) * dim
                        load_row(acc, at, acc, at, alpha[row0 + g], dim)
                    t = t0
                    while t < stop:
                        page = t // block_size
                        many = min((page + 1) * block_size, stop) - t
                        at = np.int64(tables[seq, page]) * v_s[0] + head * v_s[1]
                        at += (t - page * block_size) * v_s[2]
                        add_values(
                            acc, row0 * dim, scores, t - t0, tile, 1, vc, at, v_s[2], many, rows, dim
                        )  # fmt: skip
                        t += many
        for pair in prange(lens.size * heads):
            _ = tag
            total = np.empty(dim, dtype=np.float32)
            weights = np.empty(1, dtype=np.float32)
            seq = pair // heads
            head = pair - seq * heads
            first, last = chunk_at[seq], chunk_at[seq + 1]
            for g in range(rows):
                top = np.float32(-np.inf)
                for chunk in range(first, last):
                    top = max(top, m[(chunk * heads + head) * rows + g])
                denominator = np.float32(0.0)
                total[:] = 0.0
                for chunk in range(first, last):
                    row = (chunk * heads + head) * rows + g
                    if norm[row] != 0.0:
                        weights[0] = np.float32(2.0) ** (m[row] - top)
                        denominator += norm[row] * weights[0]
                        add_values(total, 0, weights, 0, 0, 0, acc, row * dim, 0, 1, 1, dim)
                inverse = np.float32(0.0) if denominator == 0.0 else np.float32(1.0) / denominator
                load_row(out, seq * o_t + (head * rows + g) * o_h, total, 0, inverse, dim)

    return njit(parallel=True, **COMPILE_OPTIONS)(kernel)


def _chunks(lens: np.ndarray):
    """(sequence of each chunk [chunks], first chunk of each sequence [num_seqs + 1]); empty ones get none."""
    counts = (np.maximum(lens, 0).astype(np.int64) + SPLIT_TOKENS - 1) // SPLIT_TOKENS
    at = np.zeros(lens.size + 1, dtype=np.int64)
    np.cumsum(counts, out=at[1:])
    return np.repeat(np.arange(lens.size, dtype=np.int32), counts), at


def decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """query, out: [num_seqs, num_q_heads, head_dim], row i belonging to sequence i; writes out."""
    q_heads, dim = query.shape[1:]
    heads, block_size = k_cache.shape[1], k_cache.shape[2]
    lens = seq_lens.numpy()
    chunk_seq, chunk_at = _chunks(lens)
    rows = chunk_seq.size * q_heads
    stats = np.empty((3, rows), dtype=np.float32)
    kernel = _build(dim, q_heads // heads)
    with PARALLEL_LOCK:
        workers = use_threads()
        kernel(
            flat(query), query.stride(0), query.stride(1),
            flat(k_cache), k_cache.stride(), flat(v_cache), v_cache.stride(),
            block_tables.numpy(), lens, block_size, np.float32(scale * math.log2(math.e)),
            flat(out), out.stride(0), out.stride(1), chunk_seq, chunk_at, heads,
            np.empty(rows * dim, dtype=np.float32), stats[0], stats[1], stats[2],
            np.zeros(1, dtype=np.int64), workers,
        )  # fmt: skip
