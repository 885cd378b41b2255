"""Self-attention over the paged KV cache: projects, rotates, writes the new keys and values, attends through pages.

Knows the batch only as `AttentionMetadata`; which kernels run is `paged_kernels.ops`' business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from paged_backend.model.config import ModelConfig
from paged_kernels import ops


@dataclass(slots=True)
class AttentionMetadata:
    """One ragged batch of T tokens from N sequences; the `num_decodes` sequences of one token come first.

    Attributes:
        slot_mapping: int64 [T], where each token's key and value go: block id * block size + offset.
        block_tables: int32 [N, width], block ids of each sequence in order.
        seq_lens: int32 [N], tokens of each sequence including this step's.
        query_start_loc: int32 [N + 1], where each sequence's tokens begin among the T.
        num_decodes: leading sequences of exactly one token.
        max_query_len, max_seq_len: maxima over the batch.
        backend: `triton`, `cpu` or `reference`.
        total_seq_len: sum of `seq_lens`, from which a GPU's kernels tell how ragged the batch is; None: not known.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    backend: str
    total_seq_len: int | None = None


class PagedAttention(nn.Module):
    """One layer's attention, with query, key and value projections fused into one matrix (rows in that order)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.window = config.sliding_window
        self.eps = config.rms_norm_eps
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_weight = nn.Parameter(torch.empty(q_size + 2 * kv_size, config.hidden_size))
        self.qkv_bias = nn.Parameter(torch.empty(q_size + 2 * kv_size)) if config.qkv_bias else None
        self.o_weight = nn.Parameter(torch.empty(config.hidden_size, q_size))
        self.o_bias = nn.Parameter(torch.empty(config.hidden_size)) if config.o_bias else None
        self.q_norm = nn.Parameter(torch.empty(config.head_dim)) if config.qk_norm else None
        self.k_norm = nn.Parameter(torch.empty(config.head_dim)) if config.qk_norm else None

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Attend.

        Args:
            hidden: [T, hidden_size].
            rotary: cosines and sines of this step's positions.
            kv_cache: this layer's [2, blocks, kv_heads, block_size, head_dim]; written in place.
            metadata: the batch.

        Returns:
            [T, hidden_size].
        """
        tokens, heads = hidden.shape[0], self.num_heads
        qkv = functional.linear(hidden, self.qkv_weight, self.qkv_bias)
        qkv = qkv.view(tokens, heads + 2 * self.num_kv_heads, self.head_dim)
        query, key = qkv[:, :heads], qkv[:, heads : heads + self.num_kv_heads]
        value = qkv[:, heads + self.num_kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            query = ops.rms_norm(query, self.q_norm, self.eps, backend=metadata.backend)
            key = ops.rms_norm(key, self.k_norm, self.eps, backend=metadata.backend)
        k_cache, v_cache = kv_cache[0], kv_cache[1]
        query = ops.rope_write_kv(
            query, key, value, *rotary, k_cache, v_cache, metadata.slot_mapping, backend=metadata.backend
        )
        attended = ops.paged_attention(
            query,
            k_cache,
            v_cache,
            metadata.block_tables,
            metadata.seq_lens,
            metadata.query_start_loc,
            scale=self.scale,
            num_decodes=metadata.num_decodes,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            total_seq_len=metadata.total_seq_len,
            backend=metadata.backend,
            window=self.window,
        )
        return functional.linear(attended.reshape(tokens, heads * self.head_dim), self.o_weight, self.o_bias)
