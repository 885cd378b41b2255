"""How `paged-backend top` looks: figures to a rich renderable. Reads no metrics."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paged_backend.monitor.top import Figures

# Beyond this the process of a model is taken for dead.
_SILENT_SECONDS = 10.0
_BAR_MARGIN = 8
_STATES = (("used", "red", "█"), ("cached", "yellow", "▓"), ("empty", "green", "░"))


def view(address: str, models: Sequence[Figures], width: int = 80) -> RenderableType:
    """The whole screen."""
    panels = [_panel(figures, max(20, width - _BAR_MARGIN)) for figures in models]
    return Group(Text(f"{address}: rates since the last look, percentiles over the last minute", style="dim"), *panels)


def plain(figures: Figures) -> str:
    """The same in one line, for a pipe or a file."""
    if figures.silent_seconds > _SILENT_SECONDS:
        return f"{figures.model}: {_silence(figures)}"
    return (
        f"{figures.model}: {figures.running:.0f} running, {figures.waiting:.0f} waiting, "
        f"{figures.generation_rate:.1f} generated tokens/s, {figures.prompt_rate:.1f} prompt tokens/s, "
        f"KV blocks {figures.used:.0f} used, {figures.cached:.0f} cached, {figures.empty:.0f} empty, "
        f"TTFT p50 {_seconds(figures.first_token[0])}, TPOT p50 {_seconds(figures.per_token[0])}"
    )


def _silence(figures: Figures) -> str:
    return f"no sign of life for {figures.silent_seconds:.0f} s: the model's process is dead; restart the server"


def _panel(figures: Figures, width: int) -> Panel:
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column()
    for row in _rows(figures):
        table.add_row(*(Text(cell, style="bold" if index % 2 else "dim") for index, cell in enumerate(row)))
    parts: list[RenderableType] = [_bar(figures, width), _legend(figures), table]
    if figures.silent_seconds > _SILENT_SECONDS:
        parts.insert(0, Text(_silence(figures), style="bold red"))
    return Panel(Group(*parts), title=figures.model, title_align="left")


def _rows(figures: Figures) -> list[tuple[str, str, str, str]]:
    ended = ", ".join(f"{count:.0f} {reason}" for reason, count in figures.ended.items() if count) or "none"
    hits = "-" if figures.hit_share is None else f"{100 * figures.hit_share:.0f} %"
    return [
        ("running", f"{figures.running:.0f}", "waiting", f"{figures.waiting:.0f}"),
        ("in flight", f"{figures.in_flight:.0f}", "step", _seconds(figures.step_seconds)),
        ("generated", f"{figures.generation_rate:.1f} tokens/s", "prompts", f"{figures.prompt_rate:.1f} tokens/s"),
        ("TTFT p50", _seconds(figures.first_token[0]), "p95", _seconds(figures.first_token[1])),
        ("TPOT p50", _seconds(figures.per_token[0]), "p95", _seconds(figures.per_token[1])),
        ("prefix hits", hits, "preemptions", f"{figures.preemptions:.0f}"),
        ("ended", ended, "", ""),
    ]


def _bar(figures: Figures, width: int) -> Text:
    """The KV blocks as one bar; a state that has blocks has at least one cell."""
    counts = {state: getattr(figures, state) for state, *_ in _STATES}
    total = sum(counts.values())
    cells = {state: max(1, round(width * count / total)) if count else 0 for state, count in counts.items()}
    largest = max(cells, key=lambda state: cells[state])
    cells[largest] += (width if total else 0) - sum(cells.values())
    bar = Text()
    for state, color, cell in _STATES:
        bar.append(cell * cells[state], style=color)
    return bar


def _legend(figures: Figures) -> Text:
    text = Text("KV blocks: ")
    for state, color, cell in _STATES:
        text.append(f"{cell} {getattr(figures, state):.0f} {state}  ", style=color)
    return text


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1.0 else f"{value:.2f} s"
