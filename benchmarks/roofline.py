"""The floor: what a step must cost on this machine, from measured memory bandwidth, measured GEMM rate and the model.

    python -m benchmarks.roofline [--dtype bfloat16] [--threads 2] [--model MODEL]

A step reads the weights and the KV of its sequences once, and multiplies every token with the weights; it takes at
least as long as the slower of the two. Not counted: activations, which stay in the caches, and the rows of the
embedding. `ideal_timelines` runs a workload on such steps, scheduled as continuous batching with chunked prefill does:
no system of that kind can be faster on this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# `python benchmarks/roofline.py` puts only this file's folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numba
import numpy as np
import torch

from benchmarks.serving.stats import Timeline
from benchmarks.serving.workload import Plan
from paged_backend.config import DEFAULT_MODEL, DTYPE_BYTES, kv_block_bytes
from paged_backend.model.config import ModelConfig, read_model_config
from paged_backend.model_source import resolve_model
from paged_backend.worker.device import TORCH_DTYPES
from paged_kernels.cpu.linear import LINEAR_ARGUMENTS, PackedLinear, build_linear
from paged_kernels.cpu.runtime import element_type, launch, thread_count

# Tokens of an ideal step at most: the engines' default on CPUs.
TOKEN_BUDGET = 512
# Far beyond any cache.
_READ_BYTES = 1 << 29
_TRIALS = 7
# (rows, depth, outputs): a prefill chunk of the demo model, and large matrices, where libraries are at their best.
_GEMM_SHAPES = ((512, 576, 3072), (512, 1536, 1536), (2048, 2048, 2048))


@dataclass(frozen=True)
class Machine:
    """What was measured: bytes read from memory and floating point operations (two per multiply-add), per second."""

    bandwidth: float
    gemm_rate: float
    dtype: str
    threads: int

    def seconds(self, work: Work) -> float:
        """The least time that this work takes."""
        return max(work.bytes / self.bandwidth, work.flops / self.gemm_rate)

    def __str__(self) -> str:
        return (
            f"{self.bandwidth / 1e9:.1f} GB/s read, {self.gemm_rate / 1e9:.0f} GFLOP/s in {self.dtype} products, "
            f"{self.threads} threads"
        )


@dataclass(frozen=True)
class Work:
    """Bytes that must be read or written and operations that must be done."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Chunk:
    """A sequence's share of a step: tokens computed, tokens in its cache afterwards, and whether it samples."""

    tokens: int
    context: int
    samples: bool = True


class ModelWork:
    """Bytes and operations of the steps of a model.

    Args:
        config: its dimensions.
        dtype: of weights and KV cache.
    """

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        self._itemsize = DTYPE_BYTES[dtype]
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads = config.num_heads
        layer = hidden * dim * (2 * heads + 2 * config.num_kv_heads) + 3 * hidden * inner
        self.layer_weights = config.num_layers * layer
        self.head_weights = config.vocab_size * hidden
        self.kv_bytes = kv_block_bytes(config.shape, 1, dtype)
        # Queries times keys and probabilities times values, per token and token attended to.
        self._attention_flops = 4 * config.num_layers * heads * dim

    def step(self, chunks: Iterable[Chunk]) -> Work:
        """One step's work."""
        tokens = sampled = kv_tokens = attended = 0
        for chunk in chunks:
            tokens += chunk.tokens
            sampled += chunk.samples
            kv_tokens += chunk.context + chunk.tokens
            # Each token sees those before it and itself.
            attended += chunk.tokens * chunk.context - chunk.tokens * (chunk.tokens - 1) // 2
        weights = self.layer_weights + (self.head_weights if sampled else 0)
        flops = 2 * (tokens * self.layer_weights + sampled * self.head_weights) + attended * self._attention_flops
        return Work(weights * self._itemsize + kv_tokens * self.kv_bytes, flops)


class _Ideal:
    """A sequence in the ideal schedule."""

    def __init__(self, index: int, prompt: int, output: int, cached: int) -> None:
        self.index, self.prompt, self.left = index, prompt, output
        self.computed = cached

    def advance(self, budget: int) -> Chunk:
        """Compute what it needs next, at most `budget` tokens: the rest of its prompt, or one token."""
        tokens = min(budget, max(1, self.prompt - self.computed))
        self.computed += tokens
        return Chunk(tokens, self.computed, self.computed >= self.prompt)


