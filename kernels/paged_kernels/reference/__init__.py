"""The contracts of `paged_kernels.ops` in plain torch, written to be obviously right rather than fast.

The other backends are tested against these; they are also selectable (`attention_backend: reference`) to rule a
kernel out, and stand in where the `cpu` backend has no kernel of its own. One file per family of contracts.
"""

from paged_kernels.reference.attention import paged_attention
from paged_kernels.reference.kv_cache import copy_blocks, rope_write_kv, write_kv, write_kv_quantised
from paged_kernels.reference.layers import rms_norm, silu_mul
from paged_kernels.reference.sampling import penalise, sample, token_logprobs

__all__ = [
    "copy_blocks",
    "paged_attention",
    "penalise",
    "rms_norm",
    "rope_write_kv",
    "sample",
    "silu_mul",
    "token_logprobs",
    "write_kv",
    "write_kv_quantised",
]
