"""Draws the tables as one picture, a panel each. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.memory.report import Table
from benchmarks.serving.peers import LABELS
from benchmarks.serving.report import LATENCY_LIMIT, columns
from benchmarks.serving.suite import FLOOR, Cell

_COLOURS = dict(zip(LABELS, ("#2a6fbb", "#7fb2e5", "#d9822b", "#3a8f5c", "#8a8f98", "#b8bfc6", "#222222"), strict=True))


def draw(tables: Sequence[tuple[Table, Sequence[Cell]]], title: str, path: Path) -> None:
    """Write the picture; the suffix of `path` chooses its format."""
    across = min(3, len(tables))
    figure = Figure(figsize=(5 * across, 4.2 * -(-len(tables) // across)), dpi=90, layout="constrained")
    for place, (table, cells) in enumerate(tables, start=1):
        panel = figure.add_subplot(-(-len(tables) // across), across, place)
        (_rates if table.key == "w2" else _bars)(panel, table, cells)
        panel.set_title(table.title, fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _bars(panel: Any, table: Table, cells: Sequence[Cell]) -> None:
    """A group of bars per column, a bar per system; the floor is a line across its group."""
    wanted = columns(table.key, cells)
    peers = [peer for peer in LABELS if any(f"{peer} {column.cell}" in table.data for column in wanted)]
    systems = [peer for peer in peers if peer != FLOOR]
    width = 0.8 / max(1, len(systems))
    for place, column in enumerate(wanted):
        for number, peer in enumerate(systems):
            value = table.data.get(f"{peer} {column.cell}", {}).get(column.metric)
            if value is not None:
                left = place - 0.4 + (number + 0.5) * width
                panel.bar(left, column.factor * value, width, color=_COLOURS[peer])
        floor = table.data.get(f"{FLOOR} {column.cell}", {}).get(column.metric)
        if floor is not None:
            panel.hlines(column.factor * floor, place - 0.42, place + 0.42, color=_COLOURS[FLOOR], linewidth=1.5)
    for peer in peers:
        # One entry per system in the legend, whatever was measured of it.
        panel.plot([], [], color=_COLOURS[peer], linewidth=1.5 if peer == FLOOR else 6, label=LABELS[peer])
    panel.set_xticks(range(len(wanted)), [column.title for column in wanted], fontsize=8)
    panel.set_ylim(0, None)


def _rates(panel: Any, table: Table, cells: Sequence[Cell]) -> None:
    """Normalised latency by arrival rate."""
    for peer, label in LABELS.items():
        points = [
            (cell.job.rate, 1e3 * table.data[f"{peer} {cell.job.cell}"]["normalised_latency"])
            for cell in cells
            if f"{peer} {cell.job.cell}" in table.data
        ]
        if points:
            style = ":" if peer == FLOOR else "o-"
            panel.plot(*zip(*points, strict=True), style, color=_COLOURS[peer], label=label, markersize=4)
    panel.axhline(1e3 * LATENCY_LIMIT, color="black", linewidth=0.8, linestyle="--")
    panel.set(xlabel="requests/s", ylabel="ms per output token", ylim=(0, 4e3 * LATENCY_LIMIT))
