"""Seeing that a server's stub has died, with real processes of that name."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paged_backend.server.stubs import StubWatch


@pytest.fixture
def binary(tmp_path) -> Path:
    """A program of the stub's name; as `sleep`, it ends with code 1 unless its argument is a number."""
    path = tmp_path / "triton_python_backend_stub"
    shutil.copy(shutil.which("sleep"), path)
    return path


@pytest.fixture
def start(binary):
    """Starts a stub with an argument."""
    started = []

    def run(argument: str) -> subprocess.Popen:
        started.append(subprocess.Popen([binary, argument], stderr=subprocess.DEVNULL))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def heir() -> Iterator[None]:
    """This process inherits its children's children, as the launcher does."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)
    yield
    ctypes.CDLL(None).prctl(set_child_subreaper, 0, 0, 0, 0)


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
    assert [(stub.pid, stub.ending) for stub in watch.dead_before_server()] == [(dead.pid, "exited with code 1")]
    reported = [stub.pid for _ in range(10) for stub in watch.poll()]
    assert reported == [dead.pid]


def _readable(fds: list[int], seconds: float) -> bool:
    return bool(select.select(fds, [], [], seconds)[0])


def test_the_end_of_a_stub_wakes_whoever_waits_for_it(start):
    watch = StubWatch(os.getpid())
    stub, ended = start("60"), start("61")
    watch.poll()
    assert len(watch.pidfds) == 2
    assert not watch.unsure
    assert not _readable(watch.pidfds, 0.05)
    ended.kill()
    assert _readable(watch.pidfds, 5)
    # From here on it is looked at now and then: who waits must not be woken again and again.
    watch.poll()
    assert watch.unsure
    assert len(watch.pidfds) == 1
    assert not _readable(watch.pidfds, 0.05)
    ended.wait()
    watch.poll()
    assert not watch.unsure
    stub.kill()
    assert _readable(watch.pidfds, 5)
    stub.wait()
    watch.poll()
    assert watch.pidfds == []


def test_closing_leaves_no_file_descriptor_open(start):
    before = len(os.listdir("/proc/self/fd"))
    watch = StubWatch(os.getpid())
    start("60")
    watch.poll()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_stub_that_was_collected_ended_as_it_should(start):
    watch = StubWatch(os.getpid())
    start("60")
    ended = start("/models/paged_llm/1/model.py")
    _wait_until_dead(ended.pid)
    watch.poll()
    ended.wait()
    assert watch.poll() == []
    assert watch.dead_before_server() == []


def test_the_only_stub_that_was_collected_is_forgotten(start):
    watch = StubWatch(os.getpid())
    ended = start("/models/paged_llm/1/model.py")
    _wait_until_dead(ended.pid)
    watch.poll()
    assert watch.unsure
    ended.wait()
    assert watch.poll() == []
    assert not watch.unsure
    assert watch.dead_before_server() == []


def test_a_stub_whose_server_aborts_at_once_is_known_all_the_same(binary, heir):
    server = subprocess.Popen(["sh", "-c", f"{binary} 60 & {binary} 61 & exec sleep 62"])
    watch = StubWatch(server.pid)
    while [child.cmdline()[:1] for child in psutil.Process(server.pid).children()] != [[str(binary)]] * 2:
        time.sleep(0.01)
    killed, other = psutil.Process(server.pid).children()
    assert watch.poll() == []
    killed.kill()
    _wait_until_dead(killed.pid)
    server.kill()
    server.wait()
    found = watch.dead_before_server()
    other.kill()
    assert [os.waitpid(child.pid, 0)[0] for child in (killed, other)] == [killed.pid, other.pid]
    assert [(stub.pid, stub.ending) for stub in found] == [(killed.pid, "was killed by signal 9 (SIGKILL)")]
