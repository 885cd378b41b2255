"""The public module of `paged_kernels`: paged attention and what surrounds it in a decoder's step.

Checks arguments and hands them to a backend: `triton` (Triton-lang kernels, CUDA or interpreted), `cpu` (numba)
or `reference` (plain torch). Triton-lang and numba are imported only when their backend is used. Knows
tensors only: no requests, no scheduler, no model. The contracts are in `contracts/`, one line here for each.

Shapes used throughout
    k_cache, v_cache  [num_blocks, num_kv_heads, block_size, head_dim], any strides, last dimension contiguous
    slot              block id * block_size + offset within the block
    block_tables      int32 [num_seqs, max_blocks]; entries past a sequence's last block are never read

No operation waits for the device or changes what it is not said to change.
"""

import torch

from paged_kernels.arguments import MAX_SHORT_QUERY, QUANTISED_DTYPES
from paged_kernels.backends import BACKENDS, implementation, interpreted, resolve_backend
from paged_kernels.contracts.attention import paged_attention
from paged_kernels.contracts.kv_cache import copy_blocks, rope_write_kv, write_kv, write_kv_quantised
from paged_kernels.contracts.layers import add_rms_norm, rms_norm, silu_mul
from paged_kernels.contracts.sampling import penalise, sample, token_logprobs

__all__ = [
    "BACKENDS",
    "MAX_SHORT_QUERY",
    "QUANTISED_DTYPES",
    "add_rms_norm",
    "copy_blocks",
    "paged_attention",
    "penalise",
    "resolve_backend",
    "rms_norm",
    "rope_write_kv",
    "sample",
    "silu_mul",
    "token_logprobs",
    "warmup",
    "write_kv",
    "write_kv_quantised",
]


def warmup(
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    backend: str,
    window: int | None = None,
) -> None:
    """Compile what a model of these sizes and attention window will use, so that no request waits for a compiler.

    Runs every kernel once on a tiny cache, on the current CUDA device for `triton` unless interpreted.
    Raises ValueError for an unknown backend or an unsupported dtype.
    """
    on_gpu = backend == "triton" and torch.cuda.is_available() and not interpreted()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    implementation("paged_attention", backend, dtype, device)
    shape = (2, num_kv_heads, block_size, head_dim)
    k_cache, v_cache = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    ints = {"dtype": torch.int32, "device": device}
    rows = torch.zeros(4, num_q_heads, head_dim, dtype=dtype, device=device)
    slots = torch.full((4,), -1, dtype=torch.int64, device=device)
    write_kv(rows[:, :num_kv_heads], rows[:, :num_kv_heads], k_cache, v_cache, slots, backend=backend)
    # Launch settings depend on the bounds: short queries, few rows or a full chunk; one split or several.
    few = max(MAX_SHORT_QUERY + 1, 64 * num_kv_heads // num_q_heads)
    for longest_query, longest in ((2, 1), (2, 1 << 16), (few, 1), (4096, 1)):
        paged_attention(
            rows, k_cache, v_cache,
            torch.ones(3, 2, **ints), torch.tensor([1, 1, 2], **ints), torch.tensor([0, 1, 2, 4], **ints),
            scale=1.0, num_decodes=2, max_query_len=longest_query, max_seq_len=longest, backend=backend,
            window=window,
        )  # fmt: skip
