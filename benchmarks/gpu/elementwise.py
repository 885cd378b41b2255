"""What surrounds attention in a layer: bytes per second against copying memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.bench import Bench, Result, Row, Table
from benchmarks.gpu.pool import flat_pool
from paged_kernels import ops


def rows(bench: Bench) -> Iterator[Row]:
    for tokens in bench.sizes.tokens:
        for name, make in _OPERATIONS.items():
            yield f"{name}, {tokens} rows", lambda m=make, t=tokens: _measure(bench, *m(bench, t))
    yield "copy blocks", lambda: _measure(bench, *_copy(bench))


def _measure(bench: Bench, function: Callable[[], object], moved: int) -> Result:
    seconds = bench.seconds(function)
    rate = moved / seconds
    return {"us": seconds * 1e6, "GB/s": rate / 1e9, "% of copy": bench.share("copy", rate)}


def _hidden(bench: Bench) -> int:
    return 4096 if bench.on_gpu else 64


def _norm(bench: Bench, tokens: int) -> tuple[Callable[[], object], int]:
    x, residual = (bench.randn(tokens, _hidden(bench)) for _ in range(2))
    weight = bench.randn(_hidden(bench))
    return lambda: ops.add_rms_norm(x, residual, weight, 1e-5, backend="triton"), 4 * x.nbytes


def _activation(bench: Bench, tokens: int) -> tuple[Callable[[], object], int]:
    gate_up = bench.randn(tokens, 7 * _hidden(bench))
    return lambda: ops.silu_mul(gate_up, backend="triton"), gate_up.nbytes * 3 // 2


def _rope(bench: Bench, tokens: int) -> tuple[Callable[[], object], int]:
    _, q_heads, heads, dim = bench.sizes.heads[0]
    page = bench.sizes.pages[0]
    pool = flat_pool(bench, bench.dtype)
    block = heads * page * dim
    blocks = -(-tokens // page)
    k_cache, v_cache = (t[: blocks * block].view(blocks, heads, page, dim) for t in (pool.k, pool.v))
    query, key, value = (bench.randn(tokens, n, dim) for n in (q_heads, heads, heads))
    cos, sin = (bench.randn(tokens, dim // 2) for _ in range(2))
    slots = torch.randperm(blocks * page)[:tokens].to(bench.device)
    moved = 2 * (query.nbytes + 2 * key.nbytes) + cos.nbytes * 2
    return lambda: ops.rope_write_kv(
        query, key, value, cos, sin, k_cache, v_cache, slots, backend="triton"
    ), moved  # fmt: skip


def _copy(bench: Bench) -> tuple[Callable[[], object], int]:
    """64 blocks of 32 layers, as a beam search or a swap would."""
    heads, dim = bench.sizes.heads[0][2:]
    layers, count = (64, 64) if bench.on_gpu else (2, 2)
    cache = bench.randn(layers, 2 * count, heads, bench.sizes.pages[0], dim)
    pairs = torch.stack([torch.arange(count), torch.arange(count) + count], 1).to(bench.device)
    return lambda: ops.copy_blocks(cache, cache, pairs, backend="triton"), cache.nbytes


_OPERATIONS = {"residual + RMSNorm": _norm, "silu * mul": _activation, "RoPE + KV write": _rope}
TABLE = Table("elementwise", "Around attention", rows)
