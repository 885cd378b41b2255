"""The decoder's building blocks as plain functions on tensors: RMSNorm, rotary embedding, gated activation.

Each rounds where transformers rounds, so that in float32 and bfloat16 alike the results are comparable with it.
They know nothing of caches, batches or weights files.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from paged_backend.model.config import RopeConfig


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension of `x` [..., n], computed in float32, cast back, then weighted."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return weight * (wide * scale).to(x.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Rotation per position of each pair of elements: float32 [head_dim / 2].

    `llama3` is Llama 3.1's rule: wavelengths beyond the original context are stretched by `factor`, short ones kept,
    those between blended linearly. For `factors` the divisors come with the weights and are applied by the loader.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind != "llama3":
        return frequencies
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def rotary_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for `positions` [T], each [T, 1, head_dim / 2] of `dtype`.

    Computed per step instead of looked up: a table up to the context length would cost megabytes for what all layers
    of a step share.
    """
    angles = positions.float()[:, None] * frequencies
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `x` [T, heads, head_dim]: element i pairs with element i + head_dim / 2 (RoFormer, as in
    Llama's transformers weights). Returns a new contiguous tensor."""
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    left, right = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=left)
    left.sub_(second * sin)
    torch.mul(second, cos, out=right)
    right.add_(first * sin)
    return out


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for `gate_up` [T, 2 * n] with the gate first; returns [T, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
