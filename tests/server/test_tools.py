"""`paged-backend top` and `doctor --live` on a running server; and a backend installed, loaded and unloaded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from server.client import GREEDY, ROOT, Call, ask
from server.conftest import Launched

pytestmark = pytest.mark.server

IDS = {"input_ids": [1, 5, 7], "stream": True}
# Loading takes seconds, so that the suite does it less often than the soak run (docs/deployment.md).
RELOADS = 10 if os.environ.get("PAGED_BACKEND_SOAK") else 3


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paged_backend.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_top_shows_a_running_server(served: Any) -> None:
    ask(served.grpc_url, "paged_llm", "Once upon a time", 2)
    call = Call(
        served.grpc_url, "paged_llm", {"text_input": "Once", "stream": True}, {"max_tokens": 4000, "ignore_eos": True}
    )
    call.next()
    done = run("top", "--once", "--interval", "1", "--metrics-url", served.metrics_url)
    call.cancel()
    assert done.returncode == 0, done.stderr
    assert "paged_llm" in done.stdout
    words = done.stdout.split()
    assert words[words.index("running") + 1] == "1"
    assert float(words[words.index("generated") + 1]) > 1
    assert words[words.index("step") + 1] != "-"


def test_top_into_a_pipe_prints_a_line_per_look(served: Any) -> None:
    command = [sys.executable, "-m", "paged_backend.cli", "top", "--interval", "0.2"]
    with subprocess.Popen(
        [*command, "--metrics-url", served.metrics_url], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as a shell does in the background
    ) as watching:  # fmt: skip
        assert watching.stdout is not None
        lines = [watching.stdout.readline() for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(10) == 0
    for line in lines:
        assert re.match(r"\d\d:\d\d:\d\d paged_llm: 0 running, 0 waiting, ", line), line


def test_doctor_finds_a_running_server_well(served: Any) -> None:
    done = run("doctor", "--live", "--url", served.http_url, "--metrics-url", served.metrics_url)
    assert done.returncode == 0, done.stdout
    beat = re.search(r"paged_llm: alive \(last sign of life (\S+) s ago, dead after 15 s\), 0 requests", done.stdout)
    assert beat, done.stdout
    assert float(beat[1]) < 15
    assert not run("doctor", "--live", "--quiet", "--url", served.http_url, "--metrics-url", served.metrics_url).stdout


def post(server: Launched, path: str) -> None:
    request = urllib.request.Request(f"http://{server.http_url}/v2/repository/models/{path}", b"{}")
    urllib.request.urlopen(request, timeout=60).read()


def is_ready(server: Launched, model: str) -> bool:
    try:
        urllib.request.urlopen(f"http://{server.http_url}/v2/models/{model}/ready", timeout=10).read()
    except urllib.error.HTTPError:
        return False
    return True


def test_the_installed_backend_unloads_and_reloads_under_load(
    tmp_path: Path, tiny_llama: Path, launch: Callable[..., Launched]
) -> None:
    """A model of two files, `backend: "paged"`; unloaded again and again with requests in flight, without a trace."""
    version = tmp_path / "models" / "llm" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "paged"\ninstance_group [{ kind: KIND_MODEL }]\n')
    arguments = {"model": str(tiny_llama), "skip_tokenizer_init": True, "num_kv_blocks": 64, "num_threads": 1}
    (version / "model.json").write_text(json.dumps(arguments))
    server = launch(
        tmp_path / "models", "--", "--model-control-mode=explicit", "--load-model=llm", PAGED_BACKEND_DRAIN_SECONDS="0"
    ).wait_ready()
    process = psutil.Process(server.pid).children()[0]
    used: list[tuple[int, int, int]] = []
    for _ in range(RELOADS):
        calls = [Call(server.grpc_url, "llm", IDS, {**GREEDY, "max_tokens": 250, "ignore_eos": True}) for _ in range(4)]
        calls[0].next()
        post(server, "llm/unload")
        for call in calls:
            answer = call.wait()
            assert answer.finals == 1 or answer.error is not None
        deadline = time.monotonic() + 20
        while is_ready(server, "llm"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        post(server, "llm/load")
        assert Call(server.grpc_url, "llm", IDS, {**GREEDY, "max_tokens": 2}).wait().finals == 1
        regions = len([name for name in os.listdir("/dev/shm") if name.startswith(f"paged_backend_{server.pid}_")])
        used.append((len(process.children()), process.num_threads(), regions))
    assert used[-1][0] == used[0][0] == 1
    assert used[-1][1] <= used[1][1] + 2, used
    assert used[-1][2] <= used[0][2], used
    assert server.stop() == 0, server.output
