"""Paged batches over one large pool of keys and values, allocated once per head shape and type.

Pages are dealt out in random order. The pool is filled by repeating a random piece: contents do not change the time
of a kernel, NaN and denormals might. Knows shapes; no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from paged_kernels.ops import QUANTISED_DTYPES

_PIECE = 1 << 22


@dataclass
class Pool:
    """K and V pools of one head shape, as flat tensors; `key` says of which."""

    key: tuple
    k: torch.Tensor
    v: torch.Tensor


_cached: list[Pool] = []


def release() -> None:
    """Free the pool; the next use allocates anew."""
    _cached.clear()


def flat_pool(bench: Bench, dtype: torch.dtype) -> Pool:
    """The pool of a type. The one of another type is freed first."""
    key = (dtype, bench.device)
    if not _cached or _cached[0].key != key:
        release()
        size = bench.sizes.pool_bytes // 2
        if bench.on_gpu:
            torch.cuda.empty_cache()
            size = min(size, torch.cuda.mem_get_info(bench.device)[0] // 4)
        count = size // dtype.itemsize
        _cached.append(Pool(key, *(_filled(bench, count, dtype) for _ in range(2))))
    return _cached[0]


def _filled(bench: Bench, count: int, dtype: torch.dtype) -> torch.Tensor:
    piece = torch.randn(min(count, _PIECE), device=bench.device)
    piece = (piece * 20).to(dtype) if dtype == torch.int8 else piece.to(dtype)
    pool = torch.empty(count, dtype=dtype, device=bench.device)
    bits = pool.view(torch.int8) if dtype.itemsize == 1 else pool
    source = piece.view(torch.int8) if dtype.itemsize == 1 else piece
    for start in range(0, count, len(source)):
        part = bits[start : start + len(source)]
        part.copy_(source[: len(part)])
    return pool


def paged_batch(
    bench: Bench,
    heads: tuple[int, int, int],
    page: int,
    lens: list[int],
    query_lens: list[int],
    dtype: torch.dtype | None = None,
) -> dict[str, Any] | None:
    """Arguments of ops.paged_attention for sequences of those lengths; None if the pool cannot hold them.

    heads: query heads, kv heads, head dim. dtype: of the cache; None: the bench's.
    """
    q_heads, kv_heads, dim = heads
    cache_dtype = dtype or bench.dtype
    pool = flat_pool(bench, cache_dtype)
    counts = [-(-length // page) for length in lens]
    block = kv_heads * page * dim
    blocks = len(pool.k) // block
    if sum(counts) > blocks:
        return None
    order = torch.randperm(blocks)[: sum(counts)].to(torch.int32)
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for row, ids in zip(tables, order.split(counts), strict=True):
        row[: len(ids)] = ids
    k_cache, v_cache = (t[: blocks * block].view(blocks, kv_heads, page, dim) for t in (pool.k, pool.v))
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    batch = {
        "query": bench.randn(int(starts[-1]), q_heads, dim), "k_cache": k_cache, "v_cache": v_cache,
        "block_tables": bench.ints(tables), "seq_lens": bench.ints(lens), "query_start_loc": bench.ints(starts),
        "scale": dim**-0.5, "num_decodes": next((i for i, q in enumerate(query_lens) if q != 1), len(lens)),
        "max_query_len": max(query_lens), "max_seq_len": max(lens), "total_seq_len": sum(lens), "backend": "triton",
    }  # fmt: skip
    if cache_dtype in QUANTISED_DTYPES:
        scale = torch.tensor(1.0, device=bench.device)
        batch |= {"k_scale": scale, "v_scale": scale}
    return batch


def kv_bytes(heads: tuple[int, int, int], lens: list[int], itemsize: int) -> int:
    """Bytes of keys and values that attention over those contexts must read."""
    return 2 * sum(lens) * heads[1] * heads[2] * itemsize


def attention_flops(heads: tuple[int, int, int], lens: list[int], query_lens: list[int]) -> int:
    """Multiplications and additions of causal attention: two products of every query with what it sees."""
    pairs = sum(q * n - q * (q - 1) // 2 for n, q in zip(lens, query_lens, strict=True))
    return 4 * heads[0] * heads[2] * pairs
