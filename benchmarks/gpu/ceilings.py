"""What the machine can do at best, measured: copying memory, reading it, and multiplying matrices."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from benchmarks.gpu.bench import Bench, Result, Row, Table


@triton.jit
def read_kernel(source, out, count, BLOCK: tl.constexpr):
    """Adds up a strided share of `source`; its only write is one number per program."""
    total = tl.zeros([BLOCK], dtype=tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for at in range(start, count, stride):
        places = at + tl.arange(0, BLOCK)
        total += tl.load(source + places, mask=places < count, other=0)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def rows(bench: Bench) -> Iterator[Row]:
    yield "copy", lambda: _copy(bench)
    yield "read", lambda: _read(bench)
    yield "matmul", lambda: _matmul(bench)


def _copy(bench: Bench) -> Result:
    source = torch.ones(bench.sizes.copy_bytes // 8, dtype=torch.int32, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.seconds(lambda: target.copy_(source))
    bench.ceilings["copy"] = 2 * source.nbytes / seconds
    return {
        "what": "torch copy, bytes read and written",
        "GB/s": bench.ceilings["copy"] / 1e9,
        "rate": bench.ceilings["copy"],
    }


def _read(bench: Bench) -> Result:
    source = torch.ones(bench.sizes.copy_bytes // 4, dtype=torch.int32, device=bench.device)
    best = 0.0
    # More or fewer programs suit different GPUs: the ceiling is the best of them.
    for programs in (8, 16, 32) if bench.on_gpu else (2,):
        count = programs * (torch.cuda.get_device_properties(bench.device).multi_processor_count if bench.on_gpu else 1)
        out = torch.empty(count, dtype=torch.int32, device=bench.device)

        def read(count: int = count, out: torch.Tensor = out) -> None:
            read_kernel[(count,)](source, out, source.numel(), BLOCK=2048, num_warps=8)

        best = max(best, source.nbytes / bench.seconds(read))
        assert int(out.sum()) == source.numel()
    bench.ceilings["read"] = best
    return {"what": "read-only, Triton-lang", "GB/s": best / 1e9, "rate": best}


def _matmul(bench: Bench) -> Result:
    n = bench.sizes.matmul
    left, right = bench.randn(n, n), bench.randn(n, n)
    seconds = bench.seconds(lambda: left @ right)
    bench.ceilings["matmul"] = 2 * n**3 / seconds
    return {
        "what": f"torch, {n}^3, {bench.dtype}",
        "TFLOP/s": bench.ceilings["matmul"] / 1e12,
        "rate": bench.ceilings["matmul"],
    }


TABLE = Table("ceilings", "Measured ceilings", rows)
