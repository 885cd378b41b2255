"""Reading metrics and making figures of them; what is shown for them. No server."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from paged_backend.monitor.samples import ScrapeError, grown, parse, quantile, rate, scrape
from paged_backend.monitor.top import History
from paged_backend.monitor.view import plain, view


def text(
    *, at: float, tokens: float, fast: float, slow: float, used: int = 3, beat: float | None = None, **reasons: int
) -> str:
    lines = [
        "# HELP paged_kv_blocks KV cache blocks by state.",
        f'paged_kv_blocks{{model="m",version="1",state="used"}} {used}',
        'paged_kv_blocks{model="m",version="1",state="cached"} 1',
        'paged_kv_blocks{model="m",version="1",state="empty"} 96',
        f'vllm:generation_tokens_total{{model="m",version="1"}} {tokens}',
        'vllm:num_requests_running{model="m",version="1"} 2',
        f'vllm:time_to_first_token_seconds_bucket{{model="m",version="1",le="0.1"}} {fast}',
        f'vllm:time_to_first_token_seconds_bucket{{model="m",version="1",le="0.5"}} {fast + slow}',
        f'vllm:time_to_first_token_seconds_bucket{{model="m",version="1",le="+Inf"}} {fast + slow}',
        f'paged_heartbeat_timestamp_seconds{{model="m",version="1"}} {time.time() if beat is None else beat}',
        *(f'vllm:request_success_total{{model="m",finished_reason="{k}"}} {v}' for k, v in reasons.items()),
    ]
    return "\n".join(lines)


def test_parsing_passes_over_what_is_no_sample():
    found = parse(
        '# TYPE a counter\na{x="1",y="a\\"b,c"} 2\na{x="2"} 3e2\nb 4 1700000000\n\nnonsense here too\nc +Inf\n'
    )
    assert found.value("a") == 302
    assert found.value("a", x="1") == 2
    assert found.value("a", y='a\\"b,c') == 2
    assert found.value("b") == 4
    assert found.value("missing") == 0
    assert found.value("c") == float("inf")


def test_rates_and_a_counter_that_begins_anew():
    before, after = parse("t 100", at=10.0), parse("t 150", at=12.0)
    assert rate(before, after, "t") == 25
    assert grown(after, parse("t 30", at=13.0), "t") == 30
    assert rate(before, parse("t 200", at=10.0), "t") == 0


@pytest.mark.parametrize(
    ("fast", "slow", "share", "expected"),
    [
        (10, 0, 0.5, 0.05),
        (10, 10, 0.5, 0.1),
        (10, 10, 0.75, 0.3),
        (0, 4, 1.0, 0.5),
        (0, 0, 0.5, None),
    ],
)
def test_quantiles_are_prometheus(fast, slow, share, expected):
    """histogram_quantile: linear within the bucket in which the rank falls."""
    before = parse(text(at=0, tokens=0, fast=5, slow=7), at=0.0)
    after = parse(text(at=0, tokens=0, fast=5 + fast, slow=7 + slow), at=1.0)
    found = quantile(before, after, "vllm:time_to_first_token_seconds", share, model="m")
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_rank_beyond_the_last_bound_is_that_bound():
    before = parse('h_bucket{le="1"} 0\nh_bucket{le="+Inf"} 0', at=0.0)
    after = parse('h_bucket{le="1"} 1\nh_bucket{le="+Inf"} 10', at=1.0)
    assert quantile(before, after, "h", 0.9) == 1.0


def shown(width: int = 80, **values) -> str:
    history = History(parse(text(at=0, tokens=0, fast=0, slow=0), at=0.0))
    models = history.add(parse(text(at=2, tokens=50, fast=10, slow=0, **values), at=2.0))
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(view("host:8002", models, width=width))
    return console.file.getvalue()


def test_the_view_says_what_the_metrics_say():
    screen = shown(stop=4, error=1)
    for wanted in ("host:8002", "25.0 tokens/s", "3 used", "1 cached", "96 empty", "4 stop, 1 error", "50.0 ms"):
        assert wanted in screen, wanted
    assert "no sign of life" not in screen


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_state_with_blocks_is_seen_in_the_bar(width):
    lines = shown(width).splitlines()
    (bar,) = [line for line in lines if "░" in line and "KV blocks" not in line]
    assert bar.count("█") >= 1
    assert bar.count("▓") >= 1
    assert bar.count("█") + bar.count("▓") + bar.count("░") == max(20, width - 8)
    assert all(len(line) <= width for line in lines)


def test_a_dead_model_is_pointed_out():
    assert "no sign of life for 60 s" in shown(beat=time.time() - 60)
    history = History(parse(text(at=0, tokens=0, fast=0, slow=0), at=0.0))
    (figures,) = history.add(parse(text(at=2, tokens=50, fast=10, slow=0, beat=time.time() - 60), at=2.0))
    assert "no sign of life for 60 s" in plain(figures)


def test_the_window_is_a_minute():
    history = History(parse(text(at=0, tokens=0, fast=0, slow=0), at=0.0))
    for at in range(1, 200):
        history.add(parse(text(at=at, tokens=0, fast=at, slow=0), at=float(at)))
    assert 60 <= len(history._scrapes) <= 62


def test_a_server_without_an_engine_and_no_server():
    with pytest.raises(ScrapeError, match="serves no model of this backend"):
        History(parse("", at=0.0)).add(parse("nv_cpu_utilization 1", at=1.0))
    with pytest.raises(ScrapeError, match=r"cannot read the metrics at 127\.0\.0\.1:1"):
        scrape("127.0.0.1:1")
