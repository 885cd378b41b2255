"""Many streams that end in every way at once: nothing is lost, mixed up or left behind. A tiny random model, ids only.

PAGED_BACKEND_SOAK=1 runs it at full size: 256 streams for a minute, then 5,000 short ones.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from server.client import GREEDY, ROOT, Call, wait_for
from server.conftest import Launched, serving

from paged_backend.monitor.samples import scrape
from paged_backend.triton_adapter.metric_names import COUNTERS

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

SOAK = bool(os.environ.get("PAGED_BACKEND_SOAK"))
STREAMS, SECONDS, SHORT_STREAMS = (256, 60.0, 5000) if SOAK else (32, 6.0, 300)
BLOCKS = 512 if SOAK else 128
PROMPTS = [[1, 5 + i, 7, *range(20, 20 + 3 * i)] for i in range(8)]
TOKENS = 200
SHM_LIMIT = 64 * 1024**2
REASONS = ("stop", "length", "abort", "timeout", "error")
WAYS = ("whole", "whole", "short", "cancel", "disconnect", "deadline")


@pytest.fixture(scope="module")
def server(tmp_path_factory: Any, tiny_llama: Path) -> Iterator[Launched]:
    """A pool small enough that running requests are preempted."""
    model = tmp_path_factory.mktemp("soak") / "models" / "paged_llm"
    shutil.copytree(ROOT / "model_repository" / "paged_llm", model, ignore=shutil.ignore_patterns("__pycache__"))
    arguments = {"model": str(tiny_llama), "skip_tokenizer_init": True, "num_kv_blocks": BLOCKS, "max_num_seqs": 64}
    (model / "1" / "model.json").write_text(json.dumps({**arguments, "num_threads": 1, "dtype": "float32"}))
    with serving(model.parent.parent / "log", f"--model-repository={model.parent}") as launched:
        yield launched


@pytest.fixture(scope="module")
def alone(server: Launched) -> list[list[int]]:
    """What each prompt gives when nothing else runs."""
    return [_ids(_call(server, prompt, TOKENS).wait().responses) for prompt in PROMPTS]


def _call(server: Launched, prompt: list[int], tokens: int, **options: Any) -> Call:
    params = {**GREEDY, "max_tokens": tokens, "ignore_eos": True}
    return Call(server.grpc_url, "paged_llm", {"input_ids": prompt, "stream": True}, params, **options)


def _ids(responses: list[dict[str, list]]) -> list[int]:
    return [token for response in responses for token in response["output_ids"]]


def _one(server: Launched, rng: random.Random, alone: list[list[int]]) -> str:
    """One stream to an end chosen at random; returns which."""
    way = rng.choice(WAYS)
    index = rng.randrange(len(PROMPTS))
    tokens = rng.randint(1, 3) if way == "short" else TOKENS
    options = {"timeout": rng.randint(20_000, 400_000)} if way == "deadline" else {}
    call = _call(server, PROMPTS[index], tokens, **options)
    if way in ("cancel", "disconnect"):
        # Far from its end: see `Call.cancel`. A busy server merges tokens, so few responses may be all there are.
        received = [call.next()]
        for _ in range(rng.randint(0, 3)):
            received += [] if call.ended else [call.next()]
        assert _ids(received) == alone[index][: len(_ids(received))]
        if not call.ended:
            call.cancel() if way == "cancel" else call._client.close()
            return way
        way = "whole"
    answer = call.wait()
    got = _ids(answer.responses)
    if way == "deadline" and answer.error is not None:
        assert "timeout passed" in answer.error.message()
        assert got == alone[index][: len(got)]
        return "expired"
    assert answer.error is None, answer.error
    assert answer.finals == 1
    assert got == alone[index][:tokens]
    return way


def _regions(server: Launched) -> list[os.stat_result]:
    return [path.stat() for path in Path("/dev/shm").glob(f"paged_backend_{server.pid}_*")]


def _usage(server: Launched) -> dict[str, float]:
    processes = [process for process in server.family() if process.is_running()]
    regions = _regions(server)
    return {
        "processes": len(processes),
        "threads": sum(process.num_threads() for process in processes),
        "MiB": sum(process.memory_info().rss for process in processes) / 2**20,
        "regions": len(regions),
        "shared MiB": sum(region.st_size for region in regions) / 2**20,
    }


class _Counters(threading.Thread):
    """Looks at the server's counters while it lives: none may ever fall."""

    def __init__(self, server: Launched) -> None:
        super().__init__()
        self._url = server.metrics_url
        self._done = threading.Event()
        self.last = scrape(self._url)
        self.fallen: list[str] = []

    def run(self) -> None:
        while not self._done.wait(0.3):
            self.look()

    def look(self) -> None:
        now = scrape(self._url)
        for family in COUNTERS:
            for label in family.sources:
                labels = {family.label: label} if family.label else {}
                if now.value(family.name, **labels) < self.last.value(family.name, **labels):
                    self.fallen.append(f"{family.name}{labels}")
        self.last = now

    def finish(self) -> None:
        self._done.set()
        self.join()
        self.look()


def test_streams_that_end_in_every_way(server: Launched, alone: list[list[int]]) -> None:
    seen: Counter[str] = Counter()
    faults: list[BaseException] = []

    def work(seed: int, until: float) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < until and not faults:
                seen[_one(server, rng, alone)] += 1
        except BaseException as fault:
            faults.append(fault)

    def crowd(streams: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        workers = [threading.Thread(target=work, args=(seed, until)) for seed in range(streams)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(300)
        assert not faults, faults[0]
        assert not any(worker.is_alive() for worker in workers)
        wait_for(server.metrics_url, running=0, waiting=0, used=0, free=BLOCKS)

    # The server keeps what it once needed for so many connections; only what comes on top is a leak.
    crowd(STREAMS, SECONDS / 3)
    before = _usage(server)
    counters = _Counters(server)
    counters.start()
    try:
        crowd(STREAMS, SECONDS)
    finally:
        counters.finish()
    after = _usage(server)
    assert not counters.fallen
    assert counters.last.value("vllm:num_preemptions_total") > 0, "the pool is too large to show anything"
    ended = {reason: counters.last.value("vllm:request_success_total", finished_reason=reason) for reason in REASONS}
    assert sum(ended.values()) == sum(seen.values()) + len(alone)
    assert ended["timeout"] == seen["expired"]
    assert ended["error"] == 0
    assert set(seen) >= {"whole", "short", "cancel", "disconnect", "expired"}, seen
    assert after["processes"] == before["processes"]
    assert after["threads"] <= before["threads"] + 8, (before, after)
    assert after["MiB"] <= before["MiB"] * 1.1 + 32, (before, after)
    assert after["regions"] <= before["regions"], (before, after)
    assert after["shared MiB"] <= SHM_LIMIT / 2**20, after


def test_short_streams_need_little_shared_memory(server: Launched, alone: list[list[int]]) -> None:
    numbers = itertools.count()
    faults: list[BaseException] = []

    def work() -> None:
        try:
            while not faults and (number := next(numbers)) < SHORT_STREAMS:
                index = number % len(PROMPTS)
                answer = _call(server, PROMPTS[index], 2).wait()
                assert (answer.finals, _ids(answer.responses)) == (1, alone[index][:2])
        except BaseException as fault:
            faults.append(fault)

    workers = [threading.Thread(target=work) for _ in range(16)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
    assert not faults, faults[0]
    assert next(numbers) >= SHORT_STREAMS
    assert sum(region.st_size for region in _regions(server)) <= SHM_LIMIT
    assert psutil.Process(server.pid).is_running()
