"""The gate before any number: the kernels agree with the reference on this machine, on the tests' own cases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.gpu.bench import Bench, Result, Row, Table

# The cases are the tests': pure torch, no pytest.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "kernels"))


def rows(bench: Bench) -> Iterator[Row]:
    from kernel_cases import GRID, check_attention, long_batch, mixed_batch, to_device
    from operation_cases import check_operation, operation_grid
    from option_cases import OPTION_GRID, option_batch, short_batch

    device = bench.device.type

    def attention(make: Callable, *arguments) -> Callable[[], Result]:
        return lambda: passed(lambda: check_attention(to_device(make(*arguments), device), "triton"))

    grid = GRID if bench.on_gpu else GRID[:1]
    for page, dim, group in grid:
        yield f"mixed p{page} d{dim} g{group}", attention(mixed_batch, page, dim, group, bench.dtype)
    for page, dim, group, options in OPTION_GRID if bench.on_gpu else OPTION_GRID[:1]:
        yield f"options {options}", attention(option_batch, page, dim, group, bench.dtype, options)
    if bench.on_gpu:
        yield "long contexts", attention(long_batch, 64, 128, 4, bench.dtype, 20_000)
        yield "short queries", attention(short_batch, 64, 128, 4, bench.dtype)
    for name, dtype in operation_grid(bench.dtype):
        if bench.on_gpu or name == "silu_mul":
            yield name, lambda n=name, d=dtype: passed(lambda: check_operation(n, d, device, "triton"))


def passed(check: Callable[[], None]) -> Result:
    try:
        check()
    except AssertionError as error:
        return {"agrees": False, "difference": str(error).strip()[:400]}
    return {"agrees": True}


def require_agreement(results: dict[str, Result], failed: dict[str, str]) -> None:
    """Stop before measuring what is wrong."""
    wrong = {key: row["difference"] for key, row in results.items() if row.get("agrees") is False} | failed
    if wrong:
        lines = "\n".join(f"  {key}: {what}" for key, what in wrong.items())
        raise SystemExit(f"the kernels are wrong on this machine, so nothing is measured:\n{lines}")


TABLE = Table("correctness", "Agreement with the reference", rows)
