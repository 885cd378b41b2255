"""What this machine can run: device, number type, threads. Knows no model.

`auto` choices are made here and nowhere else.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from paged_backend.config import EngineConfig
from paged_backend.errors import ConfigError
from paged_kernels import ops

# CPU features that multiply bfloat16 in hardware, by their names in /proc/cpuinfo (x86, x86, Arm).
_BFLOAT16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(requested: str) -> torch.device:
    """The device to run on.

    Raises:
        ConfigError: CUDA is asked for and there is none.
    """
    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise ConfigError("engine argument `device` is cuda, but torch sees no CUDA device; use cpu", field="device")
    kind = ("cuda" if available else "cpu") if requested == "auto" else requested
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def resolve_dtype(requested: str, device: torch.device) -> str:
    """The number type of weights and cache: `auto` is bfloat16 where the hardware multiplies it, else float32."""
    if requested != "auto":
        return requested
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float32"
    return "bfloat16" if cpu_multiplies_bfloat16() else "float32"


def resolve_backend(requested: str, device: torch.device, dtype: str) -> str:
    """The attention backend.

    Raises:
        ConfigError: it cannot run on this device or with this type.
    """
    try:
        backend = ops.resolve_backend(requested, device)
    except ValueError as error:
        raise ConfigError(str(error), field="attention_backend") from error
    if backend == "cpu" and dtype == "float16":
        raise ConfigError(
            "engine argument `dtype` float16 is not supported by the CPU kernels; use float32 or bfloat16",
            field="dtype",
        )
    return backend


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 multiplication; false when it cannot be told."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return False
    for line in cpuinfo.read_text().splitlines():
        name, _, features = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _BFLOAT16_FEATURES.isdisjoint(features.split())
    return False


def use_threads(config: EngineConfig) -> int:
    """Set torch's thread count (the numba kernels follow it) and return it; the default is what the process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = config.num_threads or allowed
    torch.set_num_threads(count)
    return count
