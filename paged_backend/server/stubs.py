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

from paged_backend.server.process import open_pidfd

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
    """Watches the stubs of one server.

    `poll` now and then, to see new ones; when one of `pidfds` is readable; and a few times a second while `unsure`.
    """

    def __init__(self, server_pid: int) -> None:
        self._server_pid = server_pid
        self._models: dict[int, str] = {}
        self._pidfds: dict[int, list[int]] = {}
        self._sightings: dict[int, int] = {}
        self._seen_dead: dict[int, DeadStub] = {}

    @property
    def pidfds(self) -> list[int]:
        """File descriptors that are readable when a stub that lived at the last `poll` has ended."""
        return [fd for fds in self._pidfds.values() for fd in fds]

    @property
    def unsure(self) -> bool:
        """Whether a stub has died that the server may still collect."""
        return bool(self._seen_dead)

    def close(self) -> None:
        """Stop watching."""
        for pid in list(self._pidfds):
            self._unwatch(pid)

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
        self._forget_collected()
        for pid in self._pidfds.keys() - set(children):
            self._unwatch(pid)
        for pid in children:
            status = _zombie_status(pid)
            if status is None:
                if pid not in self._models and (model := _stub_model(pid)) is not None:
                    self._models[pid] = model
                    self._pidfds[pid] = open_pidfd(pid)
                continue
            self._unwatch(pid)
            self._sightings[pid] = self._sightings.get(pid, 0) + 1
            self._seen_dead[pid] = DeadStub(pid, self._models.get(pid, "?"), status)
            if self._sightings[pid] == _SIGHTINGS:
                dead.append(self._seen_dead[pid])
        return dead

    def _forget_collected(self) -> None:
        """Stubs that the server has collected ended as they should. Those of a server that is gone are children of this
        process, and known until it collects them itself."""
        for pid in [pid for pid in {*self._models, *self._seen_dead} if not (_PROC / str(pid)).exists()]:
            for known in (self._models, self._sightings, self._seen_dead):
                known.pop(pid, None)

    def _unwatch(self, pid: int) -> None:
        for fd in self._pidfds.pop(pid, []):
            os.close(fd)

    def ask_to_drain(self) -> None:
        """Tell every live stub that the server stops: engine models end their requests, others ignore it."""
        for pid in _children(self._server_pid):
            if _stub_model(pid) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    tasks = f"{_PROC}/{pid}/task"
    # A child belongs to the thread that made it. A server has a hundred threads: no paths, which cost ten times more.
    with contextlib.suppress(OSError):
        for thread in os.listdir(tasks):
            with contextlib.suppress(OSError), open(f"{tasks}/{thread}/children", "rb", buffering=0) as file:
                found += map(int, file.read().split())
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
