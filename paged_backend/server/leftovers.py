"""The python backend's folders in /tmp, of which every server makes one and a killed one leaves it.

It is always in /tmp and its name says nothing of the server. So an empty one is swept if it is older than every process
that has the backend loaded: then none of these has made it. Knows /proc and that name. Called by the launcher.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path

_PROC = Path("/proc")
_FOLDERS = Path("/tmp")
_PATTERN = "python_env_??????"
_LIBRARY = b"libtriton_python.so"
# The kernel tells a start to the second at best.
_MARGIN_SECONDS = 2.0


def sweep_python_env(folders: Path = _FOLDERS) -> list[Path]:
    """Remove this user's empty folders that no living server has made; returns them."""
    # Now counts, too: a server may start while this looks.
    before = min([time.time(), *map(_started, _servers())]) - _MARGIN_SECONDS
    removed = []
    for folder in folders.glob(_PATTERN):
        # One that is not empty stays, and one that somebody else removes meanwhile is fine.
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid == os.getuid() and status.st_mtime < before:
                folder.rmdir()
                removed.append(folder)
    return removed


def _servers() -> list[int]:
    """The processes that have the python backend loaded, as far as this user may look."""
    found = []
    for process in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _LIBRARY in (process / "maps").read_bytes():
                found.append(int(process.name))
    return found


def _started(pid: int) -> float:
    """When a process was started, in seconds since the epoch; "for ever ago" if it is gone meanwhile."""
    try:
        after_name = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in (_PROC / "stat").read_text().splitlines() if line.startswith("btime "))
    except OSError:
        return -math.inf
    # starttime is the 22nd field, and the 20th after the name.
    return int(boot.split()[1]) + int(after_name[19]) / os.sysconf("SC_CLK_TCK")
