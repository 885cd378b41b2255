"""transformers' continuous batching: its manager, paged attention through sdpa, pages of its default 256 tokens.

A manager and its cache are made for each run, untimed: an idle one would keep a thread busy.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.serving.drive import drive
from benchmarks.serving.protocol import Options, serve
from benchmarks.serving.stats import Timeline
from benchmarks.serving.workload import Item, Plan

PAGE_SIZE = 256
BATCH_TOKENS = 512
_ANSWER_SECONDS = 300.0


class ContinuousRunner:
    """See `protocol.Runner`."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
        ).eval()
        self._kv_tokens = options.kv_tokens
        self.versions = {name: version(name) for name in ("transformers", "torch")}

    def run(self, plan: Plan) -> list[Timeline]:
        config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=self._kv_tokens // PAGE_SIZE,
            max_batch_tokens=BATCH_TOKENS,
            max_requests_per_batch=plan.concurrency,
            auto_switch_to_flash=False,
        )
        self._manager = self._model.init_continuous_batching(GenerationConfig(do_sample=False, eos_token_id=-1), config)
        self._times: dict[int, list[float]] = {}
        self._manager.start()
        try:
            if plan.prefix:
                drive(self, Plan([Item(0.0, plan.prefix, 1)], 1))
            timelines = drive(self, plan)
        finally:
            self._manager.stop(block=True, timeout=60)
        # Results come when a request ends; each token's time, on the same clock, is in them.
        return [Timeline(line.arrival, self._times[index]) for index, line in enumerate(timelines)]

    def extras(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        del self._model

    def add(self, index: int, item: Item) -> None:
        self._manager.add_request(
            item.prompt, request_id=str(index), max_new_tokens=item.output_tokens, record_timestamps=True
        )

    @property
    def _failed(self) -> str:
        error = self._manager.background_thread_status.fatal_error
        return repr(error) if error else f"no result in {_ANSWER_SECONDS:.0f} s"

    def step(self) -> Iterable[tuple[int, int]]:
        result = self._manager.get_result(timeout=_ANSWER_SECONDS)
        if result is None or result.error:
            raise RuntimeError(result.error if result else self._failed)
        if not result.is_finished():
            return []
        self._times[int(result.request_id)] = result.timestamps
        return [(int(result.request_id), len(result.generated_tokens))]


if __name__ == "__main__":
    serve(ContinuousRunner, __doc__)
