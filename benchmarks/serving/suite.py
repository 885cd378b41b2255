"""What each table measures: jobs, the systems that take part, and how often. Knows no processes and no results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.serving.protocol import KV_TOKENS, MAX_MODEL_LEN
from benchmarks.serving.workload import Job

CONCURRENCY = (1, 8, 32, 64)
RATES = (1.0, 1.5, 2.0, 2.5, 3.0)
# One request at a time takes four times as long as eight: a quarter of them must do.
SINGLE_REQUESTS = 16
# KV memory of the `memory` table: eight sequences of the maximum length.
RESERVED_SEQUENCES = 8
FLOOR = "floor"


@dataclass(frozen=True)
class Cell:
    """One place in a table: what is measured, on which systems, with room for how many tokens in the KV cache."""

    job: Job
    peers: tuple[str, ...]
    kv_tokens: int = KV_TOKENS


@dataclass(frozen=True)
class Measurement:
    """A cell's measurement of one system in one round."""

    peer: str
    cell: Cell

    @property
    def job(self) -> Job:
        """What to measure."""
        return self.cell.job


def w1(concurrency: Sequence[int] = CONCURRENCY) -> list[Cell]:
    """Throughput by concurrency."""
    cells = []
    for count in concurrency:
        peers = ("ours", "vllm", "llama.cpp", "triton")
        peers += ("transformers",) if count > 1 else ()
        peers += ("transformers-cb",) if count == 32 else ()
        cells.append(Cell(Job("w1", count, requests=SINGLE_REQUESTS if count == 1 else 0), peers))
    return cells


def w2(rates: Sequence[float] = RATES) -> list[Cell]:
    """Latency by arrival rate."""
    return [Cell(Job("w2", rate=rate), ("ours", "vllm", "triton")) for rate in rates]


def w3() -> list[Cell]:
    """Without and with a common prefix in the cache."""
    return [Cell(Job("w3", cold=cold), ("ours", "vllm", "llama.cpp", "triton")) for cold in (True, False)]


def w4() -> list[Cell]:
    """Decode step at batch 8 and context 2048."""
    return [Cell(Job("w4"), ("ours", "vllm", "llama.cpp", "transformers"))]


def w5() -> list[Cell]:
    """One stream."""
    return [Cell(Job("w5"), ("ours", "vllm", "llama.cpp", "triton", "transformers"))]


def memory() -> list[Cell]:
    """As many requests as the KV memory of eight reserved sequences holds."""
    kv_tokens = RESERVED_SEQUENCES * MAX_MODEL_LEN
    return [Cell(Job("memory"), ("ours", "vllm", "transformers"), kv_tokens)]


TABLES = {"w1": w1, "w2": w2, "w3": w3, "w4": w4, "w5": w5, "memory": memory}


def select(
    table: str, concurrency: Sequence[int], rates: Sequence[float], requests: int = 0, max_tokens: int = 0
) -> list[Cell]:
    """A table's cells; `requests` and `max_tokens` above 0 cut the workloads, for trials."""
    cells = w1(concurrency) if table == "w1" else w2(rates) if table == "w2" else TABLES[table]()
    if not requests and not max_tokens:
        return cells
    return [
        replace(
            cell,
            job=replace(cell.job, requests=requests or cell.job.requests, max_tokens=max_tokens or cell.job.max_tokens),
        )
        for cell in cells
    ]


def order(
    cells: Sequence[Cell], peers: Sequence[str], slow: Sequence[str], rounds: int
) -> list[tuple[int, Measurement]]:
    """Rounds of all systems in turn, so that what changes on the machine meanwhile meets all of them alike.

    Args:
        cells: of the table.
        peers: systems that take part.
        slow: those that are measured in the first round only.
        rounds: how many.
    """
    return [
        (number, Measurement(peer, cell))
        for number in range(rounds)
        for cell in cells
        for peer in cell.peers
        if peer in peers and (number == 0 or peer not in slow)
    ]
