"""Prefill and mixed steps: arithmetic rate against matrix multiplication, and against torch on contiguous keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.bench import Bench, Result, Row, Table
from benchmarks.gpu.pool import attention_flops, flat_pool, kv_bytes, paged_batch
from paged_kernels import ops


def rows(bench: Bench) -> Iterator[Row]:
    for name, *heads in bench.sizes.heads:
        for page in bench.sizes.pages:
            for sequences, tokens, context in bench.sizes.prefill:
                key = f"{name} | page {page} | {sequences} x {tokens} new of {context}"
                yield key, lambda h=heads, p=page, s=sequences, t=tokens, c=context: _prefill(bench, h, p, s, t, c)


def _prefill(bench: Bench, heads: Any, page: int, sequences: int, tokens: int, context: int) -> Result:
    lens, query_lens = [context] * sequences, [tokens] * sequences
    batch = paged_batch(bench, tuple(heads), page, lens, query_lens)
    if batch is None:
        return {"skipped": "larger than the pool"}
    out = torch.empty_like(batch["query"])
    seconds = bench.seconds(lambda: ops.paged_attention(**batch, out=out))
    rate = attention_flops(tuple(heads), lens, query_lens) / seconds
    result = {"us": seconds * 1e6, "TFLOP/s": rate / 1e12, "% of matmul": bench.share("matmul", rate)}
    if tokens == context and page == bench.sizes.pages[0]:
        contiguous = _sdpa_seconds(bench, tuple(heads), sequences, tokens)
        result["SDPA us / ours"] = contiguous / seconds if contiguous else None
    return result


def _sdpa_seconds(bench: Bench, heads: tuple[int, int, int], sequences: int, tokens: int) -> float | None:
    q_heads, kv_heads, dim = heads
    pool = flat_pool(bench, bench.dtype)
    count = sequences * kv_heads * tokens * dim
    keys, values = (t[:count].view(sequences, kv_heads, tokens, dim) for t in (pool.k, pool.v))
    query = bench.randn(sequences, q_heads, tokens, dim)
    try:
        return bench.seconds(
            lambda: functional.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        )
    except (torch.OutOfMemoryError, RuntimeError):
        return None


def mixed_rows(bench: Bench) -> Iterator[Row]:
    """One step as a scheduler makes them: many decodes and a chunk of a prompt, and the parts of it alone."""
    heads, page = bench.sizes.heads[0][1:], bench.sizes.pages[0]
    contexts = bench.sizes.contexts
    for batch in bench.sizes.batches[-4:-1] or bench.sizes.batches:
        for tokens in bench.sizes.tokens[-2:]:
            key = f"{batch} decodes of {contexts[1]} + {tokens} new tokens"
            yield key, lambda b=batch, t=tokens: _mixed(bench, heads, page, [contexts[1]] * b, t)


def _mixed(bench: Bench, heads: Any, page: int, decodes: list[int], tokens: int) -> Result:
    seconds = {}
    parts = {
        "mixed us": ([*decodes, tokens], [1] * len(decodes) + [tokens]),
        "decodes us": (decodes, [1] * len(decodes)),
        "chunk us": ([tokens], [tokens]),
    }
    for name, (lens, query_lens) in parts.items():
        batch = paged_batch(bench, tuple(heads), page, lens, query_lens)
        if batch is None:
            return {"skipped": "larger than the pool"}
        out = torch.empty_like(batch["query"])
        seconds[name] = bench.seconds(lambda b=batch, o=out: ops.paged_attention(**b, out=o)) * 1e6
    return {**seconds, "KV MB": kv_bytes(tuple(heads), decodes, bench.dtype.itemsize) / 1e6}


TABLES = [
    Table("prefill", "Prefill: causal attention of whole prompts and chunks", rows),
    Table("mixed", "Mixed steps", mixed_rows),
]
