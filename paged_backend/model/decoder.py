"""`Decoder`: the Llama-family decoder (Llama, Mistral, Qwen2, Qwen3) on ragged batches over a paged KV cache.

Computes hidden states and logits. It knows no requests, no sampling and no files; `weight_slots()` tells the loader
which published weight goes where in the fused matrices.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from paged_backend.model.attention import AttentionMetadata, PagedAttention
from paged_backend.model.config import ModelConfig
from paged_backend.model.rotary import inverse_frequencies, rotary_tables
from paged_kernels import ops


class GatedMLP(nn.Module):
    """The feed-forward part; gate and up projections are one matrix, the gate's rows first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner, hidden = config.intermediate_size, config.hidden_size
        self.gate_up_weight = nn.Parameter(torch.empty(2 * inner, hidden))
        self.gate_up_bias = nn.Parameter(torch.empty(2 * inner)) if config.mlp_bias else None
        self.down_weight = nn.Parameter(torch.empty(hidden, inner))
        self.down_bias = nn.Parameter(torch.empty(hidden)) if config.mlp_bias else None

    def forward(self, hidden: torch.Tensor, backend: str) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        inner = ops.silu_mul(functional.linear(hidden, self.gate_up_weight, self.gate_up_bias), backend=backend)
        return functional.linear(inner, self.down_weight, self.down_bias)


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_norm = nn.Parameter(torch.empty(config.hidden_size))
        self.attention = PagedAttention(config)
        self.post_norm = nn.Parameter(torch.empty(config.hidden_size))
        self.mlp = GatedMLP(config)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]; see `PagedAttention.forward`."""
        backend = metadata.backend
        normed = ops.rms_norm(hidden, self.input_norm, self.eps, backend=backend)
        attended = self.attention(normed, rotary, kv_cache, metadata)
        normed, hidden = ops.add_rms_norm(attended, hidden, self.post_norm, self.eps, backend=backend)
        return hidden + self.mlp(normed, backend)


class Decoder(nn.Module):
    """The whole model. Weights are uninitialised until the loader fills `weight_slots()`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.final_norm = nn.Parameter(torch.empty(config.hidden_size))
        tied = config.tie_word_embeddings
        self.head = self.embedding if tied else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        # float32 whatever the weights are: bfloat16 cannot even count positions beyond 256.
        self.frequencies = inverse_frequencies(config.rope, config.head_dim).to(self.embedding.device)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Run the layers and write this step's keys and values into the cache.

        Args:
            input_ids: int64 [T].
            positions: int64 [T], each token's place in its sequence.
            kv_cache: [layers, 2, blocks, kv_heads, block_size, head_dim].
            metadata: how the T tokens divide into sequences.

        Returns:
            Hidden states [T, hidden_size], for `compute_logits`.
        """
        hidden = functional.embedding(input_ids, self.embedding)
        rotary = rotary_tables(positions, self.frequencies, hidden.dtype)
        for layer, layer_cache in zip(self.layers, kv_cache, strict=True):
            hidden = layer(hidden, rotary, layer_cache, metadata)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the rows of `hidden` [R, hidden_size]: float32 [R, vocab_size]."""
        backend = "triton" if hidden.device.type == "cuda" else "reference"
        hidden = ops.rms_norm(hidden, self.final_norm, self.config.rms_norm_eps, backend=backend)
        return functional.linear(hidden, self.head).float()

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and so of the KV cache."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Where each weight goes, by its name in transformers checkpoints: views into the fused parameters."""
        slots = {"model.embed_tokens.weight": self.embedding.data, "model.norm.weight": self.final_norm.data}
        if not self.config.tie_word_embeddings:
            slots["lm_head.weight"] = self.head.data
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            slots[f"{prefix}input_layernorm.weight"] = layer.input_norm.data
            slots[f"{prefix}post_attention_layernorm.weight"] = layer.post_norm.data
            slots.update(_attention_slots(f"{prefix}self_attn.", layer.attention, self.config))
            slots.update(_mlp_slots(f"{prefix}mlp.", layer.mlp, self.config))
        return slots


def _attention_slots(prefix: str, attention: PagedAttention, config: ModelConfig) -> dict[str, torch.Tensor]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    slots = {f"{prefix}o_proj.weight": attention.o_weight.data}
    for kind, fused in (("weight", attention.qkv_weight), ("bias", attention.qkv_bias)):
        if fused is not None:
            parts = fused.data.split([q_size, kv_size, kv_size])
            slots.update({f"{prefix}{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)})
    if attention.o_bias is not None:
        slots[f"{prefix}o_proj.bias"] = attention.o_bias.data
    if attention.q_norm is not None and attention.k_norm is not None:
        slots[f"{prefix}q_norm.weight"] = attention.q_norm.data
        slots[f"{prefix}k_norm.weight"] = attention.k_norm.data
    return slots


def _mlp_slots(prefix: str, mlp: GatedMLP, config: ModelConfig) -> dict[str, torch.Tensor]:
    slots = {f"{prefix}down_proj.weight": mlp.down_weight.data}
    for kind, fused in (("weight", mlp.gate_up_weight), ("bias", mlp.gate_up_bias)):
        if fused is not None:
            gate, up = fused.data.split(config.intermediate_size)
            slots[f"{prefix}gate_proj.{kind}"], slots[f"{prefix}up_proj.{kind}"] = gate, up
    if mlp.down_bias is not None:
        slots[f"{prefix}down_proj.bias"] = mlp.down_bias.data
    return slots
