"""The thread that looks after live requests: how often it looks, and what makes it."""

from __future__ import annotations

import threading
import time

import pytest

from paged_backend.triton_adapter import watcher
from paged_backend.triton_adapter.watcher import Watcher


class Stream:
    """A live request that is cancelled or not."""

    key = "1:"
    cancelled = False

    def poll_cancelled(self) -> bool:
        return self.cancelled


class Adapter:
    """What a watcher looks after; `looks` counts its sweeps, and `looked` is notified of them."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.aborted: list[str] = []
        self.looks = 0
        self.looked = threading.Condition()

    def publish(self) -> None:
        with self.looked:
            self.looks += 1
            self.looked.notify_all()

    def wait_for_looks(self, count: int, since: int | None = None) -> None:
        with self.looked:
            wanted = (self.looks if since is None else since) + count
            assert self.looked.wait_for(lambda: self.looks >= wanted, 20)


@pytest.fixture
def idle(monkeypatch):
    """An adapter and its watcher, which has nothing to look after and looks once an hour."""
    monkeypatch.setattr(watcher, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(watcher, "_LINGER_S", 0.05)
    monkeypatch.setattr(watcher, "_IDLE_INTERVAL_S", 3600.0)
    adapter = Adapter()
    made = Watcher(lambda: list(adapter.streams), adapter.aborted.append, adapter.publish)
    made.start()
    _wait_until_idle(adapter)
    yield adapter, made
    made.stop()


def _wait_until_idle(adapter: Adapter) -> None:
    deadline = time.monotonic() + 20
    looks = -1
    while looks != adapter.looks:
        assert time.monotonic() < deadline
        looks = adapter.looks
        time.sleep(0.3)


def test_without_requests_it_sleeps_until_there_is_something(idle):
    adapter, made = idle
    before = adapter.looks
    made.wake()
    # Twice: what is published last may come a moment after the last request.
    adapter.wait_for_looks(2, since=before)
    _wait_until_idle(adapter)


def test_live_requests_are_looked_at_until_they_have_ended(idle):
    adapter, made = idle
    adapter.streams = [Stream()]
    made.wake()
    adapter.wait_for_looks(20)
    assert adapter.aborted == []
    adapter.streams[0].cancelled = True
    adapter.wait_for_looks(3)
    assert "1:" in adapter.aborted
    adapter.streams = []
    _wait_until_idle(adapter)


def test_a_failing_sweep_is_not_the_last(idle, caplog):
    adapter, made = idle
    adapter.streams = [Stream()]
    adapter.streams[0].poll_cancelled = lambda: 1 / 0
    made.wake()
    deadline = time.monotonic() + 20
    while caplog.text.count("looking after the live requests failed") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    adapter.streams = [Stream()]
    adapter.wait_for_looks(2)
