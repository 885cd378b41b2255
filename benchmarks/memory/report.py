"""Tables: what an experiment found, beside the paper's numbers; printed as text, written as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

WIDTH = 110


@dataclass
class Table:
    """An experiment's result.

    Attributes:
        key: name in the JSON file.
        columns, rows: cells are numbers or text.
        notes: what is modelled, and where and why the numbers differ from the paper's.
        data: numbers for plots and programs that have no place in the rows.
    """

    key: str
    title: str
    columns: list[str]
    rows: list[list[Any]]
    notes: list[str]
    data: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For `json.dump`."""
        return asdict(self)

    def as_text(self) -> str:
        """The table in columns, then the notes."""
        cells = [self.columns, *([_show(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = [self.title, "-" * len(self.title)]
        for row in cells:
            first, *others = (
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join([first, *others]).rstrip())
        for note in self.notes:
            lines += textwrap.wrap(note, WIDTH, initial_indent="  * ", subsequent_indent="    ")
        return "\n".join(lines)


@dataclass
class Experiment:
    """Independent runs, and how their results make a table.

    Attributes:
        tasks: (function, arguments) pairs; they may run in other processes.
        assemble: the tasks' results, in order, to the table.
    """

    tasks: list[tuple[Callable[..., Any], tuple[Any, ...]]]
    assemble: Callable[[list[Any]], Table]


def _show(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"
    return str(cell)


def percent(share: float) -> str:
    """A share as text."""
    return f"{100 * share:.1f} %"
