"""Seeing that a server's stub has died, with real processes of that name."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from paged_backend.server.stubs import StubWatch


@pytest.fixture
def start(tmp_path):
    """Starts a child under the stub's name; as `sleep`, it ends with code 1 unless its argument is a number."""
    binary = tmp_path / "triton_python_backend_stub"
    shutil.copy(shutil.which("sleep"), binary)
    started = []

    def run(argument: str) -> subprocess.Popen:
        started.append(subprocess.Popen([binary, argument], stderr=subprocess.DEVNULL))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def _wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 5
    while f" ({'triton_python_backend_stub'[:15]}) Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_dead_stub_is_reported_once_it_is_sure(start):
    watch = StubWatch(os.getpid())
    dead = start("/models/paged_llm/1/model.py")
    _wait_until_dead(dead.pid)
    assert watch.poll() == []
    # Should the server go too before that is sure, it is known who went first.
    assert [(stub.pid, stub.ending) for stub in watch.seen_dead] == [(dead.pid, "exited with code 1")]
    reported = [stub.pid for _ in range(10) for stub in watch.poll()]
    assert reported == [dead.pid]


def test_a_stub_that_was_collected_ended_as_it_should(start):
    watch = StubWatch(os.getpid())
    start("60")
    ended = start("/models/paged_llm/1/model.py")
    _wait_until_dead(ended.pid)
    watch.poll()
    ended.wait()
    assert watch.poll() == []
    assert watch.seen_dead == []
