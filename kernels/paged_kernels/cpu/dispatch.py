"""Entry points of the CPU backend, called by `ops` with checked arguments."""

import torch

from paged_kernels.cpu.decode import decode_attention
from paged_kernels.cpu.kv_write import write_kv
from paged_kernels.cpu.prefill import prefill_attention
from paged_kernels.cpu.runtime import UNBOUNDED

__all__ = ["paged_attention", "write_kv"]


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """See `ops.paged_attention`. Lengths are read from the tensors: on a CPU that costs no wait."""
    n, used = num_decodes, num_decodes
    seen = UNBOUNDED if window is None else window
    if n:
        decode_attention(query, k_cache, v_cache, block_tables, seq_lens, n, scale, seen, out)
    if n < seq_lens.shape[0]:
        used = int(query_start_loc[-1])
        prefill_attention(
            query, k_cache, v_cache, block_tables[n:], seq_lens[n:], query_start_loc[n:], scale, seen, out
        )
    if used < query.shape[0]:
        out[used:] = 0
