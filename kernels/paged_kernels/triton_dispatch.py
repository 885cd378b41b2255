"""Entry points of the Triton-lang backend, called by `ops` with checked arguments.

Chooses the launch settings from the device; interpreted (TRITON_INTERPRET=1, CPU tensors) it plays a small
sm_80. Waits for the device nowhere.
"""

from functools import cache

import torch

from paged_kernels.decode_attention import choose_splits, decode_attention
from paged_kernels.kv_write import write_kv
from paged_kernels.prefill_attention import prefill_attention

__all__ = ["paged_attention", "write_kv"]


@cache
def _device(device: torch.device) -> tuple[int, int]:
    """(compute capability as 10 * major + minor, number of multiprocessors)."""
    if device.type != "cuda":
        return 80, 4
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


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
    """See `ops.paged_attention`. To the kernels a window of 0 is none."""
    capability, multiprocessors = _device(query.device)
    n, num_seqs, window = num_decodes, seq_lens.shape[0], window or 0
    if n:
        longest = min(max_seq_len, window) if window else max_seq_len
        splits = choose_splits(n, k_cache.shape[1], longest, multiprocessors)
        decode_attention(
            query[:n], k_cache, v_cache, block_tables[:n], seq_lens[:n],
            scale=scale, max_seq_len=max_seq_len, splits=splits, window=window, capability=capability, out=out[:n],
        )  # fmt: skip
    if n < num_seqs:
        prefill_attention(
            query, k_cache, v_cache, block_tables[n:], seq_lens[n:], query_start_loc[n:],
            scale=scale, first_row=n, max_query_len=max_query_len, window=window, capability=capability, out=out,
        )  # fmt: skip
    elif n < query.shape[0]:
        out[n:].zero_()
