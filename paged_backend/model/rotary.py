"""Rotary embedding: its frequencies by kind, and a step's tables of cosines and sines.

Rounds where transformers rounds, so that in float32 and bfloat16 alike the results are comparable with it. Knows no
caches, batches or weights files; rotating itself is a kernel's business.
"""

from __future__ import annotations

import math

import torch

from paged_backend.model.config import RopeConfig


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
    """Cosines and sines for `positions` [T], each [T, head_dim / 2] of `dtype`.

    Computed per step instead of looked up: a table up to the context length would cost megabytes for what all layers
    of a step share.
    """
    angles = positions.float()[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)
