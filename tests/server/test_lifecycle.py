"""What ends a server, with requests in flight: SIGTERM, a killed or failing engine. A tiny random model, ids only."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from server.client import GREEDY, ROOT, Call, wait_for
from server.conftest import SLOW_MODEL, Launched

pytestmark = pytest.mark.server

IDS = {"input_ids": [1, 5, 7], "stream": True}
# The tiny model's context is 256 tokens.
FOREVER = {**GREEDY, "max_tokens": 250, "ignore_eos": True}


@pytest.fixture
def slow(tmp_path: Path, tiny_llama: Path, launch: Callable[..., Launched]) -> Callable[..., Launched]:
    """Starts a server whose one model, paged_llm, takes a tenth of a second for each token."""
    model = tmp_path / "models" / "paged_llm"
    shutil.copytree(ROOT / "model_repository" / "paged_llm", model, ignore=shutil.ignore_patterns("__pycache__"))
    arguments = {"model": str(tiny_llama), "skip_tokenizer_init": True, "num_kv_blocks": 64, "num_threads": 1}
    (model / "1" / "model.json").write_text(json.dumps(arguments))
    (model / "1" / "model.py").write_text(SLOW_MODEL)
    return lambda *options: launch(model.parent, *options).wait_ready()


def _start(server: Launched) -> Call:
    call = Call(server.grpc_url, "paged_llm", IDS, FOREVER)
    call.next()
    return call


def _stub(server: Launched) -> psutil.Process:
    (stub,) = [process for process in server.family() if "stub" in process.cmdline()[0]]
    return stub


def test_sigterm_ends_live_requests_and_says_what_it_waits_for(slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "client_examples")
    import common

    server = slow("--drain-seconds=1")
    # Closed at the very moment they end: cancelled then, they would be in flight for the server for ever.
    for _ in range(20):
        request = common.Request(server.grpc_url, 20)
        request.start("paged_llm", IDS | {"sampling_parameters": '{"max_tokens": 1}'}, ["output_ids"])
        assert len(list(request)) == 1
        request.close()
    call = _start(server)
    wait_for(server.metrics_url, running=1)
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    answer = call.drain()
    assert "the server is shutting down" in answer.error.message()
    assert (answer.finals, answer.errors) == (0, 1)
    assert 0.9 < time.monotonic() - began < 3
    assert len(answer.responses) > 5, "it went on while it might"
    assert server.wait(15) == 1
    assert server.output.endswith(
        "stopping: 1 request in flight may go on for 1 s\n"
        "stopped, but 1 request in flight was ended before the answer\n"
    )
    server.assert_gone()
    server.assert_no_files()


def test_a_killed_engine_ends_the_server_and_its_clients_learn_at_once(slow: Any) -> None:
    server = slow()
    call = _start(server)
    began = time.monotonic()
    _stub(server).kill()
    assert call.wait().error is not None
    assert time.monotonic() - began < 5
    assert server.wait(15) == 2
    last = server.output.splitlines()[-1]
    assert last.startswith("paged-backend: error: the process of model 'paged_llm' was killed by signal 9 (SIGKILL)")
    server.assert_gone()
    server.assert_no_files()


def test_a_failing_engine_answers_everybody_and_ends_the_server(slow: Any, tmp_path: Path) -> None:
    server = slow()
    calls = [_start(server) for _ in range(3)]
    (tmp_path / "models" / "paged_llm" / "fail").touch()
    for call in calls:
        assert "out of cheese" in call.wait().error.message()
    assert server.wait(15) == 2
    assert "error: the process of model 'paged_llm' exited with code 1" in server.output, server.output
    assert "the engine failed" in server.output
    server.assert_gone()
