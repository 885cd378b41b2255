"""Rotate queries and keys (RoPE) and store keys and values in their slots, in one launch (Triton-lang).

Contract: `ops.rope_write_kv`. Programs of a token share out its query heads and its kv heads in blocks of heads; each
reads a head twice, once shifted by half the rotary part, which costs no memory traffic. Knows slots; no sequences.
"""

import torch
import triton
import triton.language as tl

from paged_kernels.kv_write import quantising_constants, scale_arguments
from paged_kernels.quantise import store_row


@triton.jit
def rotated(rows, cos_row, sin_row, dims, inside, HALF: tl.constexpr):
    """Rows [heads, dims] of pointers, loaded and rotated; products are rounded to their type before the sum."""
    first = dims < HALF
    turning = dims < 2 * HALF
    x = tl.load(rows, mask=inside, other=0.0)
    partner = tl.where(first, HALF, -HALF)
    y = tl.load(rows + partner, mask=inside & turning, other=0.0)
    cos = tl.load(cos_row + dims % HALF, mask=turning, other=1.0).to(tl.float32)
    sin = tl.load(sin_row + dims % HALF, mask=turning, other=0.0).to(tl.float32)
    straight = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32)
    across = (y.to(tl.float32) * sin).to(x.dtype).to(tl.float32)
    return tl.where(turning, (straight + tl.where(first, -across, across)).to(x.dtype), x)


@triton.jit
def rope_kv_write_kernel(
    query, key, value, cos, sin, out, k_cache, v_cache, slots, k_scale, v_scale,
    query_token, query_head, key_token, key_head, value_token, value_head,
    k_block, k_head, k_token, v_block, v_head, v_token, scale_block, scale_head,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALES: tl.constexpr, LARGEST: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)[None, :]
    cos_row = cos + token * HALF
    sin_row = sin + token * HALF
    if part < Q_BLOCKS:
        heads = part * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        inside = (heads < Q_HEADS) & (dims < HEAD_DIM)
        rows = query + token * query_token + heads * query_head + dims
        q = rotated(rows, cos_row, sin_row, dims, inside, HALF)
        tl.store(out + (token * Q_HEADS + heads) * HEAD_DIM + dims, q, mask=inside)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            heads = (part - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
            real = heads < HEADS
            inside = real & (dims < HEAD_DIM)
            block = slot // PAGE
            offset = slot % PAGE
            scale_at = block * scale_block + heads * scale_head + offset
            rows = key + token * key_token + heads * key_head + dims
            k = rotated(rows, cos_row, sin_row, dims, inside, HALF)
            k_rows = k_cache + block * k_block + offset * k_token + heads * k_head + dims
            store_row(k, k_rows, k_scale, k_scale + scale_at, inside, real, SCALES, LARGEST, INTEGER)
            v = tl.load(value + token * value_token + heads * value_head + dims, mask=inside)
            v_rows = v_cache + block * v_block + offset * v_token + heads * v_head + dims
            store_row(v, v_rows, v_scale, v_scale + scale_at, inside, real, SCALES, LARGEST, INTEGER)


def settings(
    q_heads: int, heads: int, head_dim: int, half: int, page: int, scales: str = "none",
    cache_dtype: torch.dtype | None = None,
) -> tuple[dict, dict]:  # fmt: skip
    """(constexpr arguments, compile options) of rope_kv_write_kernel; the compile gate builds the same."""
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(heads), max(1, 1024 // block_d))
    constants = {
        "Q_HEADS": q_heads, "HEADS": heads, "HEAD_DIM": head_dim, "HALF": half, "PAGE": page,
        "BLOCK_H": block_h, "BLOCK_D": block_d, **quantising_constants(scales, cache_dtype),
    }  # fmt: skip
    return constants, {"num_warps": 4 if block_h * block_d >= 1024 else 1, "enable_fp_fusion": True}


def rope_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """See `ops.rope_write_kv`; out: the rotated queries, contiguous."""
    tokens, q_heads, head_dim = query.shape
    heads = key.shape[1]
    how, scales, scale_strides = scale_arguments(k_scale, v_scale, slot_mapping)
    constants, options = settings(q_heads, heads, head_dim, cos.shape[1], k_cache.shape[2], how, k_cache.dtype)
    parts = sum(triton.cdiv(n, constants["BLOCK_H"]) for n in (q_heads, heads))
    rope_kv_write_kernel[(tokens, parts)](
        query, key, value, cos, sin, out, k_cache, v_cache, slot_mapping, *scales,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3], *scale_strides, **constants, **options,
    )  # fmt: skip
