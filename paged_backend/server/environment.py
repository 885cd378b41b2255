"""What a server needs around it: a backend directory and environment variables for the running Python.

The python backend's stub embeds libpython instead of running an interpreter. It finds packages the way any `python3`
does, by looking itself up on PATH: with this interpreter's folder first there, the stub sees the same virtual
environment, `.pth` files (editable installs) included, which PYTHONPATH would not give it.
Starts nothing. Called by the launcher.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paged_backend.server.errors import LaunchError
from paged_backend.server.install import install_backend
from paged_backend.server.locate import ServerInstall, libpython_soname

# Read by triton_adapter/settings.py in the stubs.
MODEL_VARIABLE = "PAGED_BACKEND_MODEL"
DRAIN_VARIABLE = "PAGED_BACKEND_DRAIN_SECONDS"


@dataclass(frozen=True)
class ServerEnvironment:
    """`backend_directory` for `--backend-directory`, and the full set of environment `variables`."""

    backend_directory: Path
    variables: dict[str, str]


def prepare(
    install: ServerInstall,
    scratch: Path,
    model: Path | None,
    drain_seconds: float | None = None,
    base: Mapping[str, str] = os.environ,
) -> ServerEnvironment:
    """Make `install` startable; files go to `scratch`, a directory the caller removes later.

    Args:
        model: what the served models load instead of their configured model; absolute.
        drain_seconds: how long an engine model lets its requests go on once the server stops; None: its default.

    Raises:
        LaunchError: no usable libpython, or a numpy the bundled stub cannot work with.
    """
    variables = dict(base)
    # Would point the stub at another installation's standard library.
    variables.pop("PYTHONHOME", None)
    variables["PATH"] = _join(_interpreter_folder(scratch), base.get("PATH"))
    if sys.prefix != sys.base_prefix:
        variables["VIRTUAL_ENV"] = sys.prefix
    if model is not None:
        variables[MODEL_VARIABLE] = str(model)
    if drain_seconds is not None:
        variables[DRAIN_VARIABLE] = f"{drain_seconds:g}"
    if install.libraries is None:
        return ServerEnvironment(install.python_backend.parent, variables)
    require_numpy_1()
    libpython = find_libpython(install)
    variables["LD_LIBRARY_PATH"] = _join(install.libraries, libpython.parent, base.get("LD_LIBRARY_PATH"))
    return ServerEnvironment(_link_backend(install, scratch), variables)


def find_libpython(install: ServerInstall) -> Path:
    """The shared library of the running Python that the stub will load.

    Raises:
        LaunchError: this Python has none.
    """
    soname = libpython_soname(install.stub)
    name = soname[0] if soname else f"libpython3.{sys.version_info.minor}.so.1.0"
    for folder in _library_folders(install):
        if (folder / name).is_file():
            return folder / name
    raise LaunchError(
        f"this Python ({sys.executable}) has no shared library {name}, which the server needs: "
        f"install it (Debian, Ubuntu: apt install libpython3.{sys.version_info.minor}) "
        "or use a Python built with --enable-shared"
    )


def _library_folders(install: ServerInstall) -> list[Path]:
    # This Python's own folders first: another installation's library of the same version may be elsewhere.
    folders = [Path(sys.base_prefix) / "lib"]
    configured = sysconfig.get_config_var("LIBDIR")
    if configured:
        folders.append(Path(configured))
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if multiarch:
        folders += [folder / multiarch for folder in list(folders)]
        folders.append(Path("/usr/lib") / multiarch)
    folders += [Path(sys.base_prefix) / "lib64", Path("/usr/local/lib"), Path("/usr/lib64")]
    folders.append(Path("/usr/lib"))
    # Some stubs bring their libpython along.
    return [install.libraries, *folders] if install.libraries else folders


def _interpreter_folder(scratch: Path) -> Path:
    """A folder whose `python3` is this interpreter."""
    folder = Path(sys.executable).parent
    python3 = folder / "python3"
    if python3.exists() and python3.resolve() == Path(sys.executable).resolve():
        return folder
    linked = scratch / "bin"
    linked.mkdir()
    (linked / "python3").symlink_to(sys.executable)
    return linked


def _link_backend(install: ServerInstall, scratch: Path) -> Path:
    """A backend directory in which the python backend lies beside the stub of this Python's version."""
    python = scratch / "backends" / "python"
    python.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        source = install.python_backend / name
        if not source.is_file():
            raise LaunchError(f"{source} is missing: reinstall nvidia-pytriton")
        # A copy: for backends written in Python the server refuses a library that a link leads out of the directory.
        shutil.copy(source, python / name)
    (python / install.stub.name).symlink_to(install.stub)
    install_backend(python.parent)
    return python.parent


def require_numpy_1() -> None:
    """Check that the installed numpy is one the bundled server's stub works with.

    Raises:
        LaunchError: it is not, or there is none.
    """
    try:
        version = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        raise LaunchError("numpy is not installed: pip install 'paged-backend[server]'") from None
    if int(version.partition(".")[0]) >= 2:
        raise LaunchError(
            f"the bundled server's Python stub cannot exchange tensors with numpy {version}: pip install 'numpy<2'"
        )


def _join(*parts: Path | str | None) -> str:
    return os.pathsep.join(str(part) for part in parts if part)
