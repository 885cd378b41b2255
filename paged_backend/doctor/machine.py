"""Checks of the machine: the server and its stub, shared memory, and the GPU. Starts no server, imports no torch."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from paged_backend.doctor.report import Finding, failure, ok, warning
from paged_backend.errors import ConfigError
from paged_backend.server import environment, locate

_SHARED_MEMORY = Path("/dev/shm")
_MIB = 1024**2
# Each stub takes a megabyte, and more as tensors wait in it; runtimes give containers 64 MiB unless told.
_SHM_TOO_SMALL = 16 * _MIB
_SHM_SMALL = 256 * _MIB
_TORCH_SECONDS = 120
_TORCH = (
    "import torch\n"
    "n = torch.cuda.device_count() if torch.cuda.is_available() else 0\n"
    "print(torch.__version__, torch.version.cuda or 'without CUDA', n)\n"
    "for i in range(n):\n"
    "    free, total = torch.cuda.mem_get_info(i)\n"
    "    print(torch.cuda.get_device_name(i), free, total, sep='\\t')\n"
)


def check_server() -> Iterator[Finding]:
    """The server that `serve` would start, and that its stub, Python and numpy fit together."""
    install = locate.find_server()
    where = "in nvidia-pytriton" if install.bundled else "on PATH"
    yield ok("server", f"{install.binary} ({where})")
    python = f"Python {platform.python_version()}"
    if not install.bundled:
        yield ok("python", f"{python} is what the server's stub embeds")
        return
    libpython = environment.find_libpython(install)
    yield ok("python", f"{python} with {libpython}")
    environment.require_numpy_1()
    yield ok("numpy", f"{importlib.metadata.version('numpy')} fits the bundled server's stub")


def check_shared_memory(folder: Path = _SHARED_MEMORY) -> Iterator[Finding]:
    """Tensors travel between server and stub through shared memory."""
    if not folder.is_dir():
        yield failure("shared memory", f"{folder} is missing: mount a tmpfs there")
        return
    usage = shutil.disk_usage(folder)
    text = f"{folder} has {usage.free / _MIB:.0f} of {usage.total / _MIB:.0f} MiB free"
    advice = "give the container more (docker run --shm-size=1g, or an emptyDir with medium Memory)"
    if usage.free < _SHM_TOO_SMALL:
        yield failure("shared memory", f"{text}: {advice}")
    elif usage.free < _SHM_SMALL:
        yield warning("shared memory", f"{text}: enough for short requests; {advice}")
    else:
        yield ok("shared memory", text)


def check_gpu() -> Iterator[Finding]:
    """Whether torch sees the GPUs that the machine has."""
    done = subprocess.run(
        [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=_TORCH_SECONDS, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"torch cannot be imported ({last}): pip install paged-backend into this Python")
    version, *gpus = done.stdout.splitlines()
    yield ok("torch", version.rsplit(" ", 1)[0])
    has_device = any(Path("/dev").glob("nvidia[0-9]*"))
    if not gpus and has_device:
        yield failure("GPU", "the machine has one, torch sees none: install a CUDA build of torch, or check the driver")
    elif not gpus:
        yield ok("GPU", "none; the engine runs on the CPU")
    for index, line in enumerate(gpus):
        name, free, total = line.split("\t")
        yield ok("GPU", f"{index}: {name}, {int(free) / _MIB:.0f} of {int(total) / _MIB:.0f} MiB free")
