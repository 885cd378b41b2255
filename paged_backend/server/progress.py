"""Tells a person what is going on while models load.

On a terminal one line is redrawn; elsewhere a line is printed when something changes, and now and then so that a long
load is seen to be alive. Knows nothing of servers. Called by the launcher.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_REDRAW_SECONDS = 0.5
_REMIND_SECONDS = 10.0


class Progress:
    """The display of one wait. `show` is cheap and may be called as often as one likes."""

    def __init__(self, stream: TextIO | None = None, redraw: bool | None = None) -> None:
        """`redraw` overrides whether `stream` (default stdout) is treated as a terminal."""
        self._stream = stream or sys.stdout
        self._redraw = self._stream.isatty() if redraw is None else redraw
        self._started = time.monotonic()
        self._shown = ""
        self._shown_at = float("-inf")
        self._drawn = False

    @property
    def elapsed(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._started

    def show(self, text: str) -> None:
        """Say that `text` is being done."""
        age = time.monotonic() - self._shown_at
        if self._redraw:
            if text == self._shown and age < _REDRAW_SECONDS:
                return
            line = f"{text} ({self.elapsed:.0f} s)"
            # A line that wraps could not be redrawn.
            self._stream.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
            self._drawn = True
        else:
            if text == self._shown and age < _REMIND_SECONDS:
                return
            self._stream.write(f"{text} ({self.elapsed:.0f} s)\n")
        self._stream.flush()
        self._shown, self._shown_at = text, time.monotonic()

    def clear(self) -> None:
        """Remove a redrawn line, so that what comes next starts on a clean one."""
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False
