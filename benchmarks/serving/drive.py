"""Drives a system that takes requests and yields tokens through a workload, and notes when each token came.

One loop for all systems with a step of their own, so that none has a better client than another. It knows neither
engines nor files. Standard library only: this runs in every peer's environment.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from benchmarks.serving.stats import Timeline
from benchmarks.serving.workload import Item, Plan

# Longest sleep between looks at the clock while nothing is in flight.
_NAP_SECONDS = 0.001


class System(Protocol):
    """A system under test."""

    def add(self, index: int, item: Item) -> None:
        """Take a request; `index` is what its tokens are reported under."""

    def step(self) -> Iterable[tuple[int, int]]:
        """Work, or wait, until there are tokens: (request, how many new ones) pairs; may be none."""


def drive(system: System, plan: Plan) -> list[Timeline]:
    """Run a workload to its end.

    Raises:
        RuntimeError: a request got more tokens than it asked for.
    """
    items, pending = plan.items, list(range(len(plan.items)))[::-1]
    timelines: dict[int, Timeline] = {}
    missing: dict[int, int] = {}
    started = time.perf_counter()
    while pending or missing:
        now = time.perf_counter()
        while pending and len(missing) < plan.concurrency and started + items[pending[-1]].arrival <= now:
            index = pending.pop()
            # In an open loop a request has arrived when it was due, even if the system was busy then. In a closed one
            # the next client comes when a place is free; how long all of them would have queued says nothing.
            timelines[index] = Timeline(started + items[index].arrival if plan.open_loop else now)
            missing[index] = items[index].output_tokens
            system.add(index, items[index])
        if not missing:
            time.sleep(_NAP_SECONDS)
            continue
        for index, count in system.step():
            _note(timelines[index], missing, index, count)
    return [timelines[index] for index in range(len(items))]


def _note(timeline: Timeline, missing: dict[int, int], index: int, count: int) -> None:
    """Tokens that came together have one time."""
    left = missing.get(index, 0) - count
    if left < 0:
        raise RuntimeError(f"request {index} got more tokens than it asked for")
    timeline.tokens += [time.perf_counter()] * count
    if left:
        missing[index] = left
    else:
        del missing[index]
