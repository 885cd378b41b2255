"""What the numbers were measured on: CPU, memory, versions. For the output of every run."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from benchmarks.serving.peers import find_allocator, own_version


def describe() -> dict[str, str | int]:
    """The machine and this checkout."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "features": " ".join(_features()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "paged-backend": own_version(),
        "tcmalloc": find_allocator() or "not installed",
    }


def _cpuinfo(*names: str) -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.is_file() else ():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


def _cpu_model() -> str:
    family, model = _cpuinfo("cpu family"), _cpuinfo("model")
    name = _cpuinfo("model name", "Model") or platform.machine()
    return f"{name} (family {family}, model {model})" if family else name


def _features() -> list[str]:
    """The instruction sets that decide how fast products are."""
    present = set(_cpuinfo("flags", "Features").split())
    return [name for name in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "bf16") if name in present]
