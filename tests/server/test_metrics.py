"""Metrics against what clients observed, and the documented names, dashboard and rules against a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server.client import GREEDY, ROOT, Call, ask, wait_for

from paged_backend.triton_adapter.metric_names import COUNTERS, GAUGES, HISTOGRAMS

MONITORING = ROOT / "docs" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana_dashboard.json").read_text())
DASHBOARD_EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
RULES = (MONITORING / "rules.yml").read_text()
INFO = ("vllm:cache_config_info", "vllm:lora_requests_info")
NAMES = {family.name for family in (*GAUGES, *COUNTERS, *HISTOGRAMS)} | set(INFO)
_SAMPLE = re.compile(r"^(?P<name>[\w:]+)\{(?P<labels>.*)\} (?P<value>\S+)$", re.MULTILINE)


def scrape(metrics_url: str) -> dict[str, float]:
    """Samples of paged_llm by name and labels, model and version left out: `name` or `name{label="value"}`."""
    text = urllib.request.urlopen(f"http://{metrics_url}/metrics", timeout=10).read().decode()
    found = {}
    for match in _SAMPLE.finditer(text):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match["labels"]))
        if labels.pop("model", "") != "paged_llm":
            continue
        labels.pop("version", None)
        rest = ",".join(f'{name}="{value}"' for name, value in labels.items())
        found[f"{match['name']}{{{rest}}}" if rest else match["name"]] = float(match["value"])
    return found


def gained(metrics_url: str, before: dict[str, float]) -> dict[str, float]:
    """What counters and sums have gained since `before`, once everything is counted."""
    wait_for(metrics_url, running=0, waiting=0)
    time.sleep(0.3)
    return {key: value - before.get(key, 0.0) for key, value in scrape(metrics_url).items()}


def reason(name: str) -> str:
    return f'vllm:request_success_total{{finished_reason="{name}"}}'


@pytest.mark.server
def test_counters_are_what_the_clients_observed(served: Any) -> None:
    """Tokens, prefix hits, and requests by how they ended: exactly, when all run to their end."""
    before = scrape(served.metrics_url)
    flags = {"return_num_input_tokens": True, "return_num_output_tokens": True, "return_finish_reason": True}
    shapes = [
        ("paged_llm", True, {"max_tokens": 5}),
        ("paged_llm", False, {"max_tokens": 1}),
        ("paged_ensemble", True, {"max_tokens": 4}),
        ("paged_llm", False, {"max_tokens": 3, "n": 2, "temperature": 1.0, "seed": 1}),
        ("paged_ensemble", False, {"max_tokens": 40, "stop": ["e", "a", " "], "min_tokens": 2}),
    ]
    answers = []
    for number, (model, stream, params) in enumerate(shapes):
        # Nobody has asked this before; the second time every full block of it is found.
        prompt = f"{number} counted questions: " + "very " * 40 + "old rivers."
        inputs = {"text_input": prompt, "stream": stream, **flags}
        for _ in range(2):
            answers.append(Call(served.grpc_url, model, inputs, {**GREEDY, **params}).wait())
    now = gained(served.metrics_url, before)
    prompts = [answer.joined("num_input_tokens")[0] for answer in answers]
    tokens = [sum(answer.joined("num_output_tokens")) for answer in answers]
    assert now["vllm:prompt_tokens_total"] == now["vllm:request_prompt_tokens_sum"] == sum(prompts)
    assert now["vllm:request_generation_tokens_sum"] == sum(tokens)
    assert now["vllm:generation_tokens_total"] == sum(tokens)
    size = scrape(served.metrics_url)['nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"}']
    hits = sum((count - 1) // size * size for count in prompts[1::2])
    assert now["vllm:prefix_cache_queries_total"] == sum(prompts)
    assert now["vllm:prefix_cache_hits_total"] == hits > 0
    ended = [answer.joined("finish_reason")[-1] for answer in answers]
    assert now[reason("stop")] == ended.count(b"stop") == 2
    assert now[reason("length")] == ended.count(b"length") == len(answers) - 2
    assert now[reason("abort")] == now[reason("timeout")] == now[reason("error")] == 0
    assert now["vllm:e2e_request_latency_seconds_count"] == len(answers)
    assert now["vllm:request_queue_time_seconds_count"] == len(answers)
    assert now["vllm:time_to_first_token_seconds_count"] == len(answers)
    # Of one output with at least two tokens.
    assert now["vllm:time_per_output_token_seconds_count"] == 6
    # They ran one after the other, and each step gave each output a token.
    assert now["paged_steps_total"] >= sum(max(answer.joined("num_output_tokens")) for answer in answers)
    assert now["paged_step_seconds_total"] > 0
    computed = now['paged_scheduled_tokens_total{kind="prefill"}'] + now['paged_scheduled_tokens_total{kind="decode"}']
    assert computed >= sum(prompts) - hits


@pytest.mark.server
def test_a_beam_search_counts_the_tokens_of_all_its_beams(served: Any) -> None:
    before = scrape(served.metrics_url)
    params = {**GREEDY, "max_tokens": 4, "use_beam_search": True, "beam_width": 3, "ignore_eos": True}
    Call(served.grpc_url, "paged_llm", {"text_input": "Once"}, params).wait()
    now = gained(served.metrics_url, before)
    # One sequence in the first step, three in the others; of them one is the answer.
    assert now["vllm:generation_tokens_total"] == 1 + 3 * 3
    assert now["vllm:request_generation_tokens_sum"] == 4


@pytest.mark.server
def test_requests_that_end_early_are_counted_by_how(served: Any) -> None:
    before = scrape(served.metrics_url)
    forever = {"ignore_eos": True, "max_tokens": 4000}
    cancelled = Call(served.grpc_url, "paged_llm", {"text_input": "Once", "stream": True}, forever)
    cancelled.next()
    cancelled.cancel()
    expired = Call(served.grpc_url, "paged_llm", {"text_input": "Once", "stream": True}, forever, timeout=400_000)
    assert expired.wait().error
    assert Call(served.grpc_url, "paged_llm", {"text_input": "Once"}, {"top_p": 7}).wait().error
    now = gained(served.metrics_url, before)
    assert now[reason("abort")] == now[reason("timeout")] == 1
    assert now[reason("stop")] == now[reason("length")] == now[reason("error")] == 0
    assert now['paged_requests_refused_total{code="INVALID_ARG"}'] == 1
    assert now["vllm:e2e_request_latency_seconds_count"] == 2
    # They may have been given more than they have seen.
    assert now["vllm:generation_tokens_total"] >= now["vllm:request_generation_tokens_sum"] >= 1 + 3


@pytest.mark.server
def test_gauges_agree_with_each_other(served: Any) -> None:
    wait_for(served.metrics_url, running=0, waiting=0)
    now = scrape(served.metrics_url)
    blocks = {state: now[f'paged_kv_blocks{{state="{state}"}}'] for state in ("used", "cached", "empty")}
    trt = {kind: now[f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="{kind}"}}'] for kind in
           ("max", "free", "used", "tokens_per", "fraction")}  # fmt: skip
    assert sum(blocks.values()) == trt["max"] > 0
    assert trt["free"] == blocks["cached"] + blocks["empty"]
    assert trt["used"] == blocks["used"] == 0
    assert trt["fraction"] == now["vllm:kv_cache_usage_perc"] == 0
    (info,) = [key for key in now if key.startswith("vllm:cache_config_info")]
    assert f'block_size="{trt["tokens_per"]:.0f}"' in info
    assert f'num_gpu_blocks="{trt["max"]:.0f}"' in info
    call = Call(
        served.grpc_url, "paged_llm", {"text_input": "Once", "stream": True}, {"ignore_eos": True, "max_tokens": 4000}
    )
    call.next()
    wait_for(served.metrics_url, running=1)
    now = scrape(served.metrics_url)
    assert now['nv_trt_llm_request_metrics{request_type="active"}'] == 1
    assert now['nv_trt_llm_request_metrics{request_type="scheduled"}'] == 1
    assert now["paged_requests_in_flight"] == 1
    assert now["vllm:kv_cache_usage_perc"] > 0
    call.cancel()
    wait_for(served.metrics_url, running=0)
    assert time.time() - scrape(served.metrics_url)["paged_heartbeat_timestamp_seconds"] < 5


@pytest.mark.server
def test_exactly_the_documented_metrics_are_exported(served: Any) -> None:
    text = urllib.request.urlopen(f"http://{served.metrics_url}/metrics", timeout=10).read().decode()
    exported = set(re.findall(r"^# TYPE ((?:vllm:|nv_trt_llm_|paged_)\S+) ", text, re.MULTILINE))
    assert exported == NAMES


def test_every_metric_is_documented() -> None:
    rows = re.findall(
        r"^\| `([\w:]+)` \| (\w+) \|(.*?)\|(.*?)\|$", (MONITORING / "README.md").read_text(), re.MULTILINE
    )
    assert {name for name, *_ in rows} == NAMES
    said = {name: (labels.strip(), meaning.strip()) for name, _, labels, meaning in rows}
    for family in (*GAUGES, *COUNTERS):
        labels = f"`{family.label}`: {', '.join(family.sources)}" if family.label else ""
        assert said[family.name] == (labels, family.description)


def _metrics_in(expression: str) -> set[str]:
    return {re.sub(r"_bucket$", "", name) for name in re.findall(r"(?:vllm:|nv_trt_llm_|paged_)\w+", expression)}


def test_dashboard_and_rules_name_only_what_is_exported() -> None:
    used = set().union(*map(_metrics_in, DASHBOARD_EXPRESSIONS))
    assert used <= NAMES
    assert _metrics_in(re.sub(r"docs/\S+|job=.*|group.*|- name:.*", "", RULES)) <= NAMES
    # Every count that tells of trouble or load is on the dashboard.
    assert {family.name for family in COUNTERS} - used == {"vllm:num_preemptions_total"}


@pytest.fixture(scope="module")
def prometheus(served: Any, tmp_path_factory: Any) -> Iterator[str]:
    """The URL of a Prometheus that scrapes `served` with the documented configuration; skips where there is none."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed (Debian, Ubuntu: apt install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy(MONITORING / "rules.yml", folder)
    config = (MONITORING / "prometheus.yml").read_text()
    assert '"127.0.0.1:8002"' in config
    config = config.replace("127.0.0.1:8002", served.metrics_url).replace(
        "scrape_interval: 5s", "scrape_interval: 500ms"
    )
    (folder / "prometheus.yml").write_text(config)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for_samples(url, process, folder / "log")
            yield url
        finally:
            process.terminate()


