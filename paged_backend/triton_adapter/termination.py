"""SIGTERM in the stub process: tells the model that the server is going down.

The server finalizes a model only once its requests have ended, so a model that is to end them earlier must hear of the
stop in another way. The stub's main thread waits in the server's code and would run a Python signal handler only with
the next request; the interpreter's wake-up descriptor is written at once, and a thread reads it here. The launcher
sends the signal; in a container without it, whatever stops the pod may (docs/deployment.md). Knows no requests.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_STOP = b"\0"


class TerminationListener:
    """Calls `on_terminate`, on a thread of its own, for each SIGTERM; `install` and `remove` on the main thread."""

    def __init__(self, on_terminate: Callable[[], None]) -> None:
        self._on_terminate = on_terminate
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._run, name="paged-termination", daemon=True)
        self._previous: Any = None
        self._previous_fd = -1
        self._installed = False

    def install(self) -> None:
        """Listen from now on."""
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # Without a handler of Python's own nothing is written; this one has nothing left to do.
        self._previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
        self._installed = True
        self._thread.start()

    def remove(self) -> None:
        """Listen no more."""
        if not self._installed:
            return
        self._installed = False
        signal.set_wakeup_fd(self._previous_fd)
        # None: a handler that C code had installed cannot be put back. Ignoring is what the stub's does.
        signal.signal(signal.SIGTERM, signal.SIG_IGN if self._previous is None else self._previous)
        os.write(self._writer, _STOP)
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _run(self) -> None:
        while (number := os.read(self._reader, 1)) != _STOP:
            if number[0] == signal.SIGTERM:
                try:
                    self._on_terminate()
                except Exception:
                    logger.exception("ending the live requests failed")
