"""Deadlines, priorities, preemption, and more requests than fit: the server's queue policy over an engine that blocks.

A tiny random model whose steps are slowed down, in a repository whose config.pbtxt has three lines and a queue policy.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from server.client import GREEDY, Call, gauges, post, wait_for
from server.conftest import Launched, serving
from server.test_lifecycle import SLOW_MODEL

from paged_backend.monitor.samples import scrape

pytestmark = pytest.mark.server

IDS = {"input_ids": [1, 5, 7], "stream": True}
FOREVER = {**GREEDY, "max_tokens": 250, "ignore_eos": True}
# Eight blocks all but two tokens.
LONG = [[1, *((7 * i + 11 * j) % 150 + 5 for j in range(125))] for i in range(2)]
CONFIG = """
backend: "python"
max_batch_size: 0
instance_group [{ kind: KIND_MODEL }]
"""
# Two may wait in the server; one that waits longer than a second is told so.
QUEUE_POLICY = """
dynamic_batching {
  default_queue_policy { max_queue_size: 2 default_timeout_microseconds: 1000000 timeout_action: REJECT }
}
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: Any, tiny_llama: Path) -> Any:
    """`plain` runs one request at a time, the most urgent first; `full` takes in two and then blocks; `swapping` runs
    two of LONG, but has blocks for only one of them to go on."""
    repository = tmp_path_factory.mktemp("overload") / "models"
    arguments = {"model": str(tiny_llama), "skip_tokenizer_init": True, "num_kv_blocks": 64, "num_threads": 1}
    arguments |= {"max_num_seqs": 1}
    swapping = {"max_num_seqs": 2, "num_kv_blocks": 17, "swap_space": 0.01, "preemption_mode": "swap"}
    for name, config, extra in (
        ("plain", CONFIG, {"scheduling_policy": "priority"}),
        ("full", CONFIG + QUEUE_POLICY, {"max_waiting_requests": 1, "when_full": "block"}),
        ("swapping", CONFIG, swapping),
    ):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        (repository / name / "1" / "model.json").write_text(json.dumps(arguments | extra))
        (repository / name / "1" / "model.py").write_text(SLOW_MODEL)
    with serving(repository.parent / "log", f"--model-repository={repository}", "--drain-seconds=0") as launched:
        yield launched


def _error(call: Call) -> str:
    answer = call.wait()
    assert answer.error is not None, answer
    return answer.error.message()


def test_a_deadline_ends_a_running_request(servers: Launched) -> None:
    began = time.monotonic()
    call = Call(servers.grpc_url, "plain", IDS, FOREVER, timeout=700_000)
    answer = call.wait()
    assert "timeout passed before it finished" in answer.error.message()
    assert 0.6 < time.monotonic() - began < 3
    assert len(answer.responses) > 2
    wait_for(servers.metrics_url, "plain", running=0, used=0)


def test_a_deadline_ends_a_waiting_request(servers: Launched) -> None:
    running = Call(servers.grpc_url, "plain", IDS, FOREVER)
    running.next()
    began = time.monotonic()
    assert "timeout passed" in _error(Call(servers.grpc_url, "plain", IDS, FOREVER, timeout=300_000))
    assert time.monotonic() - began < 2
    running.cancel()


def test_a_deadline_over_http(servers: Launched) -> None:
    body = {"input_ids": [1, 5, 7], "max_tokens": 250, "ignore_eos": True, "timeout": 300_000}
    status, text = post(servers.http_url, "plain", "generate", body)
    assert status == 400
    assert "timeout passed" in text


def _swapped(servers: Launched) -> tuple[float, float]:
    """Requests that have been swapped out, and the host's blocks that they use."""
    now = scrape(servers.metrics_url)
    requests = now.value("paged_preempted_requests", model="swapping", mode="swap")
    return requests, now.value("paged_host_blocks", model="swapping", state="used")


def _wait_until_swapped(servers: Launched) -> None:
    deadline = time.monotonic() + 10
    while _swapped(servers) != (1, 8):
        assert time.monotonic() < deadline, _swapped(servers)
        time.sleep(0.02)


