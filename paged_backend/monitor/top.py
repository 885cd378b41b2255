"""`paged-backend top`: a live view of a running server in the terminal, from its metrics.

    scrape -> figures (numbers of one model, rates over the last minute) -> view (a rich table) -> terminal

Called by `paged_backend.cli`.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from dataclasses import dataclass

from paged_backend.monitor.samples import Scrape, ScrapeError, grown, quantile, rate, scrape

_WINDOW_SECONDS = 60.0
# What only an engine model exports.
_MARK = "paged_kv_blocks"


@dataclass(frozen=True)
class Figures:
    """What is shown of one model; rates per second, times in seconds, None where nothing was observed."""

    model: str
    used: float
    cached: float
    empty: float
    running: float
    waiting: float
    in_flight: float
    prompt_rate: float
    generation_rate: float
    first_token: tuple[float | None, float | None]
    per_token: tuple[float | None, float | None]
    hit_share: float | None
    preemptions: float
    step_seconds: float | None
    ended: dict[str, float]
    silent_seconds: float


def figures(model: str, before: Scrape, last: Scrape, after: Scrape) -> Figures:
    """The figures of `model`: gauges of `after`, rates since `last`, percentiles since `before`."""
    queries = grown(before, after, "vllm:prefix_cache_queries_total", model=model)
    steps = grown(last, after, "paged_steps_total", model=model)
    blocks = {state: after.value(_MARK, model=model, state=state) for state in ("used", "cached", "empty")}

    def percentiles(name: str) -> tuple[float | None, float | None]:
        return quantile(before, after, name, 0.5, model=model), quantile(before, after, name, 0.95, model=model)

    reasons = ("stop", "length", "abort", "timeout", "error")
    return Figures(
        model=model,
        **blocks,
        running=after.value("vllm:num_requests_running", model=model),
        waiting=after.value("vllm:num_requests_waiting", model=model),
        in_flight=after.value("paged_requests_in_flight", model=model),
        prompt_rate=rate(last, after, "vllm:prompt_tokens_total", model=model),
        generation_rate=rate(last, after, "vllm:generation_tokens_total", model=model),
        first_token=percentiles("vllm:time_to_first_token_seconds"),
        per_token=percentiles("vllm:time_per_output_token_seconds"),
        hit_share=grown(before, after, "vllm:prefix_cache_hits_total", model=model) / queries if queries else None,
        preemptions=grown(before, after, "vllm:num_preemptions_total", model=model),
        step_seconds=grown(last, after, "paged_step_seconds_total", model=model) / steps if steps else None,
        ended={
            reason: grown(before, after, "vllm:request_success_total", model=model, finished_reason=reason)
            for reason in reasons
        },
        silent_seconds=time.time() - after.value("paged_heartbeat_timestamp_seconds", model=model),
    )


class History:
    """The scrapes of the last minute, oldest first."""

    def __init__(self, first: Scrape) -> None:
        self._scrapes = deque([first])

    def add(self, latest: Scrape) -> list[Figures]:
        """Take in a scrape; returns the figures of every engine model.

        Raises:
            ScrapeError: the server serves no engine model.
        """
        last = self._scrapes[-1]
        self._scrapes.append(latest)
        while len(self._scrapes) > 2 and latest.at - self._scrapes[1].at >= _WINDOW_SECONDS:
            self._scrapes.popleft()
        models = latest.models(_MARK)
        if not models:
            raise ScrapeError(f"the server exports no {_MARK}: it serves no model of this backend, or none is loaded")
        return [figures(model, self._scrapes[0], last, latest) for model in models]


def top(address: str, interval: float, *, once: bool) -> int:
    """Show the server whose metrics are at `address` until Ctrl-C, or `once` after an interval; returns the exit code.

    Where there is no terminal it is a line per model and interval.

    Raises:
        ScrapeError: the metrics cannot be read.
    """
    # Imported here: the other commands need no terminal library.
    from rich.console import Console
    from rich.live import Live

    from paged_backend.monitor.view import plain, view

    history = History(scrape(address))
    console = Console()
    if once:
        time.sleep(interval)
        console.print(view(address, history.add(scrape(address)), width=console.width))
        return 0
    # Explicitly: a shell that starts this in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while not console.is_terminal:
            time.sleep(interval)
            for one in history.add(scrape(address)):
                print(time.strftime("%H:%M:%S"), plain(one), flush=True)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(view(address, history.add(scrape(address)), width=console.width), refresh=True)
    except KeyboardInterrupt:
        return 0
