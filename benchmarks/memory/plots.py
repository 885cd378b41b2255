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
COLOURS = dict(zip(SYSTEMS, ("#8a8f98", GREEN, ORANGE, BLUE), strict=True))


def draw(tables: dict[str, Table], path: Path) -> None:
    """Write the picture; the suffix of `path` chooses its format."""
    figure = Figure(figsize=(15, 8.5), dpi=120, layout="constrained")
    panels = figure.subplots(2, 3)
    _slots(panels[0, 0], tables["slots"])
    _rates(panels[0, 1], tables["rates"])
    _sharing(panels[0, 2], tables["sharing"])
    _prefixes(panels[1, 0], tables["prefixes"])
    _block_sizes(panels[1, 1], tables["block_sizes"])
    _preemption(panels[1, 2], tables["preemption"])
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "PagedAttention's memory experiments on this scheduler and block manager (simulated 13B, A100 40 GB)"
    )
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
            panel.bar(
                position + 0.26 * (index - 1),
                saved,
                0.24,
                color=colour,
                label=f"{width} outputs" if not position else None,
            )
        low, high = (float(number) for number in re.findall(r"[\d.]+", PAPER_SHARING[kind, trace]))
        label = "paper, 2 to 6" if not position else None
        panel.vlines(position, low, high, color="black", linewidth=2.5, label=label)
    ticks = [f"{kind}\n{NAMES[trace]}" for kind, trace in PAPER_SHARING]
    panel.set_xticks(range(len(ticks)), ticks, fontsize=8)
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
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(BLOCK_SIZES, [str(size) for size in BLOCK_SIZES])
    panel.set(title="Block size", xlabel="tokens per block", ylabel="ms per output token (solid)")
    waste.set(ylabel="% of allocated slots empty (dotted)", ylim=(0, 100))
    waste.spines["top"].set_visible(False)
    panel.legend(fontsize=8, loc="upper center")


def _preemption(panel: Any, table: Table) -> None:
    overheads = list(zip(*table.data["overhead_ms"].values(), strict=True))
    labels = ("recompute", "swap, a copy per block", "swap, a copy per run")
    for values, label, colour in zip(overheads, labels, (ORANGE, GREY, BLUE), strict=True):
        panel.plot(BLOCK_SIZES, values, "o-", color=colour, label=label, markersize=4)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(BLOCK_SIZES, [str(size) for size in BLOCK_SIZES])
    title = f"Losing and regaining {PREEMPTED_TOKENS} tokens"
    panel.set(title=title, xlabel="tokens per block", ylabel="ms")
    panel.legend(fontsize=8)
