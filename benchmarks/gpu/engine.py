"""Engine level: decode steps of a random-weight Llama-3-8B through the model runner, against the weights' bandwidth.

A decode step must read every weight once and its sequences' keys and values; what that takes at the measured read
ceiling is the floor. Prefill fills the cache first, in steps of a scheduler's size. Sampling is greedy and part of
the step, as is everything the runner does on the host.

Where `EngineConfig` has an option for CUDA graphs (a field with `eager` or `graph` in its name) that `ModelRunner`
takes under the same name, both settings are measured; else there is one row, as the engine is.
"""

from __future__ import annotations

import dataclasses
import inspect
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Result, Row, Table
from benchmarks.gpu.pool import release
from paged_backend.config import EngineConfig
from paged_backend.model.config import ModelConfig, RopeConfig
from paged_backend.model.decoder import Decoder
from paged_backend.sampling_params import SamplingParams
from paged_backend.sched.output import NewSequence, ScheduledSequence, SchedulerOutput
from paged_backend.worker.model_runner import ModelRunner

_LLAMA_3_8B = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_layers=32,
    num_heads=32, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, max_position=8192, rope=RopeConfig(theta=500000.0),
)  # fmt: skip
_TOY = dataclasses.replace(
    _LLAMA_3_8B, vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16,
)  # fmt: skip
# (sequences, context)
_FULL_CASES = ((1, 512), (8, 512), (64, 1024), (256, 1024), (8, 8000))
_STEPS = 40


def rows(bench: Bench) -> Iterator[Row]:
    # Made for the first row that needs it: a continued report may need none.
    models: list[Decoder] = []

    def model() -> Decoder:
        if not models:
            release()
            models.append(random_model(_LLAMA_3_8B if bench.on_gpu else _TOY, bench))
        return models[0]

    for option in graph_options():
        for count, context in _FULL_CASES if bench.on_gpu else ((2, 5),):
            key = " | ".join([f"{count} x {context}", *(f"{name}={value}" for name, value in option.items())])
            yield key, lambda o=option, n=count, c=context: _decode(bench, model(), o, n, c)


def graph_options() -> list[dict[str, bool]]:
    """The settings to compare: of the engine's own option, or none at all."""
    accepted = inspect.signature(ModelRunner).parameters
    for option in dataclasses.fields(EngineConfig):
        about_graphs = "eager" in option.name or "graph" in option.name
        if about_graphs and isinstance(option.default, bool) and option.name in accepted:
            return [{option.name: False}, {option.name: True}]
    return [{}]


def random_model(config: ModelConfig, bench: Bench) -> Decoder:
    """A decoder of that shape; weights small enough that nothing overflows."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(bench.dtype)
    try:
        with torch.device(bench.device):
            model = Decoder(config)
    finally:
        torch.set_default_dtype(before)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    # Made under the default type, they are float32 in a loaded model.
    model.frequencies = model.frequencies.float()
    return model.eval()


def _decode(bench: Bench, model: Decoder, options: dict[str, bool], count: int, context: int) -> Result:
    config = model.config
    page = bench.sizes.pages[0]
    steps = _STEPS if bench.on_gpu else 3
    each = -(-(context + steps + 1) // page)
    # Block 0 is the null block.
    shape = (config.num_layers, 2, count * each + 1, config.num_kv_heads, page, config.head_dim)
    cache = torch.zeros(shape, dtype=bench.dtype, device=bench.device)
    runner = ModelRunner(model, cache, count, "triton", **options)  # type: ignore[arg-type]
    _prefill(runner, config, count, context, each)
    times = []
    for step in range(steps):
        scheduled = [ScheduledSequence(i, context + step, 1, (i,)) for i in range(count)]
        began = time.perf_counter()
        runner.execute(SchedulerOutput(scheduled=scheduled, num_scheduled_tokens=count))
        times.append(time.perf_counter() - began)
    # The first steps compile or capture.
    seconds = statistics.median(times[len(times) // 4 :])
    return _against_the_floor(bench, model, count, context, seconds)


def _prefill(runner: ModelRunner, config: ModelConfig, count: int, context: int, blocks: int) -> None:
    """Whole prompts, a few thousand tokens at a time."""
    params = SamplingParams(temperature=0, max_tokens=10**6, ignore_eos=True)
    generator = torch.Generator().manual_seed(0)
    together = max(1, 8192 // context)
    for first in range(0, count, together):
        plan = SchedulerOutput()
        for i in range(first, min(count, first + together)):
            prompt: list[int] = torch.randint(0, config.vocab_size, (context,), generator=generator).tolist()
            block_ids = list(range(1 + i * blocks, 1 + (i + 1) * blocks))
            plan.new.append(NewSequence(i, prompt, context, block_ids, params, seed=i))
            plan.scheduled.append(ScheduledSequence(i, 0, context, (i,)))
        plan.num_scheduled_tokens = context * len(plan.new)
        runner.execute(plan)


def _against_the_floor(bench: Bench, model: Decoder, count: int, context: int, seconds: float) -> Result:
    config = model.config
    # The embedding is looked up, not read.
    weights = sum(p.nbytes for p in model.parameters()) - (0 if config.tie_word_embeddings else model.embedding.nbytes)
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * bench.dtype.itemsize * count * context
    result: dict[str, Any] = {
        "ms per step": seconds * 1e3, "tokens/s": count / seconds, "weights GB": weights / 1e9, "KV GB": kv / 1e9,
    }  # fmt: skip
    if "read" in bench.ceilings:
        floor = (weights + kv) / bench.ceilings["read"]
        result |= {"floor ms": floor * 1e3, "% of floor": 100 * floor / seconds}
    return result


TABLE = Table("engine", "Engine: decode steps of a random-weight Llama-3-8B", rows)
