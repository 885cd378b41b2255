"""The KV cache tensor: one allocation for all layers, and how many blocks of it fit the memory.

Layout [layers, 2, blocks + 1, kv_heads, block_size, head_dim] ("HND": head before token). The keys of one block and
one KV head are then one contiguous tile, which is what an attention kernel reads at a time, whether as a Triton-lang
block or as a SIMD stream; all query heads of a group share it. Layer and key/value come first so that a layer's
caches are plain views, and one allocation keeps memory accounting exact. Block 0 is the null block: block ids index
the tensor directly.

All but the first blocks start uninitialised on purpose: clearing gigabytes would take start-up time, and on a CPU
would commit memory that may never be used (`populate_kv_cache` asks for that). Kernels read only slots of known tokens,
all of which were written before (the kernel tests put NaN everywhere else).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from paged_backend.config import EngineConfig, ModelShape, kv_block_bytes
from paged_backend.errors import ConfigError
from paged_kernels.cpu import memory

DEFAULT_CPU_BYTES = 4 << 30
DEFAULT_CPU_SHARE = 4


def allocate_kv_cache(
    shape: ModelShape,
    num_kv_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    populate: bool = False,
) -> torch.Tensor:
    """Allocate the cache for `num_kv_blocks` usable blocks and the null block.

    Args:
        shape: the model's dimensions.
        num_kv_blocks, block_size: usable blocks, and tokens to each.
        dtype, device: of the cache.
        populate: on a CPU, take all of it from the system now.

    Raises:
        ConfigError: there is not that much memory.
    """
    size = (shape.num_layers, 2, num_kv_blocks + 1, shape.num_kv_heads, block_size, shape.head_dim)
    try:
        if device.type == "cpu":
            cache = memory.empty(size, dtype)
            # The system hands out pages of 2 MiB when they are first used. Those that the first request would touch,
            # one per layer for keys and values each, are taken now: it waited 0.6 s for them on a virtual machine.
            (cache if populate else cache[:, :, :2]).zero_()
            return cache
        return torch.empty(size, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"cannot allocate the KV cache of {num_kv_blocks} blocks: {error}; set `num_kv_blocks` or "
            "`kv_cache_memory_bytes` lower",
            field="num_kv_blocks",
        ) from error


def fit_num_blocks(config: EngineConfig, shape: ModelShape, budget: int, source: str) -> int:
    """Blocks that fit `budget` bytes, but no more than all sequences at full length can use.

    Args:
        config: resolved but for `num_kv_blocks`.
        shape: the model's dimensions.
        budget: bytes for the pool.
        source: where the budget comes from, for the error message.

    Raises:
        ConfigError: not even one block fits; the message says by how much.
    """
    block_bytes = kv_block_bytes(shape, config.block_size, config.dtype)
    # The null block is allocated too.
    fitting = budget // block_bytes - 1
    if fitting < 1:
        raise ConfigError(
            f"no KV block fits: two of {_mib(block_bytes)} each (one is the null block) exceed the {_mib(budget)} "
            f"from {source} by {_mib(2 * block_bytes - budget)}",
            field="kv_cache_memory_bytes",
        )
    useful = config.max_num_seqs * -(-config.max_model_len // config.block_size)
    return min(fitting, useful)


def cpu_budget(config: EngineConfig, available: int) -> tuple[int, str]:
    """Bytes for the pool on a CPU and where the number comes from.

    Raises:
        ConfigError: `kv_cache_memory_bytes` exceeds the available memory.
    """
    if config.kv_cache_memory_bytes is None:
        return min(DEFAULT_CPU_BYTES, available // DEFAULT_CPU_SHARE), "a quarter of the available memory"
    if config.kv_cache_memory_bytes > available:
        raise ConfigError(
            f"`kv_cache_memory_bytes` exceeds the available memory of {_mib(available)} by "
            f"{_mib(config.kv_cache_memory_bytes - available)}",
            field="kv_cache_memory_bytes",
        )
    return config.kv_cache_memory_bytes, "`kv_cache_memory_bytes`"


def cuda_budget(config: EngineConfig, *, total: int, used: int, peak: int) -> tuple[int, str]:
    """Bytes for the pool on a GPU and where the number comes from.

    Args:
        total, used: the device's memory, and what is taken of it now (weights, the CUDA context, other processes).
        peak: what the largest step needs for activations.

    Raises:
        ConfigError: nothing is left, or `kv_cache_memory_bytes` exceeds what is; the message says by how much.
    """
    left = int(total * config.gpu_memory_utilization) - used - peak
    share = f"`gpu_memory_utilization` = {config.gpu_memory_utilization:g} of {_mib(total)}"
    if left <= 0:
        raise ConfigError(
            f"{share} is {_mib(-left)} too little for the {_mib(used)} in use (weights included) and the "
            f"{_mib(peak)} of activations; raise it, or lower `max_num_batched_tokens`",
            field="gpu_memory_utilization",
        )
    if config.kv_cache_memory_bytes is None:
        return left, share
    free = total - used - peak
    if config.kv_cache_memory_bytes > free:
        raise ConfigError(
            f"`kv_cache_memory_bytes` exceeds the free device memory of {_mib(free)} by "
            f"{_mib(config.kv_cache_memory_bytes - free)}",
            field="kv_cache_memory_bytes",
        )
    return config.kv_cache_memory_bytes, "`kv_cache_memory_bytes`"


def available_memory() -> int:
    """Bytes of RAM this process may still use: what the system has free, within the container's limit."""
    free = _system_memory()
    for folder, limit, used, cache in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        values = [_read_int(Path(folder, name)) for name in (limit, used)]
        if values[0] is not None and values[1] is not None:
            # The page cache (the model's file, just read) counts as used but gives way.
            free = min(free, max(0, values[0] - values[1] + _cgroup_stat(Path(folder, "memory.stat"), cache)))
    return free


def _cgroup_stat(path: Path, name: str) -> int:
    try:
        fields = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        return int(fields.get(name, 0))
    except (OSError, ValueError):
        return 0


def _system_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