@pytest.mark.parametrize("way", ["cancel", "deadline", "stop"])
def test_a_swapped_request_can_be_ended(servers: Launched, way: str) -> None:
    first = Call(servers.grpc_url, "swapping", {"input_ids": LONG[0], "stream": True}, {**FOREVER, "max_tokens": 120})
    first.next()
    options = {"timeout": 1_200_000} if way == "deadline" else {"request_id": "swapped"}
    second = Call(
        servers.grpc_url, "swapping", {"input_ids": LONG[1], "stream": True}, {**FOREVER, "max_tokens": 120}, **options
    )
    _wait_until_swapped(servers)
    if way == "cancel":
        second.cancel()
    elif way == "stop":
        Call(servers.grpc_url, "swapping", {"stop": True}, request_id="swapped").wait()
        assert "the request was cancelled" in _error(second)
    else:
        assert "timeout passed" in _error(second)
    wait_for(servers.metrics_url, "swapping", timeout=5, running=1, waiting=0)
    assert _swapped(servers) == (0, 0)
    first.next()
    first.cancel()
    wait_for(servers.metrics_url, "swapping", running=0, used=0)


def test_preemption_changes_neither_tokens_nor_counts(servers: Launched) -> None:
    params = {**GREEDY, "max_tokens": 12, "ignore_eos": True}
    inputs = [{"input_ids": prompt[:-1], "stream": True} for prompt in LONG]
    before = scrape(servers.metrics_url)
    calls = [Call(servers.grpc_url, "swapping", one, params) for one in inputs]
    answers = [call.wait() for call in calls]
    wait_for(servers.metrics_url, "swapping", running=0, waiting=0)
    time.sleep(0.3)
    now = scrape(servers.metrics_url)

    def gained(name: str, **labels: str) -> float:
        return now.value(name, model="swapping", **labels) - before.value(name, model="swapping", **labels)

    assert gained("vllm:num_preemptions_total") == gained("paged_swaps_total", direction="out") >= 1
    assert gained("vllm:generation_tokens_total") == sum(len(answer.joined("output_ids")) for answer in answers) == 24
    assert gained("vllm:prompt_tokens_total") == gained("vllm:prefix_cache_queries_total") == 2 * 125
    assert gained("vllm:request_success_total", finished_reason="length") == 2
    alone = [Call(servers.grpc_url, "swapping", one, params).wait() for one in inputs]
    assert [a.joined("output_ids") for a in answers] == [a.joined("output_ids") for a in alone]


def test_the_urgent_request_goes_first(servers: Launched) -> None:
    running = Call(servers.grpc_url, "plain", IDS, {**GREEDY, "max_tokens": 8, "ignore_eos": True})
    running.next()
    short = {**GREEDY, "max_tokens": 2, "ignore_eos": True}
    calls = {p: Call(servers.grpc_url, "plain", IDS, short, parameters={"paged_priority": p}) for p in (5, 1, 3)}
    for call in (running, *calls.values()):
        assert call.wait().finals == 1
    first_tokens = sorted((call.times[0], priority) for priority, call in calls.items())
    assert [priority for _, priority in first_tokens] == [1, 3, 5]


def test_a_full_engine_fills_the_servers_queue_and_its_policy_decides(servers: Launched) -> None:
    """One runs, one waits in the engine, one blocks execute(), two wait in the server; the next is refused at once."""
    running = Call(servers.grpc_url, "full", IDS, FOREVER)
    running.next()
    waiting = Call(servers.grpc_url, "full", IDS, FOREVER)
    wait_for(servers.metrics_url, "full", waiting=1)
    blocking = Call(servers.grpc_url, "full", IDS, {**GREEDY, "max_tokens": 1})
    time.sleep(0.3)
    queued = [Call(servers.grpc_url, "full", IDS, {**GREEDY, "max_tokens": 1}) for _ in range(2)]
    time.sleep(0.3)
    began = time.monotonic()
    assert "Exceeds maximum queue size" in _error(Call(servers.grpc_url, "full", IDS, FOREVER))
    assert time.monotonic() - began < 0.5
    # The policy looks at its queue when it may send the next request on: once the engine has room.
    time.sleep(1.0)
    running.cancel()
    for call in queued:
        assert "Request timeout expired" in _error(call)
    waiting.cancel()
    assert blocking.wait().finals == 1
    wait_for(servers.metrics_url, "full", running=0, waiting=0, used=0)
    # Nothing is stuck afterwards.
    assert Call(servers.grpc_url, "full", IDS, {**GREEDY, "max_tokens": 1}).wait().finals == 1
    assert gauges(servers.metrics_url, "full")["running"] == 0
