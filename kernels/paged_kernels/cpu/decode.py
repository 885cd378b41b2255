"""Attention of one query token per sequence over the paged cache (CPU, split over the context).

Contract: the decode rows of `ops.paged_attention`. Every context is cut into chunks of SPLIT_TOKENS; a work item is
(chunk, some kv heads) and handles the query heads that share them, reading keys and values through the block table in
place: several heads, since those of a block lie side by side and long reads are faster. Whoever finishes the last chunk
of a sequence's heads merges the chunks by their running maxima and sums (the split-KV scheme of Flash-Decoding). The
cut does not depend on the batch or the thread count, so neither do the result's bits. A sliding window drops the chunks
before it and shortens the first.
"""

import math
from functools import cache

import numba
import numpy as np
import torch
from numba import carray

from paged_kernels.cpu.micro import code_tag, load_row, row_softmax
from paged_kernels.cpu.primitives import fetch_add, pointer
from paged_kernels.cpu.runtime import UNBOUNDED, Arguments, compile_kernel, element_type, launch, thread_count
from paged_kernels.cpu.tiles import TILE_TAG, look_up, padded, tile_scores, tile_values

SPLIT_TOKENS = 128
_TILE = 64  # tokens per online-softmax step; a multiple of 16
_ITEM_WIDTH = 512  # elements of a token's keys per item, about: reads of some KiB, and work for all threads
_PARALLEL_PRODUCTS = 1 << 18  # multiply-adds per product; below this, waking threads costs more than the work
DECODE_ARGUMENTS = Arguments(
    "query k_cache v_cache tables lens out chunk_seq chunk_at acc top norm alpha done",
    "seqs chunks heads heads_per_item block_size window table_row query_token query_head out_token out_head "
    "k_block k_head k_token v_block v_head v_token",
    "scale",
)


@numba.njit
def _range(args, lens, chunk_seq, chunk_at, chunk):
    """(sequence, first token, end) of a chunk."""
    seq = np.int64(chunk_seq[chunk])
    length = np.int64(lens[seq])
    begin = max(0, length - args.window)
    cut = (begin // SPLIT_TOKENS + chunk - chunk_at[seq]) * SPLIT_TOKENS
    return seq, max(begin, cut), min(length, cut + SPLIT_TOKENS)


@cache
def build_decode(head_dim: int, group: int, element: type):
    """The kernel for one head size and group. Longer than a screen because of what `decode` in it says."""
    tag, dim, width, rows, tile = TILE_TAG + code_tag(), head_dim, padded(head_dim), group, _TILE

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
        heads, together = args.heads, args.heads_per_item
        blocks = (heads + together - 1) // together
        k_at = np.empty(2 * tile, dtype=np.int64)
        v_at = np.empty(2 * tile, dtype=np.int64)
        scores = np.empty(together * rows * tile, dtype=np.float32)
        weights = np.empty(together * rows * tile, dtype=element)
        total = np.empty(dim, dtype=np.float32)
        here, count = 0, 0
        coming = fetch_add(counter, 0)
        if coming < items:
            seq, start, end = _range(args, lens, chunk_seq, chunk_at, coming // blocks)
            look_up(
                args, tables, k_at, v_at, here, seq, coming % blocks * together, start, max(0, min(tile, end - start))
            )
        while coming < items:
            item = coming
            count += 1
            chunk = item // blocks
            head0 = (item - chunk * blocks) * together
            many = min(together, heads - head0)
            seq, start, end = _range(args, lens, chunk_seq, chunk_at, chunk)
            first, last = chunk_at[seq], chunk_at[seq + 1]
            query = seq * args.query_token + head0 * rows * args.query_head
            row0 = (chunk * heads + head0) * rows
            for row in range(row0, row0 + many * rows):
                top[row] = -np.inf
                norm[row] = 0.0
            for i in range(row0 * width, (row0 + many * rows) * width):
                acc[i] = 0.0
            for t0 in range(start, max(end, start + 1), tile):
                # The next tile, of this item or the one to come, is looked up and asked for while this one is computed.
                ahead, next_seq, next_head, next_at, next_end = tile - here, seq, head0, t0 + tile, end
                if next_at >= end:
                    coming = fetch_add(counter, 0)
                    if coming < items:
                        next_head = coming % blocks * together
                        next_seq, next_at, next_end = _range(args, lens, chunk_seq, chunk_at, coming // blocks)
                next_span = max(0, min(tile, next_end - next_at))
                look_up(args, tables, k_at, v_at, ahead, next_seq, next_head, next_at, next_span)
                span = max(0, min(tile, end - t0))
                whole = (span + 15) // 16 * 16
                # Heads in the inner loops: those of a block lie one after the other. Where the next tile has no more
                # tokens, the lines asked for are those in use, which costs nothing.
                for i in range(0, span, 16):
                    for h in range(many):
                        at, from_q, from_k = h * rows * tile + i, query + h * rows * args.query_head, h * args.k_head
                        then = ahead + i if i < next_span else here + i
                        tile_scores(
                            scores, at, tile, q, from_q, args.query_head, kc, from_k, k_at, here + i, then, rows, dim
                        )
                for row in range(many * rows):
                    at = row * tile
                    for i in range(at + span, at + whole):
                        scores[i] = -np.inf
                    row_softmax(scores, at, whole // 16, args.scale, weights, at, top, norm, alpha, row0 + row)
                    to = (row0 + row) * width
                    load_row(acc, to, acc, to, alpha[row0 + row], width)
                for i in range(0, span, 16):
                    part = (min(16, span - i) + 1) // 2 * 2
                    for h in range(many):
                        to, at, from_v = (row0 + h * rows) * width, h * rows * tile + i, h * args.v_head
                        then = ahead + i if i < next_span else here + i
                        tile_values(acc, to, weights, at, tile, vc, from_v, v_at, here + i, then, part, rows, dim)
                here = ahead
            if fetch_add(done, seq * blocks + item - chunk * blocks) + 1 < last - first:
                continue
            done[seq * blocks + item - chunk * blocks] = 0  # for the next layer or step
            for row in range(head0 * rows, (head0 + many) * rows):
                highest = np.float32(-np.inf)
                for part in range(first, last):
                    highest = max(highest, top[part * heads * rows + row])
                denominator = np.float32(0.0)
                for i in range(dim):
                    total[i] = 0.0
                for part in range(first * heads * rows + row, last * heads * rows + row, heads * rows):
                    if norm[part] != 0.0:
                        weight = np.float32(2.0) ** (top[part] - highest)
                        denominator += norm[part] * weight
                        for i in range(dim):
                            total[i] += acc[part * width + i] * weight
                inverse = np.float32(0.0) if denominator == 0.0 else np.float32(1.0) / denominator
                load_row(out, seq * args.out_token + row * args.out_head, total, 0, inverse, dim)
        return count

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
    together = -(-heads // -(-heads * dim // _ITEM_WIDTH))
    rows = chunk_seq.size * q_heads
    top, norm, alpha = np.empty((3, rows), dtype=np.float32)
    fields = {
        "chunk_seq": chunk_seq, "chunk_at": chunk_at, "acc": np.empty(rows * padded(dim), dtype=np.float32),
        "top": top, "norm": norm, "alpha": alpha, "seqs": len(lens), "chunks": chunk_seq.size,
        "heads_per_item": together,
    }  # fmt: skip
    return fields, chunk_seq.size * -(-heads // together)


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
