"""How the harness talks to a system under test: a process that prints one JSON object per line.

    python -m benchmarks.serving.run_vllm --model DIR --workload w1 --concurrency 8     one measurement, then the end
    python -m benchmarks.serving.run_vllm --model DIR --serve                           a job per line of its input

The first line says that the system is loaded, with its versions; each following one is a measurement or why there is
none. So a system is loaded once, however many measurements are interleaved with others'. What libraries print goes to
standard error. Standard library only: this runs in every peer's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from benchmarks.serving.stats import Timeline, summarise
from benchmarks.serving.workload import DEMO_VOCABULARY, Job, Plan, make_plan

# Room for all requests of all workloads; the workload `memory` sets its own.
KV_TOKENS = 65536
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 128
_WARM_UPS = (
    Job("w5", requests=1, max_tokens=8, round=-1),
    Job("w1", concurrency=8, requests=12, max_tokens=24, round=-1),
)


@dataclass(frozen=True)
class Options:
    """How a system is set up, the same for all of them.

    Attributes:
        model: directory with safetensors, or a GGUF file for those that read it.
        dtype: of weights and KV cache: float32 or bfloat16.
        threads: compute threads.
        kv_tokens: tokens that the KV cache has room for.
        vocabulary: token ids in prompts are below it.
    """

    model: str
    dtype: str = "bfloat16"
    threads: int = 2
    kv_tokens: int = KV_TOKENS
    vocabulary: int = DEMO_VOCABULARY


class Runner(Protocol):
    """A loaded system."""

    versions: dict[str, str]

    def run(self, plan: Plan) -> list[Timeline]:
        """Serve a workload; one timeline per request, in their order. Nothing of earlier runs may be cached."""

    def extras(self) -> dict[str, float]:
        """Numbers of the last run that the timelines do not hold; they go over those computed from the timelines."""

    def close(self) -> None:
        """Release everything."""


def serve(make: Callable[[Options], Runner], description: str | None) -> None:
    """The main function of a runner."""
    parsed = _parser(description).parse_args()
    options = Options(parsed.model, parsed.dtype, parsed.threads, parsed.kv_tokens, parsed.vocabulary)
    output = _take_standard_output()
    # The harness ends a runner this way; what it started must end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.perf_counter()
    runner = make(options)
    try:
        ready = {"load_seconds": round(time.perf_counter() - started, 3), "python": platform.python_version()}
        _write(output, {"ready": True, **ready, "versions": runner.versions})
        jobs = map(json.loads, sys.stdin) if parsed.serve else iter([_job(parsed).as_json()])
        _answer(runner, options, jobs, output)
    finally:
        runner.close()


def _answer(runner: Runner, options: Options, jobs: Iterable[dict[str, Any]], output: TextIO) -> None:
    """A job that fails is answered with its error: what follows it may work."""
    warm = False
    for values in jobs:
        try:
            if not warm:
                for job in _WARM_UPS:
                    runner.run(make_plan(job, options.vocabulary))
                warm = True
            job = Job.from_json(values)
            timelines = runner.run(make_plan(job, options.vocabulary))
            _write(output, {"job": values, "metrics": {**summarise(timelines), **runner.extras()}})
        except Exception as error:
            traceback.print_exc()
            _write(output, {"job": values, "error": f"{type(error).__name__}: {error}"[:500]})


def _take_standard_output() -> TextIO:
    """The real standard output; whatever else is written there, also by native code, goes to standard error."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return own


def _write(output: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=output, flush=True)


def _job(parsed: argparse.Namespace) -> Job:
    return Job(
        parsed.workload,
        parsed.concurrency,
        parsed.rate,
        parsed.cold,
        parsed.round,
        parsed.requests,
        parsed.max_tokens,
    )


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="directory with safetensors, or a GGUF file for llama.cpp")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default=Options.dtype)
    parser.add_argument("--threads", type=int, default=Options.threads)
    parser.add_argument("--kv-tokens", type=int, default=Options.kv_tokens)
    parser.add_argument("--vocabulary", type=int, default=Options.vocabulary)
    parser.add_argument("--serve", action="store_true", help="read jobs from standard input, one JSON object per line")
    parser.add_argument("--workload", default="w5")
    parser.add_argument("--concurrency", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--round", type=int, default=0)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=0)
    return parser
