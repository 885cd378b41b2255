"""Measurements on disk, one JSON object per line: what is there need not be measured again. Knows no systems."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Key(NamedTuple):
    """What a measurement is of.

    `version` is that of the system; measurements of another version are other measurements. `setup` is number type,
    threads and room in the KV cache.
    """

    peer: str
    cell: str
    setup: str
    version: str


@dataclass
class Record:
    """One measurement: `metrics` in seconds, tokens and tokens per second."""

    peer: str
    cell: str
    setup: str
    version: str
    round: int
    metrics: dict[str, float]
    measured_at: str = ""

    @property
    def key(self) -> Key:
        """What it is of."""
        return Key(self.peer, self.cell, self.setup, self.version)


class Results:
    """The measurements of a file.

    Args:
        path: read if it is there; each new measurement is appended at once. Its directory exists.

    Raises:
        ValueError: the file holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records: list[Record] = []
        if not path.is_file():
            return
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                self.records.append(Record(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number} is no measurement ({error}); start anew with --fresh") from error

    def add(self, key: Key, number: int, metrics: dict[str, float]) -> None:
        """Keep a measurement."""
        record = Record(*key, number, metrics, time.strftime("%Y-%m-%dT%H:%M:%S%z"))
        self.records.append(record)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")

    def has(self, key: Key, number: int) -> bool:
        """Whether a round of something has been measured."""
        return any(record.key == key and record.round == number for record in self.records)

    def of(self, keys: Iterable[Key]) -> list[Record]:
        """The measurements of some things, in the order they were made."""
        wanted = set(keys)
        return [record for record in self.records if record.key in wanted]


def medians(records: Sequence[Record]) -> dict[tuple[str, str], dict[str, Any]]:
    """By (peer, cell): the median over rounds of each number, and `rounds`, how many there were."""
    grouped: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for record in records:
        grouped[record.peer, record.cell].append(record.metrics)
    found = {}
    for place, runs in grouped.items():
        names = [name for name in runs[0] if all(name in run for run in runs)]
        found[place] = {name: statistics.median(run[name] for run in runs) for name in names} | {"rounds": len(runs)}
    return found
