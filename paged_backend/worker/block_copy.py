"""Moves whole KV blocks: within the cache (copy-on-write), and between it and a pool in host memory (swapping).

All layers' parts of a block travel together. Copies within the cache behave as if every source were read before any
destination is written. Swapping gathers scattered device blocks into a buffer and moves each run of consecutive host
blocks at once; on a GPU the host pool is page-locked and nothing waits: later work on the same stream is in order.
Knows tensors and block ids; not whose blocks they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from paged_backend.errors import PagedBackendError

# Memory for gathered blocks, beside the cache.
_BUFFER_BYTES = 64 << 20

Pairs = list[tuple[int, int]]


def copy_blocks(cache: torch.Tensor, pairs: Pairs) -> None:
    """Copy blocks within the cache, each source's old contents to its destination.

    Args:
        cache: [layers, 2, blocks, ...].
        pairs: (source, destination) block ids.

    Raises:
        PagedBackendError: an id is no usable block, or a destination is given twice.
    """
    num_blocks = cache.shape[2]
    sources, destinations = _indices(pairs, num_blocks, num_blocks).to(cache.device)
    # Splitting by layers and not by pairs keeps a chain (1 to 2, 2 to 3) right; most steps need one part.
    layers = max(1, _BUFFER_BYTES // (len(pairs) * _block_bytes(cache) // cache.shape[0]))
    for part in cache.split(layers):
        part.index_copy_(2, destinations, part.index_select(2, sources))


class HostPool:
    """Blocks in host memory, allocated when the first one is used.

    Args:
        cache: the device's cache, [layers, 2, blocks, kv_heads, block_size, head_dim].
        num_blocks: usable blocks of this pool; ids start at 1, as on the device.
    """

    def __init__(self, cache: torch.Tensor, num_blocks: int) -> None:
        self._cache = cache.flatten(0, 1)
        self._num_blocks = num_blocks
        self._pool: torch.Tensor | None = None
        self._batch = max(1, _BUFFER_BYTES // _block_bytes(cache))

    def swap_out(self, pairs: Pairs) -> None:
        """Copy (device block, host block) contents to the host.

        Raises:
            PagedBackendError: an id is no usable block, a destination is given twice, or memory is exhausted.
        """
        device_ids, host_ids = _indices(pairs, self._cache.shape[1], self._num_blocks + 1)
        pool = self._allocated()
        for part in self._parts(host_ids):
            buffer = self._cache.index_select(1, device_ids[part].to(self._cache.device))
            for at_host, in_buffer in _runs(host_ids[part]):
                for tiles, gathered in zip(pool, buffer, strict=True):
                    tiles[at_host].copy_(gathered[in_buffer], non_blocking=True)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy (host block, device block) contents back.

        Raises:
            PagedBackendError: an id is no usable block, or a destination is given twice.
        """
        host_ids, device_ids = _indices(pairs, self._num_blocks + 1, self._cache.shape[1])
        pool = self._allocated()
        for part in self._parts(host_ids):
            buffer = self._cache.new_empty((self._cache.shape[0], len(part), *self._cache.shape[2:]))
            for at_host, in_buffer in _runs(host_ids[part]):
                for tiles, gathered in zip(pool, buffer, strict=True):
                    gathered[in_buffer].copy_(tiles[at_host], non_blocking=True)
            self._cache.index_copy_(1, device_ids[part].to(self._cache.device), buffer)

    def _parts(self, host_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Positions in the order of their host ids, as many at a time as the buffer holds."""
        return host_ids.argsort().split(self._batch)

    def _allocated(self) -> torch.Tensor:
        if self._pool is None:
            size = (self._cache.shape[0], self._num_blocks + 1, *self._cache.shape[2:])
            try:
                self._pool = torch.empty(size, dtype=self._cache.dtype, pin_memory=self._cache.device.type == "cuda")
            except (RuntimeError, MemoryError) as error:
                raise PagedBackendError(
                    f"cannot allocate swap space for {self._num_blocks} blocks: {error}; set `swap_space` lower"
                ) from error
        return self._pool


def _block_bytes(cache: torch.Tensor) -> int:
    """Bytes of one block in all layers of a cache [layers, 2, blocks, ...]."""
    return cache[:, :, 0].numel() * cache.element_size()


def _runs(ids: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Runs of consecutive ids in an ascending list: the ids, and their positions."""
    values = ids.numpy()
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    for positions in np.split(np.arange(len(values)), breaks):
        first, last = positions[0], positions[-1]
        yield slice(int(values[first]), int(values[last]) + 1), slice(int(first), int(last) + 1)


def _indices(pairs: Pairs, num_sources: int, num_destinations: int) -> torch.Tensor:
    """int64 [2, n] sources and destinations, checked: a wrong id would read or write another sequence's cache."""
    blocks = np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()
    limits = np.array([[num_sources], [num_destinations]])
    if (blocks < 1).any() or (blocks >= limits).any():
        raise PagedBackendError(
            f"the step's plan copies blocks that do not exist: {pairs} of {num_sources - 1} and {num_destinations - 1}"
        )
    if len(np.unique(blocks[1])) != len(pairs):
        raise PagedBackendError(f"the step's plan copies to a block twice: {pairs}")
    return torch.from_numpy(blocks)
