"""Store keys and values of new tokens into their slots of the paged cache (CPU).

Contract: `ops.write_kv`. Knows slots; does not know sequences.
"""

from functools import cache

import numpy as np
import torch
from numba import carray

from paged_kernels.cpu.micro import BUILD_TAG, copy_row
from paged_kernels.cpu.primitives import fetch_add, pointer
from paged_kernels.cpu.runtime import UNBOUNDED, Arguments, compile_kernel, element_type, launch, thread_count

_PARALLEL_ELEMENTS = 1 << 17  # below this, waking threads costs more than the copy
_TOKENS_PER_ITEM = 64
_ARGUMENTS = Arguments(
    "key value k_cache v_cache slots",
    "tokens heads block_size key_token key_head value_token value_head k_block k_head k_token v_block v_head v_token",
)


@cache
def _build(head_dim: int, element: type):
    tag, dim = BUILD_TAG, head_dim

    def write(arguments, taken, items):
        _ = tag
        args = carray(arguments, 1)[0]
        key = carray(pointer(args.key), UNBOUNDED, element)
        value = carray(pointer(args.value), UNBOUNDED, element)
        k_cache = carray(pointer(args.k_cache), UNBOUNDED, element)
        v_cache = carray(pointer(args.v_cache), UNBOUNDED, element)
        slots = carray(pointer(args.slots), args.tokens, np.int64)
        counter = carray(taken, 1)
        done = 0
        while True:
            item = fetch_add(counter, 0)
            if item >= items:
                return done
            done += 1
            first = item * _TOKENS_PER_ITEM
            for token in range(first, min(args.tokens, first + _TOKENS_PER_ITEM)):
                slot = slots[token]
                if slot < 0:
                    continue
                block = slot // args.block_size
                offset = slot - block * args.block_size
                k_at = block * args.k_block + offset * args.k_token
                v_at = block * args.v_block + offset * args.v_token
                for head in range(args.heads):
                    from_k = token * args.key_token + head * args.key_head
                    from_v = token * args.value_token + head * args.value_head
                    copy_row(k_cache, k_at + head * args.k_head, key, from_k, dim)
                    copy_row(v_cache, v_at + head * args.v_head, value, from_v, dim)

    return compile_kernel(write, _ARGUMENTS)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `ops.write_kv`; arguments are validated there."""
    tokens, heads, dim = key.shape
    k_block, k_head, k_token, _ = k_cache.stride()
    v_block, v_head, v_token, _ = v_cache.stride()
    record = _ARGUMENTS.pack(
        key=key, value=value, k_cache=k_cache, v_cache=v_cache, slots=slot_mapping,
        tokens=tokens, heads=heads, block_size=k_cache.shape[2],
        key_token=key.stride(0), key_head=key.stride(1), value_token=value.stride(0), value_head=value.stride(1),
        k_block=k_block, k_head=k_head, k_token=k_token, v_block=v_block, v_head=v_head, v_token=v_token,
    )  # fmt: skip
    threads = thread_count() if key.numel() >= _PARALLEL_ELEMENTS else 1
    launch(_build(dim, element_type(key.dtype)), record, -(-tokens // _TOKENS_PER_ITEM), threads)
