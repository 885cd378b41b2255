"""transformers' `generate` with static batching: requests in fixed batches, each as long as its longest member.

Prompts are padded on the left. With `--kv-tokens` every sequence of a batch gets a cache of the maximum length, as a
system without paging must set aside for the longest sequence it allows; the batch is then what that memory holds.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StaticCache, StoppingCriteria

from benchmarks.serving.protocol import MAX_MODEL_LEN, Options, serve
from benchmarks.serving.stats import Timeline
from benchmarks.serving.workload import Item, Plan


class _Clock(StoppingCriteria):
    """Notes when each step's tokens are there; never stops anything."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class StaticRunner:
    """See `protocol.Runner`. `options.kv_tokens` other than the default means reserving `MAX_MODEL_LEN` tokens each."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.threads)
        dtype = getattr(torch, options.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self._dtype = dtype
        self._reserved = options.kv_tokens // MAX_MODEL_LEN if options.kv_tokens != Options.kv_tokens else 0
        self.versions = {name: version(name) for name in ("transformers", "torch")}

    def run(self, plan: Plan) -> list[Timeline]:
        size = min(plan.concurrency, self._reserved) if self._reserved else plan.concurrency
        started = time.perf_counter()
        timelines: list[Timeline] = []
        for first in range(0, len(plan.items), size):
            batch = plan.items[first : first + size]
            times = self._generate(batch)
            # As in a closed loop: a request arrives when its batch begins.
            timelines += [Timeline(started, times[: item.output_tokens]) for item in batch]
            started = time.perf_counter()
        return timelines

    def extras(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        del self._model

    @torch.inference_mode()
    def _generate(self, batch: list[Item]) -> list[float]:
        longest, count = max(len(item.prompt) for item in batch), max(item.output_tokens for item in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(batch):
            ids[row, longest - len(item.prompt) :] = torch.tensor(item.prompt)
            mask[row, longest - len(item.prompt) :] = 1
        config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
        clock = _Clock()
        options: dict[str, Any] = {}
        if self._reserved:
            options["cache"] = StaticCache(config=self._model.config, max_cache_len=MAX_MODEL_LEN)
        output = self._model.generate(
            ids,
            attention_mask=mask,
            generation_config=config,
            stopping_criteria=[clock],
            **options,
        )
        if output.shape[1] != longest + count or len(clock.times) != count:
            raise RuntimeError(f"generate gave {output.shape[1] - longest} tokens where {count} were asked for")
        return clock.times


if __name__ == "__main__":
    serve(StaticRunner, __doc__)
