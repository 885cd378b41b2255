"""From the times of tokens to the numbers of the tables. Standard library only: this runs in every environment.

TTFT      seconds from a request's arrival to its first token
TPOT      seconds per token after the first, of one request
latency   seconds from arrival to the last token; normalised: divided by the number of output tokens
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Timeline:
    """One request: when it arrived, and when each of its tokens came; seconds on one clock."""

    arrival: float
    tokens: list[float] = field(default_factory=list)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` % of `values` do not exceed, interpolated between neighbours; NaN for none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(timelines: Sequence[Timeline]) -> dict[str, float]:
    """All numbers of one run, in seconds and tokens per second; one that the run does not define is left out.

    Raises:
        ValueError: there is no request, or one without a token.
    """
    if not timelines or not all(line.tokens for line in timelines):
        raise ValueError("a request got no token")
    started = min(line.arrival for line in timelines)
    ended = max(line.tokens[-1] for line in timelines)
    count = sum(len(line.tokens) for line in timelines)
    ttft = [line.tokens[0] - line.arrival for line in timelines]
    tpot = [(line.tokens[-1] - line.tokens[0]) / (len(line.tokens) - 1) for line in timelines if len(line.tokens) > 1]
    normalised = [(line.tokens[-1] - line.arrival) / len(line.tokens) for line in timelines]
    mean_in_flight, peak_in_flight = in_flight(timelines)
    numbers = {
        "seconds": ended - started,
        "requests": len(timelines),
        "output_tokens": count,
        "output_tokens_per_s": count / (ended - started),
        "ttft_p50": percentile(ttft, 50),
        "ttft_p95": percentile(ttft, 95),
        "tpot_p50": percentile(tpot, 50),
        "tpot_mean": statistics.fmean(tpot) if tpot else float("nan"),
        "normalised_latency": statistics.fmean(normalised),
        "step": full_batch_step(timelines),
        "mean_in_flight": mean_in_flight,
        "peak_in_flight": peak_in_flight,
    }
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


def full_batch_step(timelines: Sequence[Timeline]) -> float:
    """Seconds per token of a sequence while all of them generate: a decode step at full batch. NaN if they never do."""
    start = max(line.tokens[0] for line in timelines)
    end = min(line.tokens[-1] for line in timelines)
    steps = [sum(start < moment <= end for moment in line.tokens) for line in timelines]
    if end <= start or min(steps) < 1:
        return float("nan")
    return (end - start) / statistics.fmean(steps)


def in_flight(timelines: Sequence[Timeline]) -> tuple[float, int]:
    """Requests between their first and last token: mean over the time that any is, and the peak."""
    # Sorting puts a moment's departures first: a place handed on is not two requests.
    moments = sorted([(line.tokens[0], 1) for line in timelines] + [(line.tokens[-1], -1) for line in timelines])
    running, peak, area = 0, 0, 0.0
    before = moments[0][0]
    for moment, change in moments:
        area += running * (moment - before)
        running, before = running + change, moment
        peak = max(peak, running)
    span = moments[-1][0] - moments[0][0]
    return (area / span if span else float(peak)), peak


def sustainable_rate(points: Sequence[tuple[float, float]], limit: float) -> float | None:
    """The arrival rate at which latency reaches `limit`, between the rates measured; None outside of them.

    Args:
        points: (rate, latency) pairs, in order of the rate.
        limit: the latency that is still acceptable.
    """
    for (rate, latency), (next_rate, next_latency) in itertools.pairwise(points):
        if latency <= limit < next_latency:
            return rate + (next_rate - rate) * (limit - latency) / (next_latency - latency)
    return None
