"""Decode tables: every batch, context, head shape, page and type; ragged lengths; verification of several tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.bench import Bench, Result, Row, Table
from benchmarks.gpu.pool import flat_pool, kv_bytes, paged_batch
from paged_kernels import ops


def _cache_types(bench: Bench) -> tuple[torch.dtype, ...]:
    fp8 = torch.float8_e4m3fn
    if bench.on_gpu and torch.cuda.get_device_capability(bench.device) < (8, 9):
        fp8 = torch.float8_e5m2
    return (bench.dtype, fp8)


def rows(bench: Bench) -> Iterator[Row]:
    """Types outermost: the pool is allocated once for each."""
    sizes = bench.sizes
    for dtype in _cache_types(bench):
        for name, *heads in sizes.heads:
            for page in sizes.pages:
                for context in sizes.contexts:
                    for batch in sizes.batches:
                        key = f"{name} | {_short(dtype)} | page {page} | {batch} x {context}"
                        yield key, lambda d=dtype, h=heads, p=page, c=context, b=batch: _decode(bench, h, p, [c] * b, d)


def ragged_rows(bench: Bench) -> Iterator[Row]:
    heads, page = bench.sizes.heads[0][1:], bench.sizes.pages[0]
    top = bench.sizes.contexts[-1]
    short = bench.sizes.contexts[0]
    batches = {
        "one long among 63 short": [top] + [short] * 63,
        "one long among 255 short": [top] + [short] * 255,
        "evenly spread, 64": [max(1, top * (i + 1) // 64) for i in range(64)],
        "geometric, 32": [max(1, top >> (i % 8)) for i in range(32)],
    }
    if not bench.on_gpu:
        batches = {"one long among 3 short": [top, short, short, 1]}
    for name, lens in batches.items():
        yield name, lambda n=lens: _decode(bench, heads, page, n, bench.dtype, sdpa=False)


def verification_rows(bench: Bench) -> Iterator[Row]:
    heads, page = bench.sizes.heads[0][1:], bench.sizes.pages[0]
    for context in bench.sizes.contexts[1:]:
        for batch in bench.sizes.batches[:3]:
            for tokens in (1, 2, 4, 8) if bench.on_gpu else (4,):
                key = f"{batch} x {context}, {tokens} tokens"
                yield (
                    key,
                    lambda b=batch, c=context, q=tokens: _decode(
                        bench, heads, page, [c] * b, bench.dtype, [q] * b, sdpa=False
                    ),
                )


def _decode(
    bench: Bench, heads: Any, page: int, lens: list[int], dtype: torch.dtype, query_lens: list[int] | None = None,
    sdpa: bool = True,
) -> Result:  # fmt: skip
    batch = paged_batch(bench, tuple(heads), page, lens, query_lens or [1] * len(lens), dtype)
    if batch is None:
        return {"skipped": "larger than the pool"}
    out = torch.empty_like(batch["query"])
    seconds = bench.seconds(lambda: ops.paged_attention(**batch, out=out))
    moved = kv_bytes(tuple(heads), lens, dtype.itemsize)
    result = {"KV MB": moved / 1e6, "us": seconds * 1e6, "GB/s": moved / seconds / 1e9}
    result["% of read"] = bench.share("read", moved / seconds)
    if sdpa and dtype == bench.dtype and page == bench.sizes.pages[0]:
        contiguous = _sdpa_seconds(bench, tuple(heads), len(lens), lens[0])
        result["SDPA us / ours"] = contiguous / seconds if contiguous else None
    return result


def _sdpa_seconds(bench: Bench, heads: tuple[int, int, int], batch: int, context: int) -> float | None:
    """torch's attention over contiguous keys and values of the same size, which are the pool's own memory."""
    q_heads, kv_heads, dim = heads
    pool = flat_pool(bench, bench.dtype)
    count = batch * kv_heads * context * dim
    keys, values = (t[:count].view(batch, kv_heads, context, dim) for t in (pool.k, pool.v))
    query = bench.randn(batch, q_heads, 1, dim)
    try:
        return bench.seconds(lambda: functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True))
    except (torch.OutOfMemoryError, RuntimeError):
        return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


TABLES = [
    Table("decode", "Decode: one token per sequence", rows),
    Table("ragged", "Decode with ragged lengths", ragged_rows),
    Table("verification", "Verification: several tokens per sequence", verification_rows),
]
