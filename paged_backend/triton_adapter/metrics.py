"""Gauges on the server's metrics endpoint: running and waiting requests and KV blocks by state.

Names that begin with `vllm:` are vLLM's, for existing dashboards. Setting a value is a round trip to the server, so
unchanged values are not sent. This module reads a dictionary of counts and knows no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from paged_backend.triton_adapter.pb import pb_utils

logger = logging.getLogger(__name__)

_BLOCK_STATES = ("used", "cached", "empty")


class Gauges:
    """The gauges of one engine model; `publish` does nothing if the server was started without metrics.

    Args:
        model, version: the labels every one of them carries.
    """

    def __init__(self, model: str, version: str) -> None:
        self._families: list[Any] = []
        self._metrics: dict[str, Any] = {}
        self._values: dict[str, int] = {}
        labels = {"model": model, "version": version}
        try:
            running = self._family("vllm:num_requests_running", "Requests in the running batch.")
            self._metrics["requests_running"] = running.Metric(labels=labels)
            waiting = self._family("vllm:num_requests_waiting", "Requests waiting to be scheduled.")
            self._metrics["requests_waiting"] = waiting.Metric(labels=labels)
            in_flight = self._family("paged_requests_in_flight", "Requests taken in and not fully answered yet.")
            self._metrics["requests_in_flight"] = in_flight.Metric(labels=labels)
            blocks = self._family("paged_kv_blocks", "KV cache blocks by state.")
            for state in _BLOCK_STATES:
                self._metrics[f"blocks_{state}"] = blocks.Metric(labels={**labels, "state": state})
        except pb_utils().TritonModelException as error:
            logger.info("no metrics: %s", error)
            self._metrics = {}

    def publish(self, stats: Mapping[str, int]) -> None:
        """Set the gauges that have changed."""
        for key, metric in self._metrics.items():
            value = stats[key]
            if self._values.get(key) != value:
                metric.set(float(value))
                self._values[key] = value

    def close(self) -> None:
        """Remove the gauges; a family must outlive its metrics."""
        self._metrics.clear()
        self._families.clear()

    def _family(self, name: str, description: str) -> Any:
        utils = pb_utils()
        family = utils.MetricFamily(name=name, description=description, kind=utils.MetricFamily.GAUGE)
        self._families.append(family)
        return family
