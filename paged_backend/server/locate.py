"""Where a Triton Server is on this machine: the one on PATH, else the one inside the nvidia-pytriton wheel.

Knows the two layouts; starts nothing and changes nothing. Called by the launcher.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from paged_backend.server.errors import LaunchError

_STUB_NAME = "triton_python_backend_stub"
_FIRST_WITHOUT_NUMPY_1 = (3, 13)
_CONTAINER_BACKENDS = Path("/opt/tritonserver/backends")
# The stub names the libpython it embeds; wheels may rename it (libpython3-419a3a08.13.so.1.0).
_LIBPYTHON = re.compile(rb"libpython3(?:-[0-9a-f]+)?\.(\d+)[0-9A-Za-z.]*\.so[0-9.]*")


@dataclass(frozen=True)
class ServerInstall:
    """A Triton Server found on disk.

    Attributes:
        binary: the `tritonserver` executable.
        python_backend: directory with the python backend's shared library and utilities.
        stub: the python backend's stub process for the running Python.
        libraries: directory of shared libraries the bundled server needs; None for a server on PATH, which finds
            its own.
    """

    binary: Path
    python_backend: Path
    stub: Path
    libraries: Path | None

    @property
    def bundled(self) -> bool:
        """Whether this is the server inside the nvidia-pytriton wheel."""
        return self.libraries is not None


def find_server() -> ServerInstall:
    """Find the server to start; one on PATH wins, since production machines bring their own.

    Raises:
        LaunchError: no server, no python backend, or no stub for the running Python.
    """
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return _installed(Path(on_path).resolve())
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        if sys.version_info >= _FIRST_WITHOUT_NUMPY_1:
            raise LaunchError(
                "no Triton Server found on PATH, and the one in nvidia-pytriton needs numpy 1, which Python "
                f"3.{sys.version_info.minor} has not: use Python 3.10, 3.11 or 3.12"
            )
        raise LaunchError(
            "no Triton Server found: none on PATH and nvidia-pytriton is not installed; "
            "run: pip install 'paged-backend[server]'"
        )
    return _bundled(Path(spec.origin).parent)


def libpython_soname(stub: Path) -> tuple[str, int] | None:
    """The libpython the stub is linked to and its minor version, such as ("libpython3.11.so.1.0", 11).

    None when the file names no libpython.
    """
    match = _LIBPYTHON.search(stub.read_bytes())
    return (match.group(0).decode(), int(match.group(1))) if match else None


def _installed(binary: Path) -> ServerInstall:
    beside = binary.parent.parent / "backends"
    backends = beside if beside.is_dir() else _CONTAINER_BACKENDS
    stub = backends / "python" / _STUB_NAME
    if not stub.is_file():
        raise LaunchError(
            f"the server on PATH ({binary}) has no python backend in {backends}: "
            "use a Triton Server build that includes it"
        )
    soname = libpython_soname(stub)
    if soname is not None and soname[1] != sys.version_info.minor:
        raise LaunchError(
            f"the server on PATH ({binary}) runs Python 3.{soname[1]}, this is Python "
            f"3.{sys.version_info.minor}: install paged-backend into a Python 3.{soname[1]}"
        )
    return ServerInstall(binary, stub.parent, stub, libraries=None)


def _bundled(package: Path) -> ServerInstall:
    root = package / "tritonserver"
    stubs = root / "python_backend_stubs"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = stubs / version / _STUB_NAME
    if not stub.is_file():
        have = ", ".join(sorted((path.name for path in stubs.glob("3.*")), key=_minor)) or "none"
        raise LaunchError(
            f"the bundled server has no stub for Python {version} (it has {have}): "
            "make a virtual environment with one of these"
        )
    return ServerInstall(
        binary=root / "bin" / "tritonserver",
        python_backend=root / "backends" / "python",
        stub=stub,
        libraries=package.parent / "nvidia_pytriton.libs",
    )


def _minor(version: str) -> int:
    return int(version.rpartition(".")[2])