def ideal_timelines(plan: Plan, model: ModelWork, machine: Machine, budget: int = TOKEN_BUDGET) -> list[Timeline]:
    """When each token of a workload would come if every step took its floor and nothing else took time."""
    waiting = deque(range(len(plan.items)))
    running: list[_Ideal] = []
    timelines: dict[int, Timeline] = {}
    now = 0.0
    while waiting or running:
        while waiting and len(running) < plan.concurrency and plan.items[waiting[0]].arrival <= now:
            index = waiting.popleft()
            item = plan.items[index]
            timelines[index] = Timeline(item.arrival if plan.open_loop else now)
            running.append(_Ideal(index, len(item.prompt), item.output_tokens, len(plan.prefix)))
        if not running:
            now = plan.items[waiting[0]].arrival
            continue
        now += machine.seconds(model.step(_ideal_step(running, budget, advanced := [])))
        for sequence in advanced:
            timelines[sequence.index].tokens.append(now)
            sequence.left -= 1
        running = [sequence for sequence in running if sequence.left]
    return [timelines[index] for index in range(len(plan.items))]


def _ideal_step(running: Sequence[_Ideal], budget: int, advanced: list[_Ideal]) -> list[Chunk]:
    """Decodes first, then prompts in order of arrival; those that get a token are put into `advanced`."""
    chunks = []
    for sequence in sorted(running, key=lambda one: one.computed < one.prompt):
        if budget > 0:
            chunk = sequence.advance(budget)
            budget -= chunk.tokens
            chunks.append(chunk)
            if chunk.samples:
                advanced.append(sequence)
    return chunks


def measure_machine(dtype: str, threads: int) -> Machine:
    """Measure bandwidth and GEMM rate; takes a few seconds. Leaves torch and numba set to `threads` threads."""
    torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    return Machine(_measure_read(), _measure_gemm(TORCH_DTYPES[dtype]), dtype, threads)


@numba.njit(fastmath=True)
def _sum(data: np.ndarray) -> float:
    total = np.float32(0)
    for i in range(len(data)):
        total += data[i]
    return total


@numba.njit(parallel=True, fastmath=True)
def _read(data: np.ndarray, parts: int) -> float:
    """Sum of `data`, read in parallel. The loop is a function of its own: only so is it vectorised."""
    sums = np.zeros(parts)
    size = len(data) // parts
    for part in numba.prange(parts):
        sums[part] = _sum(data[part * size : (part + 1) * size])
    return sums.sum()


def _measure_read() -> float:
    """Bytes per second: the same large array read several times by two readers, the best of all."""
    data = np.ones(_READ_BYTES // 4, dtype=np.float32)
    tensor, parts = torch.from_numpy(data), 8 * numba.get_num_threads()
    return data.nbytes / min(_best(lambda: _read(data, parts)), _best(tensor.sum))


def _measure_gemm(dtype: torch.dtype) -> float:
    """Operations per second at the shape that is fastest, by torch's kernels or by ours."""
    rates = []
    for rows, depth, outputs in _GEMM_SHAPES:
        a, weight = torch.randn(rows, depth).to(dtype), torch.randn(outputs, depth).to(dtype)
        packed, out = PackedLinear(weight), torch.empty(rows, outputs)
        for work in (
            lambda a=a, w=weight: torch.nn.functional.linear(a, w),
            lambda a=a, p=packed, o=out: _ours(a, p, o),
        ):
            rates.append(2 * rows * depth * outputs / _best(work))
    return max(rates)


def _ours(a: torch.Tensor, packed: PackedLinear, out: torch.Tensor) -> None:
    (rows, depth), (rows_per_item, items) = a.shape, packed.plan(len(a))
    record = LINEAR_ARGUMENTS.pack(
        **packed.fields(), a=a, out=out, rows=rows, rows_per_item=rows_per_item, a_row=depth, out_row=out.shape[1]
    )
    launch(build_linear(element_type(a.dtype), "store"), record, items, thread_count())


def _best(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_TRIALS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def model_work(model: str, dtype: str) -> ModelWork:
    """The work of a model by name or path."""
    return ModelWork(read_model_config(resolve_model(model)), dtype)


def decode_steps(model: ModelWork, machine: Machine) -> str:
    """A table of decode steps: bytes, operations and floor."""
    lines = ["batch  context  MB per step  GFLOP per step  floor ms  tokens/s at the floor"]
    for batch, context in ((1, 128), (1, 2048), (8, 256), (8, 2048), (32, 256), (64, 256)):
        work = model.step([Chunk(1, context)] * batch)
        seconds = machine.seconds(work)
        lines.append(
            f"{batch:5d}  {context:7d}  {work.bytes / 1e6:11.1f}  {work.flops / 1e9:14.2f}  {1e3 * seconds:8.2f}"
            f"  {batch / seconds:21.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The floor of a step on this machine.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parsed = parser.parse_args()
    machine = measure_machine(parsed.dtype, parsed.threads)
    print(f"measured: {machine}")
    print(decode_steps(model_work(parsed.model, parsed.dtype), machine))


if __name__ == "__main__":
    main()
