"""Every exported metric: its name, what it says, and which of the engine's counts it is made of.

A table and the little arithmetic between a count and a metric; knows no server. docs/monitoring/README.md is checked
against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_FINISH_REASONS = ("stop", "length", "abort", "timeout", "error")
_REFUSALS = ("INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "INTERNAL")


@dataclass(frozen=True)
class Family:
    """A family of gauges or counters.

    Attributes:
        sources: per value of `label` the count it shows: a key, keys to be added ("a+b"), a quotient ("a/b").
        label: the label that tells them apart; "": there is one metric, under the key "".
        scale: what the count is multiplied with.
    """

    name: str
    description: str
    sources: Mapping[str, str]
    label: str = ""
    scale: float = 1.0

    def values(self, counts: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        """(label value, metric value) of each metric; a count that is missing is 0."""
        for label, source in self.sources.items():
            yield label, _evaluate(source, counts) * self.scale


@dataclass(frozen=True)
class Histogram:
    """A histogram; `observes` is the field of `RequestRecord` that each request adds."""

    name: str
    description: str
    observes: str
    buckets: tuple[float, ...]


def _evaluate(source: str, counts: Mapping[str, float]) -> float:
    if "/" in source:
        above, below = (_evaluate(part, counts) for part in source.split("/"))
        return above / below if below else 0.0
    return sum(counts.get(key, 0) for key in source.split("+"))


def _one(name: str, description: str, source: str, scale: float = 1.0) -> Family:
    return Family(name, description, {"": source}, scale=scale)


GAUGES = (
    _one("vllm:num_requests_running", "Requests in the running batch.", "requests_running"),
    _one("vllm:num_requests_waiting", "Requests waiting to be scheduled.", "requests_waiting"),
    _one("vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", "blocks_used/blocks_total"),
    Family(
        "nv_trt_llm_kv_cache_block_metrics",
        "KV cache blocks.",
        {
            "max": "blocks_total",
            "free": "blocks_cached+blocks_empty",
            "used": "blocks_used",
            "tokens_per": "block_size",
            "reused": "prefix_cache_hits/block_size",
            "fraction": "blocks_used/blocks_total",
        },
        label="kv_cache_block_type",
    ),
    Family(
        "nv_trt_llm_request_metrics",
        "Requests by state.",
        {
            "active": "requests_running+requests_waiting",
            "max": "max_num_seqs",
            "scheduled": "requests_running",
            "context": "requests_prefilling",
            "waiting": "requests_waiting",
        },
        label="request_type",
    ),
    Family(
        "paged_kv_blocks",
        "KV cache blocks by state.",
        {"used": "blocks_used", "cached": "blocks_cached", "empty": "blocks_empty"},
        label="state",
    ),
    Family(
        "paged_host_blocks",
        "Blocks of the swap space.",
        {"used": "host_blocks_used", "total": "host_blocks_total"},
        label="state",
    ),
    Family(
        "paged_preempted_requests",
        "Waiting requests that were running before, by what they wait for.",
        {"recompute": "requests_preempted", "swap": "requests_swapped"},
        label="mode",
    ),
    _one("paged_requests_in_flight", "Requests taken in and not fully answered yet.", "requests_in_flight"),
    _one("paged_heartbeat_timestamp_seconds", "Unix time at which the model's process was last alive.", "heartbeat"),
)
COUNTERS = (
    _one("vllm:prompt_tokens_total", "Prompt tokens of requests that got a first token.", "prompt_tokens"),
    _one(
        "vllm:generation_tokens_total",
        "Tokens generated, those of dropped beams among them.",
        "generation_tokens",
    ),
    _one("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    _one("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    _one("vllm:num_preemptions_total", "Times that a running request lost its blocks.", "preemptions"),
    Family(
        "vllm:request_success_total",
        "Requests that ended, by reason.",
        {reason: f"finished_{reason}" for reason in _FINISH_REASONS},
        label="finished_reason",
    ),
    Family(
        "paged_requests_refused_total",
        "Requests not taken in, by error code.",
        {code: f"refused_{code}" for code in _REFUSALS},
        label="code",
    ),
    _one("paged_block_copies_total", "Blocks copied before a write because they were shared.", "block_copies"),
    _one("paged_block_evictions_total", "Cached blocks whose content was given up.", "block_evictions"),
    Family(
        "paged_preemptions_total",
        "Preemptions by what they cost.",
        {"recompute": "recomputations", "swap": "swaps_out"},
        label="mode",
    ),
    Family(
        "paged_swaps_total",
        "Requests moved between device and host.",
        {"out": "swaps_out", "in": "swaps_in"},
        label="direction",
    ),
    _one("paged_steps_total", "Steps of the engine.", "steps"),
    _one("paged_step_seconds_total", "Time spent in steps.", "step_microseconds", scale=1e-6),
    Family(
        "paged_scheduled_tokens_total",
        "Tokens computed in steps: decode is one token of a sequence, prefill are several.",
        {"prefill": "prefill_tokens", "decode": "decode_tokens"},
        label="kind",
    ),
)
_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKEN_TIME = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_LENGTH = tuple(float(2**power) for power in range(0, 18))
HISTOGRAMS = (
    Histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", "first_token_s", _LATENCY),
    Histogram(
        "vllm:time_per_output_token_seconds",
        "A request's mean time between tokens after the first.",
        "per_token_s",
        _TOKEN_TIME,
    ),
    Histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", "total_s", _LATENCY),
    Histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", "queued_s", _LATENCY),
    Histogram("vllm:request_prompt_tokens", "Tokens of the prompt.", "prompt_tokens", _LENGTH),
    Histogram("vllm:request_generation_tokens", "Tokens of all outputs of a request.", "generation_tokens", _LENGTH),
)
