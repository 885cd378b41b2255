"""The engine model's metrics on the server's endpoint: what is exported under which name, and exporting it.

Three families: names that begin with `vllm:` are vLLM's and those with `nv_trt_llm_` the TensorRT-LLM backend's, for
existing dashboards and autoscalers; `paged_` are ours. docs/monitoring/README.md lists them, and a test compares.

Setting a value is a round trip to the server, so it happens on the watcher's thread and only for values that changed.
Counters follow the engine's own, which never fall; what concerns one request is observed once, when its last response
is out. This module reads counts and records; it knows no engine and no request.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paged_backend.triton_adapter.metric_names import COUNTERS, GAUGES, HISTOGRAMS, Family, Histogram
from paged_backend.triton_adapter.pb import pb_utils

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What became of one request; times in seconds, None if it did not come that far.

    Attributes:
        finish_reason: `stop`, `length`, `abort`, `timeout` or `error`; with several outputs that of the last to end.
        prompt_tokens, generation_tokens: of the prompt, and of all outputs.
        queued_s: from its arrival to its first step.
        first_token_s: from its arrival to its first token.
        per_token_s: mean time between its tokens after the first; None with fewer than two or several outputs.
        total_s: from its arrival to its end.
    """

    finish_reason: str
    prompt_tokens: int
    generation_tokens: int
    queued_s: float | None
    first_token_s: float | None
    per_token_s: float | None
    total_s: float


class EngineMetrics:
    """The metrics of one engine model; nothing happens if the server was started without metrics.

    Args:
        model, version: the labels every one of them carries.
        limits: what does not change: `blocks_total`, `block_size`, `max_num_seqs`.
        info: labels of `vllm:cache_config_info`.
    """

    def __init__(self, model: str, version: str, limits: Mapping[str, float], info: Mapping[str, str]) -> None:
        self._labels = {"model": model, "version": version}
        self._limits = limits
        self._families: list[Any] = []
        self._metrics: dict[tuple[str, str], Any] = {}
        self._values: dict[tuple[str, str], float] = {}
        self._records: queue.SimpleQueue[RequestRecord] = queue.SimpleQueue()
        self._refusals: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._totals: dict[str, int] = {}
        self._beat_at = float("-inf")
        try:
            self._register(info)
        except pb_utils().TritonModelException as error:
            logger.info("no metrics: %s", error)
            self._metrics.clear()

    def ended(self, record: RequestRecord) -> None:
        """Note a request that has ended; from any thread, exported with the next `publish`."""
        self._records.put(record)

    def refused(self, code: str) -> None:
        """Note a request that was not taken in; `code` is its error's. From any thread."""
        self._refusals.put(code)

    def publish(self, stats: Mapping[str, int]) -> None:
        """Export what has changed.

        Args:
            stats: the engine's counts, and `requests_in_flight`.
        """
        if not self._metrics:
            return
        for record in _drained(self._records):
            self._count(f"finished_{record.finish_reason}")
            self._observe(record)
        for code in _drained(self._refusals):
            self._count(f"refused_{code}")
        now = time.time()
        if now - self._beat_at >= _HEARTBEAT_S:
            self._beat_at = now
        values = {**self._limits, **stats, **self._totals, "heartbeat": self._beat_at}
        # Counters first: a request that is no longer in flight has been counted.
        for counter in COUNTERS:
            for label, value in counter.values(values):
                self._advance(counter.name, label, value)
        for gauge in GAUGES:
            for label, value in gauge.values(values):
                self._set(gauge.name, label, value)

    def close(self) -> None:
        """Remove the metrics; a family must outlive them."""
        self._metrics.clear()
        self._families.clear()

    def _register(self, info: Mapping[str, str]) -> None:
        kinds = pb_utils().MetricFamily
        for family in GAUGES:
            self._register_family(family, kinds.GAUGE)
        for family in COUNTERS:
            self._register_family(family, kinds.COUNTER)
        for histogram in HISTOGRAMS:
            made = self._family(histogram.name, histogram.description, kinds.HISTOGRAM)
            self._metrics[histogram.name, ""] = made.Metric(labels=self._labels, buckets=list(histogram.buckets))
        self._register_info("vllm:cache_config_info", "Settings of the KV cache.", info)
        # Read by the Gateway API inference extension; this backend has no adapters.
        lora = {"running_lora_adapters": "", "waiting_lora_adapters": "", "max_lora": "0"}
        self._register_info("vllm:lora_requests_info", "LoRA adapters in use; the value is a time.", lora, time.time())

    def _register_info(self, name: str, description: str, labels: Mapping[str, str], value: float = 1.0) -> None:
        """A metric that says what it says in its labels."""
        made = self._family(name, description, pb_utils().MetricFamily.GAUGE)
        self._metrics[name, ""] = made.Metric(labels={**self._labels, **labels})
        self._metrics[name, ""].set(value)

    def _register_family(self, family: Family, kind: Any) -> None:
        made = self._family(family.name, family.description, kind)
        for label in family.sources:
            extra = {family.label: label} if family.label else {}
            self._metrics[family.name, label] = made.Metric(labels={**self._labels, **extra})

    def _family(self, name: str, description: str, kind: Any) -> Any:
        made = pb_utils().MetricFamily(name=name, description=description, kind=kind)
        self._families.append(made)
        return made

    def _set(self, name: str, label: str, value: float) -> None:
        if self._values.get((name, label)) != value:
            self._metrics[name, label].set(float(value))
            self._values[name, label] = value

    def _advance(self, name: str, label: str, value: float) -> None:
        before = self._values.get((name, label), 0.0)
        if value > before:
            self._metrics[name, label].increment(float(value - before))
            self._values[name, label] = value

    def _count(self, key: str) -> None:
        self._totals[key] = self._totals.get(key, 0) + 1

    def _observe(self, record: RequestRecord) -> None:
        for histogram in HISTOGRAMS:
            value = _observation(histogram, record)
            if value is not None:
                self._metrics[histogram.name, ""].observe(float(value))


def _observation(histogram: Histogram, record: RequestRecord) -> float | None:
    """What a request adds to a histogram; a request that never got a token has no sizes to show."""
    if histogram.observes.endswith("_tokens") and record.first_token_s is None:
        return None
    return getattr(record, histogram.observes)


def _drained(items: queue.SimpleQueue[Any]) -> list[Any]:
    taken = []
    try:
        while True:
            taken.append(items.get_nowait())
    except queue.Empty:
        return taken
