"""The python backend's stub processes of a running server: which live, which have died, and asking them to drain.

A stub that dies is not noticed by the server: its model stays "ready" and clients in flight wait for ever; or, if it
was about to send something, the server aborts. The dead process stays a zombie child of the server, or of the launcher
after it, which is what is looked for here; a stub that ends in an orderly way (a model being unloaded) is a zombie only
for a moment. Knows /proc and the stub's command line. Called by the launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STUB_NAME = "triton_python_backend_stub"
# Longest that an orderly ended stub may wait for the server to collect it.
_SIGHTINGS = 4


@dataclass(frozen=True)
class DeadStub:
    """A stub that has died.

    Attributes:
        model: the served model it ran; "?" if it was never seen alive.
        exit_status: that of waitpid().
    """

    pid: int
    model: str
    exit_status: int

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = os.waitstatus_to_exitcode(self.exit_status)
        return f"exited with code {code}" if code >= 0 else f"was killed by signal {-code} ({_signal_name(-code)})"


class StubWatch:
    """Watches the stubs of one server; `poll` a few times a second."""

    def __init__(self, server_pid: int) -> None:
        self._server_pid = server_pid
        self._models: dict[int, str] = {}
        self._sightings: dict[int, int] = {}
        self._seen_dead: dict[int, DeadStub] = {}

    def dead_before_server(self) -> list[DeadStub]:
        """The stubs that were dead, sure or not, when the server ended; to be asked as soon as it has."""
        for pid in _children(os.getpid()):  # which inherits the server's, see process.py
            status = _zombie_status(pid)
            # Without their server the others end as well, but by themselves.
            if status is not None and os.WIFSIGNALED(status) and pid in self._models:
                self._seen_dead[pid] = DeadStub(pid, self._models[pid], status)
        return list(self._seen_dead.values())

    def poll(self) -> list[DeadStub]:
        """The stubs that have died since the last call, each reported once it is sure."""
        dead = []
        children = _children(self._server_pid)
        if children:
            # Collected by the server since, so they ended as they should. Of a server that is gone nothing is known.
            self._seen_dead = {pid: stub for pid, stub in self._seen_dead.items() if pid in children}
        for pid in children:
            status = _zombie_status(pid)
            if status is None:
                if pid not in self._models and (model := _stub_model(pid)) is not None:
                    self._models[pid] = model
                continue
            self._sightings[pid] = self._sightings.get(pid, 0) + 1
            self._seen_dead[pid] = DeadStub(pid, self._models.get(pid, "?"), status)
            if self._sightings[pid] == _SIGHTINGS:
                dead.append(self._seen_dead[pid])
        return dead

    def ask_to_drain(self) -> None:
        """Tell every live stub that the server stops: engine models end their requests, others ignore it."""
        for pid in _children(self._server_pid):
            if _stub_model(pid) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    # A child belongs to the thread that made it.
    for path in (_PROC / str(pid) / "task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _stub_model(pid: int) -> str | None:
    """The model a stub runs; None if the process is no stub, or gone."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    # stub <repository>/<model>/<version>/model.py ...
    if len(words) < 2 or Path(words[0]).name != _STUB_NAME:
        return None
    parts = Path(words[1]).parts
    return parts[-3] if len(parts) >= 3 else words[1]


def _zombie_status(pid: int) -> int | None:
    """The wait status of a stub that has ended and was not collected yet; None if it lives, is gone or is no stub."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name in parentheses may hold anything; state is the first field after it, exit_code the last.
    name, _, rest = text.rpartition(")")
    words = rest.split()
    return int(words[-1]) if words[0] == "Z" and name.partition("(")[2] == _STUB_NAME[:15] else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
