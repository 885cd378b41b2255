"""The launcher's folder of temporary files, and sweeping up after launchers that were killed.

Each folder is locked by the launcher that made it for as long as it lives, whatever becomes of it; a folder nobody
holds belongs to a dead one. The lock file names the shared-memory regions of that launcher's server, which go too.
Knows nothing of servers. Called by the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paged_backend.server.process import sweep_regions

_PREFIX = "paged-backend-"
_LOCK = "owner.lock"


@contextlib.contextmanager
def scratch_folder(region_prefix: str) -> Iterator[Path]:
    """A new folder, removed afterwards; `region_prefix` is what a later launcher sweeps if this one is killed."""
    sweep()
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as name:
        folder = Path(name)
        # Not inherited by the server: it would hold the lock on.
        with (folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(region_prefix)
            lock.flush()
            yield folder


def sweep() -> list[Path]:
    """Remove what killed launchers of this user left; returns the folders."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid() and _remove_if_dead(folder):
                removed.append(folder)
    return removed


def _remove_if_dead(folder: Path) -> bool:
    # Opened for reading only: a folder without the file is somebody else's, or is being made right now.
    with (folder / _LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        prefix = lock.read()
        if not prefix:
            return False
        sweep_regions(prefix)
        shutil.rmtree(folder)
    return True
