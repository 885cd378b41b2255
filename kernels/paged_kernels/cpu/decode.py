"""Attention of one query token per sequence over the paged cache (CPU, split over the context).

Contract: the decode rows of `ops.paged_attention`. Every context is cut into chunks of SPLIT_TOKENS; a work
item is (chunk, kv head) and handles the query heads that share the kv head, reading keys and values through
the block table in place. Whoever finishes the last chunk of a (sequence, kv head) merges its chunks by their
running maxima and sums (the split-KV scheme of Flash-Decoding). The cut does not depend on the batch or the
thread count, so neither do the result's bits. A sliding window drops the chunks before it and shortens the first.
"""

import math
from functools import cache

import numpy as np
import torch
from numba import carray

from paged_kernels.cpu.micro import load_row, multiplies_bfloat16, row_softmax
from paged_kernels.cpu.primitives import fetch_add, pointer, prefetch
from paged_kernels.cpu.runtime import UNBOUNDED, Arguments, compile_kernel, element_type, launch, thread_count
from paged_kernels.cpu.tiles import TILE_TAG, padded, tile_scores, tile_values

SPLIT_TOKENS = 512
_TILE = 64  # tokens per online-softmax step; a multiple of 16
_PARALLEL_PRODUCTS = 1 << 18  # multiply-adds per product; below this, waking threads costs more than the work
DECODE_ARGUMENTS = Arguments(
    "query k_cache v_cache tables lens out chunk_seq chunk_at acc top norm alpha done",
    "seqs chunks heads block_size window table_row query_token query_head out_token out_head "
    "k_block k_head k_token v_block v_head v_token",
    "scale",
)


