"""A killed engine under plain `tritonserver`: clients hang, and reloading the model brings it back (deployment.md).

Or the server of 2024 aborts, if a response was on its way: in one of five kills amid a token every few milliseconds,
in none of 25 between two slow tokens. That ends all waiting, too, and is tried again here.
"""

from __future__ import annotations

import json
import queue
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from server.client import GREEDY, Answer, Call
from server.conftest import SLOW_MODEL, STEP_SECONDS
from tritonclient.utils import InferenceServerException

from paged_backend.server import environment, locate, probe, process
from paged_backend.server.log import ServerLog

pytestmark = pytest.mark.server

IDS = {"input_ids": [1, 5, 7], "stream": True}


class Plain:
    """A server without the launcher, its models loaded and unloaded by request."""

    def __init__(self, repository: Path, scratch: Path) -> None:
        install = locate.find_server()
        prepared = environment.prepare(install, scratch, None)
        with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
            self._http_port, grpc_port = first.getsockname()[1], second.getsockname()[1]
        self.grpc_url = f"127.0.0.1:{grpc_port}"
        prefix = process.new_region_prefix()
        options = [
            *(f"--model-repository={repository}", "--model-control-mode=explicit", "--load-model=llm"),
            *(f"--backend-directory={prepared.backend_directory}", "--allow-metrics=false"),
            *("--http-address=127.0.0.1", f"--http-port={self._http_port}", "--grpc-address=127.0.0.1"),
            *(f"--grpc-port={grpc_port}", f"--backend-config=python,shm-region-prefix-name={prefix}"),
        ]
        self._process = process.ServerProcess([str(install.binary), *options], prepared.variables, prefix)
        self._log = ServerLog()
        self._log.follow(self._process.output)

    def wait_ready(self) -> None:
        """Until the model is served."""
        deadline = time.monotonic() + 60
        while probe.ready_models("127.0.0.1", self._http_port) is None:
            assert self._process.exit_code is None, self._log.explain()
            assert time.monotonic() < deadline, self._log.explain()
            time.sleep(0.1)

    def wait(self, timeout: float) -> int | None:
        """The server's exit code; None if it still runs after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._process.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._process.exit_code

    def repository(self, action: str) -> None:
        """`load` or `unload` the model."""
        url = f"http://127.0.0.1:{self._http_port}/v2/repository/models/llm/{action}"
        urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=60).read()

    def stub(self) -> psutil.Process:
        """The model's process; a killed one stays a zombie, which the server does not collect."""
        children = psutil.Process(self._process.pid).children()
        (found,) = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        return found

    def stop(self) -> None:
        """At once: a request that hangs would delay an orderly end."""
        self._process.stop(grace=0)


@pytest.fixture
def start(tmp_path: Path, tiny_llama: Path) -> Iterator[Callable[[], Plain]]:
    """Starts a server of `llm`, a tiny random model that takes a tenth of a second for each token."""
    version = tmp_path / "models" / "llm" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "python"\ninstance_group [{ kind: KIND_MODEL }]\n')
    arguments = {"model": str(tiny_llama), "skip_tokenizer_init": True, "num_kv_blocks": 64, "num_threads": 1}
    (version / "model.json").write_text(json.dumps(arguments))
    (version / "model.py").write_text(SLOW_MODEL)
    started: list[Plain] = []

    def run() -> Plain:
        scratch = tmp_path / f"server-{len(started)}"
        scratch.mkdir()
        started.append(Plain(tmp_path / "models", scratch))
        started[-1].wait_ready()
        return started[-1]

    yield run
    for server in started:
        server.stop()


def _answer(server: Plain) -> Answer:
    """What a short request gets."""
    return Call(server.grpc_url, "llm", IDS, {**GREEDY, "max_tokens": 4}).wait()


def _kill_engine(start: Callable[[], Plain]) -> tuple[Plain, Call, int, list[int]]:
    """A server whose engine was killed between two tokens of a stream, that stream, the engine's process id, and what
    the engine answered before."""
    for _ in range(3):
        server = start()
        before = _answer(server).joined("output_ids")
        stream = Call(server.grpc_url, "llm", IDS, {**GREEDY, "max_tokens": 240, "ignore_eos": True})
        stream.next()
        time.sleep(STEP_SECONDS / 2)
        stub = server.stub()
        stub.kill()
        try:
            with pytest.raises(queue.Empty):
                stream.next(timeout=1.5)
        except InferenceServerException:
            assert server.wait(10) == -signal.SIGABRT
        else:
            return server, stream, stub.pid, before
    raise AssertionError("the server aborted every time")


def test_a_killed_engine_is_brought_back_by_reloading(start: Callable[[], Plain]) -> None:
    server, hanging, killed, before = _kill_engine(start)
    error = _answer(server).error
    assert error is not None
    assert "is not healthy" in error.message()
    server.repository("unload")
    server.repository("load")
    assert server.stub().pid != killed
    assert _answer(server).joined("output_ids") == before
    hanging.cancel()
