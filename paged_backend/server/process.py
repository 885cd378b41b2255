"""One server process and all it leaves behind: its stubs, and their shared-memory regions.

The server gets a process group of its own, so that Ctrl-C in a terminal reaches the launcher alone, and so that stubs
can be ended with it. Knows Linux process control; knows nothing of ports or models. Called by the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from paged_backend.server.errors import LaunchError

_SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.05
_REAP_SECONDS = 5.0


def new_region_prefix() -> str:
    """A name prefix that no other server's shared-memory regions have."""
    return f"paged_backend_{os.getpid()}_{secrets.token_hex(4)}_"


def open_pidfd(pid: int) -> list[int]:
    """A file descriptor that is readable once a process has ended, collected or not; none if it is gone, or on a
    kernel without them (Linux before 5.3, some sandboxes)."""
    with contextlib.suppress(OSError):
        return [os.pidfd_open(pid)]
    return []


class ServerProcess:
    """A started server. `stop()` must be called, whether or not it still runs.

    Attributes:
        pidfds: see `open_pidfd`; closed by `stop()`.
    """

    def __init__(self, command: Sequence[str], variables: dict[str, str], region_prefix: str) -> None:
        """Start `command` with the environment `variables`.

        Must be called in the main thread: the kernel ends the server when the *thread* that started it is gone.

        Raises:
            LaunchError: the command cannot be started.
        """
        self._region_prefix = region_prefix
        libc = ctypes.CDLL(None, use_errno=True)
        # Stubs that outlive a killed server become children of this process and can be waited for.
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        launcher = os.getpid()

        def die_with_launcher() -> None:
            # SIGTERM rather than SIGKILL: the server then removes its own stubs and regions.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != launcher:
                os._exit(1)

        try:
            self._process = subprocess.Popen(
                list(command),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_launcher,  # safe: no thread runs yet
            )
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]}: {error.strerror or error}") from error
        self.pidfds = open_pidfd(self._process.pid)

    @property
    def output(self) -> IO[bytes]:
        """Standard output and standard error of the server and its stubs, as one stream."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def pid(self) -> int:
        """Of the server itself."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the server runs."""
        return self._process.poll()

    def stop(self, grace: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """End the server and everything it left behind. Calling it again does nothing.

        Args:
            grace: seconds it may take to stop by itself; 0 ends it at once.
            hurry: asked meanwhile; True ends the wait.

        Returns:
            Whether the server stopped by itself, rather than being killed; whether it was content is `exit_code`.
        """
        orderly = self._ask_to_stop(grace, hurry)
        self._kill_group()
        sweep_regions(self._region_prefix)
        while self.pidfds:
            os.close(self.pidfds.pop())
        return orderly

    def _ask_to_stop(self, grace: float, hurry: Callable[[], bool]) -> bool:
        if self._process.poll() is not None:
            return True
        if grace > 0:
            self._process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + grace
        while self._process.poll() is None:
            if time.monotonic() >= deadline or hurry():
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _kill_group(self) -> None:
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + _REAP_SECONDS
        while time.monotonic() < deadline:
            try:
                ended, _ = os.waitpid(-group, os.WNOHANG)
            except ChildProcessError:
                return
            if not ended:
                time.sleep(_POLL_SECONDS)


def sweep_regions(prefix: str) -> list[str]:
    """Remove the shared-memory regions whose names start with `prefix`; returns their names."""
    removed = []
    for region in _SHARED_MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):
            region.unlink()
            removed.append(region.name)
    return removed