@cache
def build_decode(head_dim: int, group: int, element: type):
    """The kernel for one head size and group. Longer than a screen because of what `decode` in it says."""
    tag, dim, width, rows, tile = TILE_TAG + multiplies_bfloat16(), head_dim, padded(head_dim), group, _TILE

    per_line = 64 // np.dtype(element).itemsize

    def decode(arguments, taken, items):
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
        chunk_seq = carray(pointer(args.chunk_seq), args.chunks, np.int32)
        chunk_at = carray(pointer(args.chunk_at), args.seqs + 1, np.int64)
        acc = carray(pointer(args.acc), UNBOUNDED, np.float32)
        top = carray(pointer(args.top), UNBOUNDED, np.float32)
        norm = carray(pointer(args.norm), UNBOUNDED, np.float32)
        alpha = carray(pointer(args.alpha), UNBOUNDED, np.float32)
        counter = carray(taken, 1)
        done = carray(pointer(args.done), UNBOUNDED, np.int64)
        heads, block_size = args.heads, args.block_size
        k_at = np.empty(2 * tile, dtype=np.int64)
        v_at = np.empty(2 * tile, dtype=np.int64)
        scores = np.empty(rows * tile, dtype=np.float32)
        weights = np.empty(rows * tile, dtype=element)
        total = np.empty(dim, dtype=np.float32)
        count = 0
        while True:
            item = fetch_add(counter, 0)
            if item >= items:
                return count
            count += 1
            chunk = item // heads
            head = item - chunk * heads
            seq = np.int64(chunk_seq[chunk])
            table = seq * args.table_row
            first, last = chunk_at[seq], chunk_at[seq + 1]
            length = np.int64(lens[seq])
            begin = max(0, length - args.window)
            cut = (begin // SPLIT_TOKENS + chunk - first) * SPLIT_TOKENS
            start, end = max(begin, cut), min(length, cut + SPLIT_TOKENS)
            query = seq * args.query_token + head * rows * args.query_head
            row0 = item * rows
            for g in range(rows):
                top[row0 + g] = -np.inf
                norm[row0 + g] = 0.0
            for i in range(row0 * width, (row0 + rows) * width):
                acc[i] = 0.0
            # Each round looks up where the next tile lies and asks for it, so that memory works while this one computes.
            here = 0
            for t0 in range(start - tile, end, tile):
                ahead, coming = tile - here, min(tile, end - t0 - tile)
                page = (t0 + tile) // block_size
                within = t0 + tile - page * block_size
                for i in range(coming):
                    if within == block_size or i == 0:
                        within -= 0 if i == 0 else block_size
                        block = np.int64(tables[table + page])
                        page += 1
                    k_at[ahead + i] = block * args.k_block + head * args.k_head + within * args.k_token
                    v_at[ahead + i] = block * args.v_block + head * args.v_head + within * args.v_token
                    within += 1
                for i in range(coming, -(-coming // 16) * 16):
                    k_at[ahead + i], v_at[ahead + i] = k_at[ahead + coming - 1], v_at[ahead + coming - 1]
                many = min(tile, end - t0)
                for i in range(0, tile, 16):
                    for j in range(ahead + i, ahead + min(i + 16, coming)):
                        for line in range(0, dim, per_line):
                            prefetch(kc, k_at[j] + line)
                            prefetch(vc, v_at[j] + line)
                    if t0 >= start and i < many:
                        tile_scores(scores, i, tile, q, query, args.query_head, kc, k_at, here + i, rows, dim)
                if t0 >= start:
                    blocks = (many + 15) // 16
                    for g in range(rows):
                        for i in range(many, 16 * blocks):
                            scores[g * tile + i] = -np.inf
                        at = g * tile
                        row_softmax(scores, at, blocks, args.scale, weights, at, top, norm, alpha, row0 + g)
                        at = (row0 + g) * width
                        load_row(acc, at, acc, at, alpha[row0 + g], width)
                    many = (many + 1) // 2 * 2
                    tile_values(acc, row0 * width, weights, 0, tile, vc, v_at, here, many, rows, dim)
                here = ahead
            if fetch_add(done, seq * heads + head) + 1 < last - first:
                continue
            done[seq * heads + head] = 0  # for the next layer or step
            for g in range(rows):
                highest = np.float32(-np.inf)
                for part in range(first, last):
                    highest = max(highest, top[(part * heads + head) * rows + g])
                denominator = np.float32(0.0)
                for i in range(dim):
                    total[i] = 0.0
                for part in range(first, last):
                    row = (part * heads + head) * rows + g
                    if norm[row] != 0.0:
                        weight = np.float32(2.0) ** (top[row] - highest)
                        denominator += norm[row] * weight
                        for i in range(dim):
                            total[i] += acc[row * width + i] * weight
                inverse = np.float32(0.0) if denominator == 0.0 else np.float32(1.0) / denominator
                at = seq * args.out_token + (head * rows + g) * args.out_head
                load_row(out, at, total, 0, inverse, dim)

    return compile_kernel(decode, DECODE_ARGUMENTS)


def _chunks(lens: list[int], window: int):
    """(sequence of each chunk [chunks], first chunk of each sequence [num_seqs + 1]); each has at least one."""
    if max(lens) <= SPLIT_TOKENS:
        return np.arange(len(lens), dtype=np.int32), np.arange(len(lens) + 1, dtype=np.int64)
    counts = [max(1, -(-n // SPLIT_TOKENS) - max(0, n - window) // SPLIT_TOKENS) for n in lens]
    at = np.zeros(len(lens) + 1, dtype=np.int64)
    np.cumsum(counts, out=at[1:])
    return np.repeat(np.arange(len(lens), dtype=np.int32), counts), at


def attention_fields(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
) -> dict:
    """Where everything is: the argument fields that decode and prefill kernels share."""
    k_block, k_head, k_token, _ = k_cache.stride()
    v_block, v_head, v_token, _ = v_cache.stride()
    return {
        "query": query, "k_cache": k_cache, "v_cache": v_cache, "tables": block_tables, "lens": seq_lens, "out": out,
        "heads": k_cache.shape[1], "block_size": k_cache.shape[2], "table_row": block_tables.stride(0),
        "query_token": query.stride(0), "query_head": query.stride(1),
        "out_token": out.stride(0), "out_head": out.stride(1),
        "k_block": k_block, "k_head": k_head, "k_token": k_token,
        "v_block": v_block, "v_head": v_head, "v_token": v_token,
    }  # fmt: skip


def plan_decode(lens: list[int], q_heads: int, heads: int, dim: int, window: int) -> tuple[dict, int]:
    """A step's own argument fields, scratch memory included, and its number of work items."""
    chunk_seq, chunk_at = _chunks(lens, window)
    rows = chunk_seq.size * q_heads
    top, norm, alpha = np.empty((3, rows), dtype=np.float32)
    fields = {
        "chunk_seq": chunk_seq, "chunk_at": chunk_at, "acc": np.empty(rows * padded(dim), dtype=np.float32),
        "top": top, "norm": norm, "alpha": alpha, "seqs": len(lens), "chunks": chunk_seq.size,
    }  # fmt: skip
    return fields, chunk_seq.size * heads


def softmax_scale(scale: float) -> float:
    """What the kernels multiply scores by: their softmax is in base 2."""
    return scale * math.log2(math.e)


def decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    seqs: int,
    scale: float,
    window: int,
    out: torch.Tensor,
) -> None:
    """The first `seqs` sequences, of one query token each: row i of query and out belongs to sequence i.

    Each sees the last `window` tokens of its context.
    Takes whole tensors rather than slices: making views costs more than small batches take to compute.
    """
    q_heads, dim = query.shape[1:]
    heads = k_cache.shape[1]
    lens = seq_lens.tolist()[:seqs]
    fields, items = plan_decode(lens, q_heads, heads, dim, window)
    done = np.zeros(seqs * heads, dtype=np.int64)
    where = attention_fields(query, k_cache, v_cache, block_tables, seq_lens, out)
    record = DECODE_ARGUMENTS.pack(**where, **fields, done=done, window=window, scale=softmax_scale(scale))
    products = sum(min(n, window) for n in lens) * q_heads * dim
    threads = thread_count() if products >= _PARALLEL_PRODUCTS else 1
    launch(build_decode(dim, q_heads // heads, element_type(query.dtype)), record, items, threads)
