"""Checks of a running server: its health endpoints, and whether its engines live, by their metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator

from paged_backend.doctor.report import Finding, failure, ok, warning
from paged_backend.errors import ConfigError
from paged_backend.monitor.samples import scrape
from paged_backend.server import probe

# A living process says so every second.
_SILENT_SECONDS = 15.0
_WATCH_SECONDS = 1.0


def check_health(address: str) -> Iterator[Finding]:
    """Whether the server at `address` (host:port of HTTP) is ready."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--url {address!r} is no host:port")
    models = probe.ready_models(host.strip("[]"), int(port))
    if models is None:
        yield failure("server", f"{address} does not answer, or not all its models are ready: look at its log")
    else:
        yield ok("server", f"{address} is ready: {', '.join(models)}")


def check_engines(metrics_address: str) -> Iterator[Finding]:
    """Whether the process of each engine model is alive, and computes if it has something to."""
    before = scrape(metrics_address)
    models = before.models("paged_heartbeat_timestamp_seconds")
    if not models:
        yield warning("engine", f"{metrics_address} has no metrics of an engine model: none is loaded")
    time.sleep(_WATCH_SECONDS if models else 0.0)
    after = scrape(metrics_address)
    for model in models:
        silent = time.time() - after.value("paged_heartbeat_timestamp_seconds", model=model)
        busy = min(one.value("vllm:num_requests_running", model=model) for one in (before, after))
        steps = after.value("paged_steps_total", model=model) - before.value("paged_steps_total", model=model)
        if silent > _SILENT_SECONDS:
            limit = f"dead after {_SILENT_SECONDS:g} s"
            yield failure(
                model, f"no sign of life for {silent:.0f} s ({limit}), its process is dead: restart the server"
            )
        elif busy and not steps:
            yield warning(model, f"{busy:.0f} requests run, but no step ended in {_WATCH_SECONDS:g} s")
        else:
            beat = f"alive (last sign of life {max(silent, 0.0):.1f} s ago, dead after {_SILENT_SECONDS:g} s)"
            yield ok(model, f"{beat}, {busy:.0f} requests running, {steps:.0f} steps in {_WATCH_SECONDS:g} s")
