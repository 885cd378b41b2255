"""Requests to simulate: lengths from the traces in `benchmarks/data`, Poisson arrivals, prompts with a common prefix.

Everything follows from a seed. Knows files and lengths; no scheduler.
"""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"


@dataclass(frozen=True)
class Job:
    """A request to come.

    Attributes:
        arrival: seconds from the start.
        prompt: token ids.
        output_tokens: tokens that each output will have.
        num_sequences: outputs sampled side by side.
        beam_width: beams of a beam search; 0: sampling.
    """

    arrival: float
    prompt: list[int] = field(repr=False)
    output_tokens: int
    num_sequences: int = 1
    beam_width: int = 0


@cache
def load_lengths(trace: str) -> tuple[tuple[int, int], ...]:
    """(prompt tokens, output tokens) pairs of a trace, by the name of its file."""
    with (DATA / f"{trace}.csv").open(newline="") as file:
        rows = csv.DictReader(file)
        return tuple((int(row["prompt_tokens"]), int(row["output_tokens"])) for row in rows)


def sample_lengths(trace: str, count: int, seed: int) -> list[tuple[int, int]]:
    """`count` pairs: whole shuffled passes over the trace, so that even a short sample has nearly the trace's mean."""
    rng = random.Random(f"lengths {seed}")
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        pairs += rng.sample(load_lengths(trace), len(load_lengths(trace)))
    return pairs[:count]


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Arrival times in seconds at `rate` requests per second; another rate only stretches them."""
    rng = random.Random(f"arrivals {seed}")
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(1.0)
        times.append(now / rate)
    return times


def make_jobs(trace: str, count: int, rate: float, seed: int, **kind: int) -> list[Job]:
    """Requests whose prompts are of one token id, for runs without a prefix cache; `kind` as in `Job`."""
    lengths = sample_lengths(trace, count, seed)
    arrivals = poisson_arrivals(count, rate, seed)
    return [
        Job(arrival, [0] * prompt, output, **kind) for arrival, (prompt, output) in zip(arrivals, lengths, strict=True)
    ]


def make_prefixed_jobs(trace: str, count: int, rate: float, seed: int, prefix_tokens: int) -> list[Job]:
    """Requests with one common prefix of `prefix_tokens` in front of prompts that differ."""
    rng = random.Random(f"prefix {seed}")
    prefix = [rng.randrange(50_000) for _ in range(prefix_tokens)]
    lengths = sample_lengths(trace, count, seed)
    arrivals = poisson_arrivals(count, rate, seed)
    return [
        Job(arrival, prefix + [rng.randrange(50_000) for _ in range(prompt)], output)
        for arrival, (prompt, output) in zip(arrivals, lengths, strict=True)
    ]
