"""Draws the tables of the memory experiments as one picture of six panels. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.memory.blocks import BLOCK_SIZES, LOADS, PAPER_SHARING, PREEMPTED_TOKENS, WIDTHS
from benchmarks.memory.load import NAMES, PAPER_SLOTS, PREFIXES
from benchmarks.memory.report import Table
from benchmarks.memory.systems import LATENCY_LIMIT, PAGED, SYSTEMS

BLUE, ORANGE, GREEN, GREY = "#2a6fbb", "#d9822b", "#3a8f5c", "#b8bfc6"
MILLISECONDS = (10, 20, 50, 100, 200, 500)
COLOURS = dict(zip(SYSTEMS, ("#8a8f98", GREEN, ORANGE, BLUE), strict=True))


def draw(tables: dict[str, Table], path: Path) -> None:
    """Write the picture; the suffix of `path` chooses its format."""
    panels = {
        "slots": _slots,
        "rates": _rates,
        "sharing": _sharing,
        "prefixes": _prefixes,
        "block_sizes": _block_sizes,
        "preemption": _preemption,
    }
    columns = min(3, len(tables))
    lines = -(-len(tables) // columns)
    figure = Figure(figsize=(5 * columns, 4.25 * lines), dpi=90, layout="constrained")
    for place, (key, table) in enumerate(tables.items(), start=1):
        panel = figure.add_subplot(lines, columns, place)
        panels[key](panel, table)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle("PagedAttention's memory experiments (simulated 13B, A100 40 GB)")
    figure.savefig(path)


def _slots(panel: Any, table: Table) -> None:
    parts = {"held": ("hold tokens", BLUE), "promised": ("promised", "#9dc3ea"), "never_used": ("never used", ORANGE)}
    bottoms = [0.0] * len(SYSTEMS)
    for part, (label, colour) in parts.items():
        values = [100 * table.data[system][part] for system in SYSTEMS]
        panel.bar(SYSTEMS, values, bottom=bottoms, color=colour, label=label)
        bottoms = [low + value for low, value in zip(bottoms, values, strict=True)]
    panel.bar(SYSTEMS, [100 - low for low in bottoms], bottom=bottoms, color=GREY, label="unallocated")
    papers = [float(PAPER_SLOTS[system].split()[0]) for system in SYSTEMS]
    panel.plot(SYSTEMS, papers, "kD", markersize=5, label="paper: hold tokens")
    panel.set(title="What the KV slots hold (ShareGPT-like)", ylabel="% of slots", ylim=(0, 135))
    panel.legend(fontsize=8, ncols=3, loc="upper center")


def _rates(panel: Any, table: Table) -> None:
    for system in SYSTEMS:
        points = [point for point in table.data["sharegpt_like"][system]["points"] if point[1] < 3 * LATENCY_LIMIT]
        panel.plot(*zip(*points, strict=True), "o-", color=COLOURS[system], label=system, markersize=4)
        panel.axvline(table.data["sharegpt_like"][system]["rate"], color=COLOURS[system], linewidth=0.8, linestyle=":")
    panel.axhline(LATENCY_LIMIT, color="black", linewidth=0.8, linestyle="--")
    panel.set(title="Latency under load (ShareGPT-like)", xlabel="requests/s", ylabel="s per output token")
    panel.set(xlim=(0, None), ylim=(0, None))
    panel.legend(fontsize=8, loc="lower right")


def _sharing(panel: Any, table: Table) -> None:
    for position, (kind, trace) in enumerate(PAPER_SHARING):
        for index, (width, colour) in enumerate(zip(WIDTHS, ("#9dc3ea", "#5c98d6", BLUE), strict=True)):
            saved = 100 * table.data[f"{kind} {trace} {width}"]["saved"]
            label = f"{width} outputs" if position == 0 else None
            panel.bar(position + 0.26 * (index - 1), saved, 0.24, color=colour, label=label)
        low, high = (float(number) for number in re.findall(r"[\d.]+", PAPER_SHARING[kind, trace]))
        label = "paper, 2 to 6" if position == 0 else None
        panel.vlines(position, low, high, color="black", linewidth=2.5, label=label)
    ticks = [f"{kind}\n{NAMES[trace]}" for kind, trace in PAPER_SHARING]
    panel.set_xticks(range(len(ticks)), ticks, fontsize=7)
    panel.set(title="Blocks saved by sharing", ylabel="% of blocks without sharing")
    panel.legend(fontsize=8)


def _prefixes(panel: Any, table: Table) -> None:
    names = [f"{name}\n({tokens} tokens)" for name, (tokens, _) in PREFIXES.items()]
    places = range(len(names))
    panel.bar([p - 0.2 for p in places], [table.data[name] for name in PREFIXES], 0.36, color=BLUE, label=PAGED)
    panel.bar([p + 0.2 for p in places], [paper for _, paper in PREFIXES.values()], 0.36, color=GREY, label="paper")
    panel.axhline(1, color="black", linewidth=0.8, linestyle="--")
    panel.set_xticks(places, names)
    panel.set(title="Shared prefix: throughput over Orca (Oracle)", ylabel="ratio")
    panel.legend(fontsize=8)


def _block_sizes(panel: Any, table: Table) -> None:
    waste = panel.twinx()
    for trace, colour in zip(LOADS, (BLUE, ORANGE), strict=True):
        found = [table.data[f"{trace} {size}"] for size in BLOCK_SIZES]
        panel.plot(BLOCK_SIZES, [1e3 * item["latency"] for item in found], "o-", color=colour, label=NAMES[trace])
        waste.plot(BLOCK_SIZES, [100 * item["waste"] for item in found], "s:", color=colour, markersize=3)
    _plain_ticks(panel)
    panel.set(title="Block size", xlabel="tokens per block", ylabel="ms per output token (solid)")
    waste.set(ylabel="% of allocated slots empty (dotted)", ylim=(0, 100))
    waste.spines["top"].set_visible(False)
    panel.legend(fontsize=8, loc="upper center")


def _preemption(panel: Any, table: Table) -> None:
    overheads = list(zip(*table.data["overhead_ms"].values(), strict=True))
    labels = ("recompute", "swap, a copy per block", "swap, a copy per run")
    for values, label, colour in zip(overheads, labels, (ORANGE, GREY, BLUE), strict=True):
        panel.plot(BLOCK_SIZES, values, "o-", color=colour, label=label, markersize=4)
    _plain_ticks(panel)
    title = f"Losing and regaining {PREEMPTED_TOKENS} tokens"
    panel.set(title=title, xlabel="tokens per block", ylabel="ms")
    panel.legend(fontsize=8)


def _plain_ticks(panel: Any) -> None:
    """Block sizes against milliseconds, both logarithmic, with numbers written out."""
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(BLOCK_SIZES, [str(size) for size in BLOCK_SIZES])
    panel.set_yticks(MILLISECONDS, [str(number) for number in MILLISECONDS])
    panel.minorticks_off()
