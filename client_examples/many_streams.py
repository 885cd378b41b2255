"""Runs many streams at once and sums up: time to the first token (TTFT), and tokens per second over all streams."""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from common import ExampleError, Request, parser, run, text_inputs

TOPICS = ["rivers", "bread", "the moon", "chess", "bees", "bridges", "glass", "rain"]


@dataclass(frozen=True)
class Outcome:
    """One stream: seconds from its start to the first and last response, and tokens received."""

    first: float
    last: float
    tokens: int


def main() -> None:
    arguments_parser = parser(__doc__, prompt=None)
    arguments_parser.add_argument("--streams", type=int, default=16, help="how many at once (default: %(default)s)")
    arguments = arguments_parser.parse_args()
    if arguments.streams < 1:
        raise ExampleError("--streams must be at least 1")

    started = time.perf_counter()
    with ThreadPoolExecutor(arguments.streams) as pool:
        outcomes = list(pool.map(lambda n: one_stream(arguments, n), range(arguments.streams)))
    elapsed = time.perf_counter() - started

    firsts = [outcome.first for outcome in outcomes]
    tokens = sum(outcome.tokens for outcome in outcomes)
    print(f"streams        {len(outcomes)}")
    print(f"TTFT p50       {percentile(firsts, 50) * 1000:.0f} ms")
    print(f"TTFT p95       {percentile(firsts, 95) * 1000:.0f} ms")
    print(f"slowest stream {max(outcome.last for outcome in outcomes):.2f} s")
    print(f"tokens         {tokens} in {elapsed:.2f} s: {tokens / elapsed:.1f} tokens/s")


def one_stream(arguments: argparse.Namespace, number: int) -> Outcome:
    """Run one stream to its end; prompts differ, so that nothing is shared between the streams."""
    prompt = f"{number}. Tell me something about {TOPICS[number % len(TOPICS)]}."
    inputs = text_inputs(prompt, arguments) | {"return_num_output_tokens": True}
    outputs = ["text_output", "num_output_tokens"]
    first = None
    tokens = 0
    started = time.perf_counter()
    with closing(Request(arguments.url, arguments.timeout)) as request:
        for result in request.start(arguments.model, inputs, outputs):
            first = first or time.perf_counter() - started
            tokens += int(result.as_numpy("num_output_tokens").sum())
    if first is None:
        raise ExampleError(f"stream {number} ended without a token")
    return Outcome(first, time.perf_counter() - started, tokens)


def percentile(values: list[float], percent: int) -> float:
    """The value that `percent` % of `values` do not exceed, interpolated."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


if __name__ == "__main__":
    run(main)
