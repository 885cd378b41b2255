"""Entry points of the Triton-lang backend, called by `ops` with checked arguments: one name per operation.

Of attention it chooses kernels, splits and the launch settings of the device; interpreted (TRITON_INTERPRET=1, CPU
tensors) it plays a small sm_80. Waits for the device nowhere.
"""

from functools import cache

import torch

from paged_kernels.arguments import MAX_SHORT_QUERY, Bounds, Options
from paged_kernels.block_copy import copy_blocks
from paged_kernels.decode_attention import MAX_ROWS, decode_attention
from paged_kernels.kv_write import write_kv, write_kv_quantised
from paged_kernels.penalties import penalise
from paged_kernels.prefill_attention import prefill_attention
from paged_kernels.rms_norm import rms_norm
from paged_kernels.rope_kv_write import rope_write_kv
from paged_kernels.sampling import sample
from paged_kernels.silu_mul import silu_mul
from paged_kernels.split_rule import choose_splits
from paged_kernels.token_logprobs import token_logprobs

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


@cache
def device_of(device: torch.device) -> tuple[int, int]:
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
    bounds: Bounds,
    options: Options,
    out: torch.Tensor,
) -> None:
    """See `ops.paged_attention`: single tokens, then short queries, then chunks, each with its kernel."""
    capability, multiprocessors = device_of(query.device)
    num_seqs, decodes = seq_lens.shape[0], bounds.num_decodes
    # A batch that has short queries only need not say so.
    short = num_seqs if bounds.max_query_len <= MAX_SHORT_QUERY else bounds.num_short
    common = {"scale": scale, "options": options, "capability": capability}

    def splits(sequences: int, query_len: int) -> int:
        rows = min(MAX_ROWS, query_len * (query.shape[1] // k_cache.shape[1]))
        longest = min(bounds.max_seq_len, options.window or bounds.max_seq_len)
        return choose_splits(
            sequences, k_cache.shape[1], longest, multiprocessors, total_seq_len=bounds.total_seq_len, rows=rows
        )

    if decodes:
        decode_attention(
            query[:decodes], k_cache, v_cache, block_tables[:decodes], seq_lens[:decodes], None,
            max_query_len=1, max_seq_len=bounds.max_seq_len, splits=splits(decodes, 1), out=out[:decodes], **common,
        )  # fmt: skip
    if short == num_seqs and decodes < query.shape[0]:
        # Which of these rows belong to no sequence is not known here; they are few.
        out[decodes:].zero_()
    if decodes < short:
        longest = max(2, min(bounds.max_query_len, MAX_SHORT_QUERY))
        part = slice(decodes, short)
        decode_attention(
            query, k_cache, v_cache, block_tables[part], seq_lens[part], query_start_loc[decodes : short + 1],
            max_query_len=longest, max_seq_len=bounds.max_seq_len, splits=splits(short - decodes, longest), out=out,
            **common,
        )  # fmt: skip
    if short < num_seqs:
        prefill_attention(
            query, k_cache, v_cache, block_tables[short:], seq_lens[short:], query_start_loc[short:],
            first_row=decodes, max_query_len=bounds.max_query_len, out=out, **common,
        )  # fmt: skip
