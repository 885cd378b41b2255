"""Store keys and values of new tokens into their slots of the paged cache, quantised on the way (Triton-lang).

Contract: `ops.write_kv` and `ops.write_kv_quantised`. One program per token and block of heads. Knows slots; does not
know sequences.
"""

import torch
import triton
import triton.language as tl

from paged_kernels.arguments import QUANTISED_DTYPES
from paged_kernels.quantise import store_row
from paged_kernels.tiles import SCALES


@triton.jit
def kv_write_kernel(
    key, value, k_cache, v_cache, slots, k_scale, v_scale,
    key_token, key_head, value_token, value_head,
    k_block, k_head, k_token, v_block, v_head, v_token, scale_block, scale_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALES: tl.constexpr, LARGEST: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        dims = tl.arange(0, BLOCK_D)[None, :]
        real = heads < HEADS
        inside = real & (dims < HEAD_DIM)
        block = slot // PAGE
        offset = slot % PAGE
        scale_at = block * scale_block + heads * scale_head + offset
        k = tl.load(key + token * key_token + heads * key_head + dims, mask=inside)
        k_rows = k_cache + block * k_block + offset * k_token + heads * k_head + dims
        store_row(k, k_rows, k_scale, k_scale + scale_at, inside, real, SCALES, LARGEST, INTEGER)
        v = tl.load(value + token * value_token + heads * value_head + dims, mask=inside)
        v_rows = v_cache + block * v_block + offset * v_token + heads * v_head + dims
        store_row(v, v_rows, v_scale, v_scale + scale_at, inside, real, SCALES, LARGEST, INTEGER)


def quantising_constants(scales: str = "none", dtype: torch.dtype | None = None) -> dict:
    """Constexpr arguments that say how values are quantised; dtype: of the cache."""
    largest = QUANTISED_DTYPES.get(dtype, 1.0) if dtype else 1.0
    return {"SCALES": SCALES[scales], "LARGEST": largest, "INTEGER": dtype == torch.int8}


def settings(
    heads: int, head_dim: int, page: int, scales: str = "none", cache_dtype: torch.dtype | None = None
) -> tuple[dict, dict]:
    """(constexpr arguments, compile options) of kv_write_kernel; the compile gate builds the same."""
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(heads), max(1, 2048 // block_d))
    constants = {"HEADS": heads, "HEAD_DIM": head_dim, "PAGE": page, "BLOCK_H": block_h, "BLOCK_D": block_d}
    options = {"num_warps": 4 if block_h * block_d >= 1024 else 1, "enable_fp_fusion": True}
    return constants | quantising_constants(scales, cache_dtype), options


def scale_arguments(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, unused: torch.Tensor) -> tuple:
    """(how, pointers, strides) of scales that may be missing, of one number, or per token and head."""
    if k_scale is None or v_scale is None:
        return "none", (unused, unused), (0, 0)
    if k_scale.dim() == 0:
        return "tensor", (k_scale, v_scale), (0, 0)
    return "token", (k_scale, v_scale), k_scale.stride()[:2]


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """See `ops.write_kv` and `ops.write_kv_quantised`; arguments are validated there."""
    tokens, heads, head_dim = key.shape
    how, scales, scale_strides = scale_arguments(k_scale, v_scale, slot_mapping)
    constants, options = settings(heads, head_dim, k_cache.shape[2], how, k_cache.dtype)
    kv_write_kernel[(tokens, triton.cdiv(heads, constants["BLOCK_H"]))](
        key, value, k_cache, v_cache, slot_mapping, *scales,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3], *scale_strides, **constants, **options,
    )  # fmt: skip


write_kv_quantised = write_kv
