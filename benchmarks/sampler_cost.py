"""What choosing tokens costs beside computing logits: the share of a decode step, on the demo model.

    python benchmarks/sampler_cost.py [--rows 64] [--context 256] [--steps 40] [--model ...]

Runs real decode steps of the worker with so many sequences and times, inside each, the model (up to the logits) and
everything after it (constraints, penalties, sampling, log-probabilities, the rows' new tokens). Each mixture of
requests is one line. The budget: 10 % of a step for mixtures of greedy, sampled and penalised rows, at 64 rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# `python benchmarks/sampler_cost.py` puts only this file's folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from paged_backend.config import DEFAULT_MODEL, EngineConfig
from paged_backend.engine.engine import Engine
from paged_backend.sampling_params import SamplingParams
from paged_backend.worker import model_runner

GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
TOP_K: dict[str, Any] = {"temperature": 1.0, "top_k": 50}
MIN_P: dict[str, Any] = {"temperature": 1.2, "min_p": 0.05}
PENALISED: dict[str, Any] = {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
RULED: dict[str, Any] = {"logit_bias": {100: 2.0}, "bad_words": ["the", "in spite of"], "min_tokens": 8}
ALLOWED: dict[str, Any] = {"temperature": 0.8, "allowed_token_ids": list(range(100, 20000))}
LOGPROBS: dict[str, Any] = {"temperature": 0, "logprobs": 5}
FORM: dict[str, Any] = {"temperature": 0.8, "structured_outputs": {"regex": "[a-z ]{4000}"}}

# What the rows of a batch ask for, in turn.
MIXTURES: dict[str, list[dict[str, Any]]] = {
    "greedy": [GREEDY],
    "sampled, top-p": [SAMPLED],
    "sampled, top-k": [TOP_K],
    "sampled, min-p": [MIN_P],
    "penalised": [PENALISED],
    "greedy, sampled, penalised": [GREEDY, SAMPLED, TOP_K, PENALISED],
    "all samplers": [GREEDY, SAMPLED, TOP_K, MIN_P, PENALISED],
    "token rules": [RULED],
    "allowed tokens": [ALLOWED],
    "log-probabilities": [LOGPROBS],
    "a form": [FORM],
    "1 row of a form, else greedy": [FORM, *[GREEDY] * 63],
}


class Stopwatch:
    """Sums the time spent in a function."""

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self._function = function
        self._device = device
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._wait()
        started = time.perf_counter()
        result = self._function(*args, **kwargs)
        self._wait()
        self.seconds += time.perf_counter() - started
        return result

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(engine: Engine, mixture: list[dict[str, Any]], rows: int, context: int, steps: int) -> tuple[float, float]:
    """Median milliseconds of a decode step and of choosing its tokens."""
    for index in range(rows):
        params = SamplingParams(max_tokens=steps + 8, ignore_eos=True, seed=index, **mixture[index % len(mixture)])
        prompt = [(index * 31 + position * 7) % 20000 + 100 for position in range(context)]
        engine.add_request(engine.make_request(str(index), prompt, params))
    chosen = model_runner.choose_tokens
    watch = Stopwatch(chosen, torch.device(engine.config.device))
    model_runner.choose_tokens = watch
    step_times, choice_times = [], []
    try:
        while engine.has_unfinished_requests():
            watch.seconds = 0.0
            before = engine.stats()["generation_tokens"]
            started = time.perf_counter()
            engine.step()
            elapsed = time.perf_counter() - started
            # Whole decode steps only: every row gets a token, and no prompt is computed.
            if engine.stats()["generation_tokens"] - before == rows and engine.stats()["requests_running"] == rows:
                step_times.append(elapsed)
                choice_times.append(watch.seconds)
    finally:
        model_runner.choose_tokens = chosen
    # The first few still warm up.
    return 1e3 * statistics.median(step_times[2:]), 1e3 * statistics.median(choice_times[2:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Cost of choosing tokens as a share of a decode step.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parsed = parser.parse_args()
    blocks = parsed.rows * ((parsed.context + parsed.steps + 16) // 16 + 2)
    engine = Engine(
        EngineConfig(
            model=parsed.model,
            max_num_seqs=parsed.rows,
            block_size=16,
            num_kv_blocks=blocks,
            max_num_batched_tokens=max(512, parsed.rows),
        )
    )
    print(f"{parsed.rows} rows, context {parsed.context}, {engine.config.dtype} on {engine.config.device}")
    print(f"{'mixture':30}  step ms  choice ms  share")
    for name, mixture in MIXTURES.items():
        step, choice = measure(engine, mixture, parsed.rows, parsed.context, parsed.steps)
        print(f"{name:30}  {step:7.1f}  {choice:9.2f}  {choice / step:5.1%}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
