"""This project's engine, offline: its own `step()`, without a server."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from importlib.metadata import version

from benchmarks.serving.drive import drive
from benchmarks.serving.protocol import MAX_MODEL_LEN, MAX_NUM_SEQS, Options, serve
from benchmarks.serving.stats import Timeline
from benchmarks.serving.workload import Item, Plan
from paged_backend.config import EngineConfig
from paged_backend.engine.engine import Engine
from paged_backend.sampling_params import SamplingParams

BLOCK_SIZE = 16


def engine_arguments(options: Options) -> dict[str, object]:
    """Engine arguments for a benchmark; what is not named here has its default."""
    return {
        "model": options.model,
        "dtype": options.dtype,
        "num_threads": options.threads,
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": options.kv_tokens // BLOCK_SIZE,
        # As vLLM does. Some virtual machines give memory so late that first uses would be a tenth of W1.
        "populate_kv_cache": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "skip_tokenizer_init": True,
    }


class PagedRunner:
    """See `protocol.Runner`."""

    def __init__(self, options: Options, **changes: object) -> None:
        self._engine = Engine(EngineConfig.from_mapping({**engine_arguments(options), **changes}))
        self.versions = {name: version(name) for name in ("paged-backend", "torch", "numba")}
        self._running: list[int] = []

    def run(self, plan: Plan) -> list[Timeline]:
        self._engine.reset_prefix_cache()
        if plan.prefix:
            drive(self, Plan([Item(0.0, plan.prefix, 1)], 1))
        before = self._engine.stats()["preemptions"]
        self._running = []
        timelines = drive(self, plan)
        self._preemptions = self._engine.stats()["preemptions"] - before
        return timelines

    def extras(self) -> dict[str, float]:
        # A preempted request is between its first and last token, but holds no memory.
        return {
            "mean_in_flight": statistics.fmean(self._running),
            "peak_in_flight": max(self._running),
            "preemptions": self._preemptions,
        }

    def close(self) -> None:
        self._engine.close()

    def add(self, index: int, item: Item) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=item.output_tokens, ignore_eos=True)
        self._engine.add_request(self._engine.make_request(str(index), item.prompt, params))

    def step(self) -> Iterable[tuple[int, int]]:
        self._running.append(len(self._engine.scheduler.running))
        return [(int(delta.request_id), len(delta.token_ids)) for delta in self._engine.step()]


if __name__ == "__main__":
    serve(PagedRunner, __doc__)
