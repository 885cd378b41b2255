"""Prometheus text to numbers: one `Scrape` of a server's metrics, and what two of them say about the time between.

Knows the exposition format and the arithmetic of counters and histograms; which metrics there are is others' business.
"""

from __future__ import annotations

import http.client
import math
import re
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from paged_backend.errors import PagedBackendError

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Labels = frozenset[tuple[str, str]]


class ScrapeError(PagedBackendError):
    """The metrics cannot be read; the message says what to check."""

    code = "UNAVAILABLE"


@dataclass(frozen=True)
class Scrape:
    """All samples of one look at an endpoint; `at` is when, in `time.monotonic()` seconds."""

    at: float
    samples: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    def models(self, name: str) -> list[str]:
        """The values that the label `model` has in the metric `name`."""
        labels = (dict(labels) for labels in self.samples.get(name, {}))
        return sorted({one["model"] for one in labels if "model" in one})

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of `name` that have these labels; 0 if there is none."""
        wanted = set(labels.items())
        return sum(value for found, value in self.samples.get(name, {}).items() if wanted <= found)

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """A histogram's cumulative counts by upper bound, infinity included."""
        wanted = set(labels.items())
        sums: dict[float, float] = {}
        for found, value in self.samples.get(f"{name}_bucket", {}).items():
            if wanted <= found:
                bound = float(dict(found)["le"])
                sums[bound] = sums.get(bound, 0.0) + value
        return dict(sorted(sums.items()))


def parse(text: str, at: float | None = None) -> Scrape:
    """Read the exposition format; lines that are none of its samples are passed over."""
    samples: dict[str, dict[Labels, float]] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is None:
            continue
        labels = frozenset(_LABEL.findall(match[2] or ""))
        samples.setdefault(match[1], {})[labels] = float(match[3])
    return Scrape(time.monotonic() if at is None else at, samples)


def scrape(address: str, timeout: float = 5.0) -> Scrape:
    """Read the metrics at `address` (host:port).

    Raises:
        ScrapeError: nothing answers, or not with metrics.
    """
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout) as response:
            return parse(response.read().decode())
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        message = f"cannot read the metrics at {address}: {reason}; is it the server's metrics address (host:port)?"
        raise ScrapeError(message) from error


def rate(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    """How fast a counter grew, per second; a counter that fell has begun anew."""
    seconds = after.at - before.at
    return grown(before, after, name, **labels) / seconds if seconds > 0 else 0.0


def grown(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    """By how much a counter grew."""
    now, then = after.value(name, **labels), before.value(name, **labels)
    return now - then if now >= then else now


def quantile(before: Scrape, after: Scrape, name: str, share: float, **labels: str) -> float | None:
    """The `share` quantile of what a histogram observed between two scrapes, interpolated as Prometheus does it.

    None if it observed nothing; the highest finite bound if the quantile lies above it.
    """
    earlier = before.buckets(name, **labels)
    counts = {bound: value - earlier.get(bound, 0.0) for bound, value in after.buckets(name, **labels).items()}
    total = counts.get(math.inf, 0.0)
    if total <= 0:
        return None
    rank = share * total
    low, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below) if count > below else bound
        low, below = bound, count
    return low
