"""What all tables share: the machine, sizes, a clock, a pool of keys and values, and what a table is.

Times are GPU times between two events, median of several runs, each behind a pass over a buffer larger than the L2
cache: what is measured comes from memory, and the launch is queued while that pass runs. On a CPU (interpreted, toy
sizes) the wall clock stands in: such numbers say only that everything runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

Result = dict[str, Any]
Row = tuple[str, Callable[[], Result]]


@dataclass(frozen=True)
class Sizes:
    """How large the measured problems are."""

    heads: tuple[tuple[str, int, int, int], ...]  # name, query heads, kv heads, head dim
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    pages: tuple[int, ...]
    prefill: tuple[tuple[int, int, int], ...]  # sequences, new tokens of each, context of each
    tokens: tuple[int, ...]
    vocabulary: int
    copy_bytes: int
    matmul: int
    pool_bytes: int
    runs: int


FULL = Sizes(
    heads=(
        ("32/8x128 (Llama-3-8B)", 32, 8, 128),
        ("8/1x128 (Llama-3-70B, TP 8)", 8, 1, 128),
        ("28/4x128 (Qwen2.5-7B)", 28, 4, 128),
        ("32/32x128 (Llama-2-7B)", 32, 32, 128),
        ("32/8x64 (Llama-3.2-1B)", 32, 8, 64),
    ),
    batches=(1, 4, 16, 64, 256),
    contexts=(1024, 8192, 32768, 131072),
    pages=(64, 16),
    prefill=((1, 512, 512), (1, 8192, 8192), (16, 512, 512), (4, 2048, 2048), (8, 512, 16384), (1, 2048, 65536)),
    tokens=(1, 64, 1024, 8192),
    vocabulary=128_256,
    copy_bytes=2 << 30,
    matmul=8192,
    pool_bytes=24 << 30,
    runs=12,
)
TOY = Sizes(
    heads=(("4/2x16", 4, 2, 16),),
    batches=(2,),
    contexts=(17, 40),
    pages=(16,),
    prefill=((2, 20, 33),),
    tokens=(1, 3),
    vocabulary=200,
    copy_bytes=1 << 12,
    matmul=32,
    pool_bytes=1 << 20,
    runs=1,
)


@dataclass
class Bench:
    """One machine and what has been measured on it.

    Attributes:
        device: of all tensors; sizes: of the problems; dtype: of queries, weights and plain caches.
        ceilings: `copy`, `read` (bytes per second) and `matmul` (FLOP per second), once they are measured.
    """

    device: torch.device
    sizes: Sizes
    dtype: torch.dtype = torch.bfloat16
    ceilings: dict[str, float] = field(default_factory=dict)
    _flush: torch.Tensor | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def seconds(self, function: Callable[[], object]) -> float:
        """Median time of a call, after one to compile and one to warm up; on a CPU of one call."""
        if not self.on_gpu:
            began = time.perf_counter()
            function()
            return time.perf_counter() - began
        function()
        function()
        if self._flush is None:
            self._flush = torch.empty(256 << 20, dtype=torch.int8, device=self.device)
        times = []
        for _ in range(self.sizes.runs):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        return statistics.median(times)

    def share(self, ceiling: str, rate: float) -> float | None:
        """Percent of a measured ceiling."""
        return round(100 * rate / self.ceilings[ceiling], 1) if self.ceilings.get(ceiling) else None

    def ints(self, values: Any) -> torch.Tensor:
        """int32 on the device."""
        return torch.as_tensor(values, dtype=torch.int32).to(self.device)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype or self.dtype)


@dataclass(frozen=True)
class Table:
    """One table: rows have keys that stay the same between runs, so that a report can be continued."""

    name: str
    title: str
    rows: Callable[[Bench], Iterator[Row]]


def machine(bench: Bench) -> Result:
    """What the numbers were measured on."""
    import triton

    facts: Result = {"torch": torch.__version__, "triton": triton.__version__}
    if not bench.on_gpu:
        return facts | {"device": "cpu, interpreted: times mean nothing"}
    properties = torch.cuda.get_device_properties(bench.device)
    return facts | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory GiB": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }
