"""From medians to tables: one per workload, each with the floor of this machine beside the systems.

Knows what the numbers of a measurement mean and how a table reads; nothing of how they were measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.memory.report import Table, percent
from benchmarks.roofline import TOKEN_BUDGET, Chunk, Machine, ModelWork, ideal_timelines
from benchmarks.serving.peers import LABELS
from benchmarks.serving.stats import summarise, sustainable_rate
from benchmarks.serving.suite import FLOOR, Cell
from benchmarks.serving.workload import make_plan

# Normalised latency, in seconds per token, up to which an arrival rate counts as sustained.
LATENCY_LIMIT = 0.050
# Share of the CPU time that others may take before a table says so.
DISTURBED = 0.05
TITLES = {
    "w1": "W1. Output tokens per second by requests in flight",
    "w2": "W2. Latency at Poisson arrivals",
    "w3": "W3. Seconds for 32 prompts with a prefix of 384 tokens",
    "w4": "W4. Decoding at batch 8 and context 2048",
    "w5": "W5. One stream, 128 tokens in and out",
    "memory": "Equal KV memory: 16384 tokens, maximum length 2048",
}
Found = dict[tuple[str, str], dict[str, Any]]


class Column(NamedTuple):
    """A number of a table: which metric of which cell, in what unit, and whether more of it is better."""

    title: str
    cell: str
    metric: str
    factor: float = 1.0
    more_is_better: bool = False


@dataclass(frozen=True)
class Floor:
    """What the floor is computed from."""

    machine: Machine
    model: ModelWork

    def of(self, cells: Sequence[Cell]) -> Found:
        """The metrics of cells at the floor."""
        return {
            (FLOOR, cell.job.cell): summarise(ideal_timelines(make_plan(cell.job), self.model, self.machine))
            for cell in cells
        }

    def notes(self, cells: Sequence[Cell]) -> list[str]:
        """The machine, and the steps that the cells consist of."""
        lines = [f"Floor: {self.machine}; a step takes at least the longer of its reading and its arithmetic."]
        seen = set()
        for cell in cells:
            plan = make_plan(cell.job)
            context = round(statistics.fmean(len(item.prompt) + item.output_tokens / 2 for item in plan.items))
            batch = min(plan.concurrency, len(plan.items))
            if not cell.job.rate and (batch, context) not in seen:
                seen.add((batch, context))
                lines.append(self._step_note(f"Decode step, {batch} x context {context}", [Chunk(1, context)] * batch))
        lines.append(self._step_note(f"Prefill step, {TOKEN_BUDGET} tokens", [Chunk(TOKEN_BUDGET, TOKEN_BUDGET)]))
        return lines

    def _step_note(self, name: str, chunks: list[Chunk]) -> str:
        work = self.model.step(chunks)
        bound = "memory" if work.bytes / self.machine.bandwidth > work.flops / self.machine.gemm_rate else "arithmetic"
        milliseconds = 1e3 * self.machine.seconds(work)
        return f"{name}: {work.bytes / 1e6:.0f} MB, {work.flops / 1e9:.1f} GFLOP, >= {milliseconds:.1f} ms ({bound})."


def columns(table: str, cells: Sequence[Cell]) -> list[Column]:
    """The columns of a table; w2 has one set of them per rate."""
    made = []
    for cell in cells:
        name, job = cell.job.cell, cell.job
        if table == "w1":
            made.append(Column(str(job.concurrency), name, "output_tokens_per_s", more_is_better=True))
        elif table == "w2":
            made += [
                Column("TTFT p50 ms", name, "ttft_p50", 1e3),
                Column("TTFT p95 ms", name, "ttft_p95", 1e3),
                Column("TPOT ms", name, "tpot_mean", 1e3),
                Column("latency/token ms", name, "normalised_latency", 1e3),
            ]
        elif table == "w3":
            made.append(Column("nothing cached" if job.cold else "prefix cached", name, "seconds"))
        elif table == "w4":
            made.append(Column("step ms", name, "step", 1e3))
        elif table == "w5":
            made += [Column("TTFT ms", name, "ttft_p50", 1e3), Column("TPOT ms", name, "tpot_p50", 1e3)]
        else:
            made += [
                Column("in flight, mean", name, "mean_in_flight", more_is_better=True),
                Column("peak", name, "peak_in_flight", more_is_better=True),
                Column("tokens/s", name, "output_tokens_per_s", more_is_better=True),
            ]
    return made


def build(table: str, cells: Sequence[Cell], found: Found, floor: Floor, versions: dict[str, dict[str, str]]) -> Table:
    """A table of what has been measured."""
    every = found | floor.of(cells)
    rows = _rate_rows(cells, every) if table == "w2" else _rows(columns(table, cells), every)
    head = [column.title for column in columns(table, cells[:1] if table == "w2" else cells)]
    notes = floor.notes(cells) + _notes(table, cells, every) + _provenance(found, versions)
    data = {f"{peer} {cell}": numbers for (peer, cell), numbers in every.items()}
    return Table(table, TITLES[table], ["system", *head], rows, notes, data)


def _peers(found: Found) -> list[str]:
    present = {peer for peer, _ in found}
    return [peer for peer in LABELS if peer in present]


def _value(found: Found, peer: str, column: Column) -> float | None:
    number = found.get((peer, column.cell), {}).get(column.metric)
    return None if number is None else column.factor * number


def _rows(wanted: Sequence[Column], found: Found) -> list[list[Any]]:
    """A row per system, then how many times better ours is, and our share of the floor."""
    peers = _peers(found)
    rows = [[LABELS[peer], *(_cell(_value(found, peer, column)) for column in wanted)] for peer in peers]
    for peer in peers:
        if "ours" not in peers or peer == "ours":
            continue
        name = "offline, of the floor" if peer == FLOOR else f"offline : {LABELS[peer]}"
        rows.append([name, *(_ratio(found, peer, column) for column in wanted)])
    return rows


def _rate_rows(cells: Sequence[Cell], found: Found) -> list[list[Any]]:
    rows = []
    for cell in cells:
        for peer in _peers(found):
            if (peer, cell.job.cell) in found:
                values = [_cell(_value(found, peer, column)) for column in columns("w2", [cell])]
                rows.append([f"{cell.job.rate:g}/s  {LABELS[peer]}", *values])
    return rows


def _cell(number: float | None) -> Any:
    return "-" if number is None else number


def _ratio(found: Found, peer: str, column: Column) -> str:
    """How many times better ours is than a system, or its share of the floor."""
    ours, other = _value(found, "ours", column), _value(found, peer, column)
    if not ours or not other:
        return "-"
    ratio = ours / other if column.more_is_better else other / ours
    return percent(ratio) if peer == FLOOR else f"{ratio:.2f}x"


def _notes(table: str, cells: Sequence[Cell], found: Found) -> list[str]:
    if table != "w2":
        return ["n.nnx: how many times better the offline engine is."]
    lines = []
    for peer in _peers(found):
        points = [
            (cell.job.rate, found[peer, cell.job.cell]["normalised_latency"])
            for cell in cells
            if (peer, cell.job.cell) in found
        ]
        rate = sustainable_rate(points, LATENCY_LIMIT)
        if rate is None and points:
            text = f"{'below' if points[0][1] > LATENCY_LIMIT else 'above'} the rates measured"
        else:
            text = f"{rate:.2f} requests/s"
        lines.append(f"Sustained at {1e3 * LATENCY_LIMIT:.0f} ms per token, {LABELS[peer]}: {text}.")
    return lines


def _provenance(found: Found, versions: dict[str, dict[str, str]]) -> list[str]:
    lines = []
    rounds = {
        peer: [numbers["rounds"] for (name, _), numbers in found.items() if name == peer] for peer in _peers(found)
    }
    if rounds:
        counts = (f"{LABELS[peer]} {min(n)}" + (f"-{max(n)}" if max(n) > min(n) else "") for peer, n in rounds.items())
        lines.append(f"Medians over interleaved rounds: {', '.join(counts)}.")
    for peer, packages in versions.items():
        lines.append(f"{LABELS[peer]}: {', '.join(f'{name} {number}' for name, number in packages.items())}.")
    disturbed = [f"{peer} {cell}" for (peer, cell), n in found.items() if n.get("other_cpu", 0.0) > DISTURBED]
    if disturbed:
        lines.append(
            f"NOT QUIET: other processes took more than {percent(DISTURBED)} of the CPU time during "
            f"{', '.join(sorted(disturbed))}. These numbers say little."
        )
    return lines
