"""`paged-backend install-backend DIR`: makes `backend: "paged"` known to a Triton Server.

A backend written in Python is a directory <backends>/<name> with a model.py; models that name it need none of their
own. The file imports the installed package, so upgrading the package upgrades the backend. Knows that layout only.
"""

from __future__ import annotations

from pathlib import Path

from paged_backend.server.errors import LaunchError

BACKEND_NAME = "paged"
_MODEL_PY = '''"""The engine as a backend for Triton Server; all of it lives in the installed package paged-backend."""

from paged_backend.triton_adapter.backend import LLMModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def install_backend(backends: Path) -> Path:
    """Write the backend into the server's backend directory; returns its folder.

    Raises:
        LaunchError: the directory does not exist or cannot be written, or something else has that name in it.
    """
    if not backends.is_dir():
        raise LaunchError(f"{backends} is not a directory: give the server's backend directory")
    folder = backends / BACKEND_NAME
    file = folder / "model.py"
    if folder.exists() and not (file.is_file() and "paged_backend.triton_adapter" in file.read_text(errors="replace")):
        raise LaunchError(f"{folder} exists and is not this backend: move it away")
    try:
        folder.mkdir(exist_ok=True)
        file.write_text(_MODEL_PY)
    except OSError as error:
        raise LaunchError(f"cannot write {file}: {error.strerror or error}") from error
    return folder