def query(url: str, expression: str) -> list[dict[str, Any]]:
    parameters = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{url}/api/v1/query?{parameters}", timeout=10) as response:
        return json.loads(response.read())["data"]["result"]


def _wait_for_samples(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            if query(url, "count_over_time(paged_kv_blocks[1m]) > 3"):
                return
        except OSError:
            pass
        time.sleep(0.2)


@pytest.mark.server
def test_the_dashboard_shows_data(served: Any, prometheus: str) -> None:
    ask(served.grpc_url, "paged_llm", "Once upon a time", 8)
    ask(served.grpc_url, "paged_llm", "Once upon a time " * 20, 8)
    time.sleep(2.0)
    empty = []
    for expression in DASHBOARD_EXPRESSIONS:
        filled = expression.replace("$model", ".*").replace("$__rate_interval", "1m")
        if not query(prometheus, filled):
            empty.append(expression)
    assert not empty
    rate = query(prometheus, 'rate(vllm:generation_tokens_total{model="paged_llm"}[1m])')
    assert float(rate[0]["value"][1]) > 0


@pytest.mark.server
def test_the_rules_are_evaluated_and_nothing_fires(served: Any, prometheus: str) -> None:
    with urllib.request.urlopen(f"{prometheus}/api/v1/rules", timeout=10) as response:
        groups = json.loads(response.read())["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(re.findall(r"- (?:alert|record):", RULES)) > 8
    for rule in rules:
        query(prometheus, rule["query"])
        assert rule["health"] != "err", rule
        assert rule.get("state") != "firing", rule
    assert query(prometheus, 'time() - paged_heartbeat_timestamp_seconds{model="paged_llm"} < 5')
