"""Runs tables within a time budget, keeps every row at once, and writes them as Markdown.

Results live in one JSON file: {"machine": ..., "tables": {table: {row key: result}}}. A row that is there is not
measured again, so an interrupted report goes on where it stopped; another machine's file is refused.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Result, Table


class Report:
    """The results so far.

    Args:
        path: the JSON file, read if it exists.
        machine: what is measured on.
        deadline: `time.monotonic()` after which no further row starts.
    """

    def __init__(self, path: Path, machine: Result, deadline: float) -> None:
        self.path = path
        self.deadline = deadline
        self.data: dict[str, Any] = {"machine": machine, "tables": {}}
        self.missing: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        if path.exists():
            self.data = json.loads(path.read_text())
            if self.data["machine"] != machine:
                raise SystemExit(
                    f"{path} holds results of another machine ({self.data['machine']}), this is {machine}; "
                    "choose another file with --json, or remove it"
                )

    def run(self, table: Table, bench: Bench) -> dict[str, Result]:
        """Measure the rows of a table that are not there yet, as far as time allows."""
        results = self.data["tables"].setdefault(table.name, {})
        missing = 0
        for key, measure in table.rows(bench):
            if key in results:
                continue
            if time.monotonic() > self.deadline:
                missing += 1
                continue
            result = self._measure(measure, f"{table.name}: {key}")
            if result is not None:
                results[key] = result
                self._save()
        self.missing[table.name] = missing
        return results

    def _measure(self, measure: Any, key: str) -> Result | None:
        """A row, or None if it failed: then the others go on, and another run tries it again."""
        try:
            result = measure()
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            result = {"skipped": f"out of memory: {str(error)[:80]}"}
        except Exception as error:
            self.failed[key] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            print(f"  {key}: FAILED {self.failed[key]}", flush=True)
            return None
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) and k != "rate" else v for k, v in result.items()}
        print(f"  {key}: {rounded}", flush=True)
        return rounded

    def _save(self) -> None:
        # Renamed over the old file: an interruption leaves one that is whole.
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.data, indent=1))
        os.replace(temporary, self.path)

    def markdown(self, tables: Sequence[Table]) -> str:
        """All tables, with what could not be measured in time."""
        lines = ["# GPU report", ""]
        lines += [f"- {name}: {value}" for name, value in self.data["machine"].items()]
        for table in tables:
            results = self.data["tables"].get(table.name, {})
            lines += ["", f"## {table.title}", ""]
            if results:
                lines += _table(results)
            if self.missing.get(table.name):
                lines += ["", f"{self.missing[table.name]} rows were not measured in time; run again to add them."]
        if self.failed:
            lines += ["", "## Failed", "", *(f"- {key}: {what}" for key, what in self.failed.items())]
        return "\n".join(lines) + "\n"


def _table(results: dict[str, Result]) -> list[str]:
    columns = list(dict.fromkeys(name for row in results.values() for name in row if name not in ("rate", "skipped")))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for key, row in results.items():
        if "skipped" in row:
            continue
        cells = ["" if row.get(name) is None else str(row[name]) for name in columns]
        lines.append(f"| {key.replace(' | ', ', ')} | {' | '.join(cells)} |")
    skipped = [key for key, row in results.items() if "skipped" in row]
    if skipped:
        lines += ["", f"Skipped, larger than the memory set aside: {len(skipped)} rows."]
    return lines
