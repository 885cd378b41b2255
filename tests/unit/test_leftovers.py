"""Sweeping the folders that killed servers leave in /tmp, and only those."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from paged_backend.server import leftovers


def test_empty_folders_of_dead_servers_are_swept(tmp_path: Path) -> None:
    """Those older than every living server; a process that has the library mapped stands for one."""
    old, new, full, other = (
        tmp_path / f"python_env_{name}" for name in ("ABCdef", "abcDEF", "fulFUL", "not-it-at-all")
    )
    for folder in (old, new, full, other):
        folder.mkdir()
    (full / "file").touch()
    library = tmp_path / "libtriton_python.so"
    library.write_bytes(bytes(4096))
    hold = "import mmap, sys; f = open(sys.argv[1]); m = mmap.mmap(f.fileno(), 0, prot=1); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        for folder in (old, full):
            os.utime(folder, (0, 0))
        # As old as the process, or younger.
        os.utime(new, (time.time() + 9, time.time() + 9))
        assert leftovers.sweep_python_env(tmp_path) == [old]
        assert new.is_dir(), "the living server may have made it"
        server.communicate(b"\n")
    assert leftovers.sweep_python_env(tmp_path) == [], "a server that starts right now may have made it"
    os.utime(new, (0, 0))
    assert leftovers.sweep_python_env(tmp_path) == [new]
    assert full.is_dir()
    assert other.is_dir()
