"""Fixtures that start real servers through the launcher and check that nothing of them is left.

`served` is the project's model repository with the demo model, started once per session on free ports. `launch` starts
servers on other repositories, one test's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = "smollm2-135m-instruct"
_PORTS = re.compile(r"^HTTP (\S+)  gRPC (\S+)  metrics (\S+)/metrics", re.MULTILINE)
_SHARED_MEMORY = Path("/dev/shm")

# A model.py whose steps are slowed down, so that requests to a tiny model live as long as a test needs.
STEP_SECONDS = 0.1
SLOW_MODEL = f"""
import os, time
from paged_backend.triton_adapter.backend import LLMModel

class TritonPythonModel(LLMModel):
    def initialize(self, args):
        super().initialize(args)
        execute = self._engine.worker.execute

        def slowly(plan):
            if os.path.exists(os.path.join(args["model_repository"], "fail")):
                raise RuntimeError("out of cheese")
            time.sleep({STEP_SECONDS})
            return execute(plan)

        self._engine.worker.execute = slowly
"""


class Launched:
    """One `paged-backend serve`, on ports the system chose.

    Attributes:
        pid: of the launcher; the server is its child.
        http_url, grpc_url, metrics_url: host:port of each service, once ready.
    """

    def __init__(self, log: Path, *arguments: str, **variables: str) -> None:
        self.http_url = self.grpc_url = self.metrics_url = ""
        self._log = log
        environment = {key: value for key, value in os.environ.items() if "PAGED_BACKEND" not in key}
        # A folder of its own for scratch files, so that leftovers are seen.
        self.scratch = log.parent / f"{log.name}-scratch"
        self.scratch.mkdir()
        ports = [f"--{service}-port=0" for service in ("http", "grpc", "metrics")]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paged_backend.cli", "serve", *ports, *arguments],
                cwd=ROOT,
                env=environment | {"TMPDIR": str(self.scratch)} | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.pid = self._process.pid
        self._family: dict[int, psutil.Process] = {}

    @property
    def output(self) -> str:
        """Everything the launcher has printed."""
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 60.0) -> None:
        """Wait until the launcher has printed `text`; fails with its output when it ends before."""
        deadline = time.monotonic() + timeout
        while text not in self.output:
            # Printed and ended between the two looks: still a success.
            ended = self._process.poll() is not None and text not in self.output
            assert not ended, f"ended before printing {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in {timeout} s:\n{self.output}"
            time.sleep(0.05)

    def wait_ready(self, timeout: float = 60.0) -> Launched:
        """Wait until the models are served, and learn the ports."""
        self.wait_for("\ntry: ", timeout)
        found = _PORTS.search(self.output)
        assert found, self.output
        self.http_url, self.grpc_url, self.metrics_url = found.groups()
        return self

    def family(self) -> list[psutil.Process]:
        """The server and its stubs, the server first; remembered for `assert_gone`."""
        for process in psutil.Process(self.pid).children(recursive=True):
            self._family[process.pid] = process
        return list(self._family.values())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the launcher alone."""
        if self._process.poll() is None:
            self.family()
        self._process.send_signal(number)

    def wait(self, timeout: float = 30.0) -> int:
        """The launcher's exit code."""
        return self._process.wait(timeout)

    def stop(self) -> int:
        """Ctrl-C, unless it ended already; the exit code."""
        if self._process.poll() is None:
            self.signal(signal.SIGINT)
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def assert_gone(self, timeout: float = 5.0) -> None:
        """No process, port or shared-memory region is left."""
        _, alive = psutil.wait_procs(self._family.values(), timeout)
        alive = [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
        assert not alive, f"still running: {alive}"
        regions = [path.name for path in _SHARED_MEMORY.glob(f"paged_backend_{self.pid}_*")]
        assert not regions, f"shared memory left: {regions}"
        for url in filter(None, (self.http_url, self.grpc_url, self.metrics_url)):
            host, _, port = url.rpartition(":")
            with socket.socket() as probe:
                assert probe.connect_ex((host, int(port))) != 0, f"{url} still listens"

    def assert_no_files(self) -> None:
        """The launcher removed its scratch files."""
        left = [str(path) for path in self.scratch.glob("paged-backend-*")]
        assert not left, f"files left: {left}"


def copy_repository(folder: Path, **arguments: Any) -> Path:
    """A copy of the project's model repository in `folder`, with these engine arguments.

    In float32, whatever the CPU can do: in bfloat16 near-ties fall differently with the neighbours in a batch, and
    these tests compare texts.
    """
    repository = folder / "model_repository"
    shutil.copytree(ROOT / "model_repository", repository, ignore=shutil.ignore_patterns("__pycache__"))
    path = repository / "paged_llm" / "1" / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "float32", **arguments}))
    return repository


@contextlib.contextmanager
def serving(log: Path, *options: str, timeout: float = 120.0) -> Iterator[Launched]:
    """A server for the length of a block; it must end well and leave nothing behind."""
    launched = Launched(log, *options)
    try:
        yield launched.wait_ready(timeout=timeout)
    finally:
        code = launched.stop()
    assert code == 0, launched.output
    launched.assert_gone()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """The project's model repository with the demo model: `.http_url .grpc_url .metrics_url .pid`."""
    folder = tmp_path_factory.mktemp("served")
    repository = copy_repository(folder)
    options = (f"--model-repository={repository}", f"--model={DEMO_MODEL}")
    with serving(folder / "log", *options, timeout=240.0) as launched:
        yield launched
    launched.assert_no_files()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """`launch(repository, *arguments, **environment)` starts a launcher, ended with the test if not by it."""
    started: list[Launched] = []

    def start(repository: Path, *arguments: str, **variables: str) -> Launched:
        log = tmp_path / f"launcher-{len(started)}.log"
        started.append(Launched(log, f"--model-repository={repository}", *arguments, **variables))
        return started[-1]

    yield start
    for launched in started:
        launched.stop()
        launched.assert_gone()
