"""Store keys and values of new tokens into their slots of the paged cache (CPU).

Contract: `ops.write_kv`. Knows slots; does not know sequences.
"""

from functools import cache

import numpy as np
import torch
from numba import njit, prange

from paged_kernels.cpu.micro import BUILD_TAG, copy_row
from paged_kernels.cpu.runtime import COMPILE_OPTIONS, PARALLEL_LOCK, flat, use_threads

_PARALLEL_ELEMENTS = 1 << 16  # below this, starting threads costs more than the copy


@cache
def _build(head_dim: int, parallel: bool):
    tag, dim = BUILD_TAG, head_dim

    def kernel(src, dst, slots, heads, block_size, s_t, s_h, d_b, d_h, d_t):
        for token in prange(slots.size):
            _ = tag
            slot = slots[token]
            if slot >= 0:
                block = slot // block_size
                at = block * d_b + (slot - block * block_size) * d_t
                for head in range(heads):
                    copy_row(dst, at + head * d_h, src, token * s_t + head * s_h, dim)

    return njit(parallel=parallel, **COMPILE_OPTIONS)(kernel)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `ops.write_kv`; arguments are validated there."""
    heads, dim = key.shape[1:]
    slots = slot_mapping.numpy()
    parallel = key.numel() >= _PARALLEL_ELEMENTS
    kernel = _build(dim, parallel)
    if parallel:
        PARALLEL_LOCK.acquire()
    try:
        if parallel:
            use_threads()
        for src, dst in ((key, k_cache), (value, v_cache)):
            s_b, s_h, s_t, _ = dst.stride()
            kernel(
                flat(src), flat(dst), slots, heads, dst.shape[2],
                src.stride(0), src.stride(1), s_b, s_h, s_t,
            )  # fmt: skip
    finally:
        if parallel:
            PARALLEL_LOCK.release()


def warmup(head_dim: int, heads: int, block_size: int, dtype: torch.dtype) -> None:
    """Compile both variants by writing to the slots of one token and of many."""
    cache = torch.zeros(1, heads, block_size, head_dim, dtype=dtype)
    for tokens in (1, -(-_PARALLEL_ELEMENTS // (heads * head_dim))):
        rows = torch.zeros(tokens, heads, head_dim, dtype=dtype)
        slots = torch.from_numpy(np.full(tokens, -1, dtype=np.int64))
        write_kv(rows, rows, cache, cache, slots)
