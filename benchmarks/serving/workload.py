"""The requests of every workload: lengths, token ids and arrival times, all from one seed.

    w1       64 requests, prompts of 32-512 and outputs of 16-192 tokens, `concurrency` in flight
    w2       the same lengths arriving as a Poisson process of `rate` requests per second
    w3       32 requests that share a prefix of 384 tokens (`cold`: prefixes of the same length that differ)
    w4       8 requests of 1984 tokens: decoding at batch 8 and a context of about 2048
    w5       4 requests one after the other, 128 tokens in and out
    memory   128 short requests for as many in flight as a fixed KV memory holds

Lengths depend on the seed alone, so that every system, round and arrival rate does the same work. Token ids differ from
round to round: no prefix cache can answer one round from an earlier one. Outputs have fixed lengths (end-of-sequence
tokens are ignored) and are chosen greedily. Standard library only: this runs in every peer's environment.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# Of the seeds up to 3000 the one whose samples have the means of their ranges most nearly (within 3 %), so that the
# tables are those of a typical draw.
SEED = 2418
DEMO_VOCABULARY = 49152
# Ids below are the demo model's special tokens, and others' too.
FIRST_ID = 32
SHARED_PREFIX = 384
# Seconds that a run of Poisson arrivals lasts, and the fewest requests in one.
ARRIVAL_SECONDS = 40.0
MIN_ARRIVALS = 24


@dataclass(frozen=True)
class Job:
    """One measurement to make.

    Attributes:
        workload: a name of `WORKLOADS`.
        concurrency: requests in flight at most; 0: no limit.
        rate: requests per second on average (w2).
        cold: w3 without a common prefix.
        round: which repetition this is; decides the token ids.
        requests: cut the workload to so many requests; 0: all of them.
        max_tokens: cut prompts and outputs to so many tokens each; 0: as they are. For trials.
    """

    workload: str
    concurrency: int = 0
    rate: float = 0.0
    cold: bool = False
    round: int = 0
    requests: int = 0
    max_tokens: int = 0

    @property
    def cell(self) -> str:
        """The job's name in a table, whatever the round."""
        parts = [self.workload]
        parts += [f"c{self.concurrency}"] if self.concurrency else []
        parts += [f"r{self.rate:g}"] if self.rate else []
        parts += ["cold"] if self.cold else []
        parts += [f"n{self.requests}"] if self.requests else []
        parts += [f"t{self.max_tokens}"] if self.max_tokens else []
        return "-".join(parts)

    def as_json(self) -> dict[str, Any]:
        """For the other side of the pipe."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """The inverse of `as_json`; unknown keys are refused."""
        known = {item.name for item in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"a job has no field {unknown[0]!r}; it has: {', '.join(sorted(known))}")
        return cls(**values)


@dataclass(frozen=True)
class Item:
    """A request: when it arrives (seconds from the start), its token ids, and how many tokens it gets."""

    arrival: float
    prompt: list[int] = field(repr=False)
    output_tokens: int


@dataclass(frozen=True)
class Plan:
    """What a runner does for a job.

    Attributes:
        items: the requests in order of arrival.
        concurrency: in flight at most.
        prefix: token ids that all prompts begin with; runners serve them once, untimed, before the start. Empty: none.
        open_loop: requests come at their arrival times, whether or not earlier ones have ended.
    """

    items: list[Item]
    concurrency: int
    prefix: list[int] = field(default_factory=list, repr=False)
    open_loop: bool = False


@dataclass(frozen=True)
class Lengths:
    """How many requests a workload has, and the ranges of their lengths in tokens."""

    count: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    concurrency: int


WORKLOADS = {
    "w1": Lengths(64, (32, 512), (16, 192), 64),
    "w2": Lengths(64, (32, 512), (16, 192), 64),
    "w3": Lengths(32, (32, 32), (16, 16), 32),
    "w4": Lengths(8, (1984, 1984), (64, 64), 8),
    "w5": Lengths(4, (128, 128), (128, 128), 1),
    "memory": Lengths(128, (16, 128), (16, 192), 128),
}


def make_plan(job: Job, vocabulary: int = DEMO_VOCABULARY) -> Plan:
    """The requests of a job.

    Args:
        job: what to measure.
        vocabulary: token ids are below it.

    Raises:
        ValueError: no such workload, or a rate that is missing or out of place.
    """
    if job.workload not in WORKLOADS:
        raise ValueError(f"no workload {job.workload!r}; there are: {', '.join(WORKLOADS)}")
    if (job.workload == "w2") != (job.rate > 0):
        raise ValueError("w2, and only w2, takes a rate above 0")
    lengths = WORKLOADS[job.workload]
    count = lengths.count
    if job.workload == "w2":
        count = max(MIN_ARRIVALS, round(job.rate * ARRIVAL_SECONDS))
    count = min(count, job.requests or count)
    rng = random.Random(f"{SEED} lengths {job.workload}")
    sizes = [(rng.randint(*lengths.prompt), rng.randint(*lengths.output)) for _ in range(count)]
    if job.max_tokens:
        sizes = [(min(prompt, job.max_tokens), min(output, job.max_tokens)) for prompt, output in sizes]
    ids = random.Random(f"{SEED} ids {job.cell} {job.round}")

    def tokens(number: int) -> list[int]:
        return [ids.randrange(FIRST_ID, vocabulary) for _ in range(number)]

    prefix_length = min(SHARED_PREFIX, job.max_tokens or SHARED_PREFIX) if job.workload == "w3" else 0
    prefix = tokens(prefix_length)
    arrivals = _poisson_arrivals(count, job.rate) if job.rate else [0.0] * count
    items = [
        Item(arrival, (tokens(prefix_length) if job.cold else prefix) + tokens(prompt), output)
        for arrival, (prompt, output) in zip(arrivals, sizes, strict=True)
    ]
    concurrency = job.concurrency or (count if job.rate else lengths.concurrency)
    return Plan(items, concurrency, [] if job.cold else prefix, open_loop=job.rate > 0)


def _poisson_arrivals(count: int, rate: float) -> list[float]:
    """Seconds from the start; another rate only stretches them. The first request comes at once."""
    rng = random.Random(f"{SEED} arrivals")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times
