"""Store keys and values of new tokens into their slots of the paged cache (Triton-lang).

Contract: `ops.write_kv`. One program per token and block of heads. Knows slots; does not know sequences.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def kv_write_kernel(
    key, value, k_cache, v_cache, slots,
    key_token, key_head, value_token, value_head,
    k_block, k_head, k_token, v_block, v_head, v_token,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        dims = tl.arange(0, BLOCK_D)[None, :]
        inside = (heads < HEADS) & (dims < HEAD_DIM)
        block = slot // PAGE
        offset = slot % PAGE
        k = tl.load(key + token * key_token + heads * key_head + dims, mask=inside)
        v = tl.load(value + token * value_token + heads * value_head + dims, mask=inside)
        tl.store(k_cache + block * k_block + offset * k_token + heads * k_head + dims, k, mask=inside)
        tl.store(v_cache + block * v_block + offset * v_token + heads * v_head + dims, v, mask=inside)


def settings(heads: int, head_dim: int, page: int) -> tuple[dict, dict]:
    """(constexpr arguments, compile options) of kv_write_kernel; the compile gate builds the same."""
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(heads), max(1, 2048 // block_d))
    constants = {"HEADS": heads, "HEAD_DIM": head_dim, "PAGE": page, "BLOCK_H": block_h, "BLOCK_D": block_d}
    return constants, {"num_warps": 4 if block_h * block_d >= 1024 else 1, "enable_fp_fusion": True}


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `ops.write_kv`; arguments are validated there."""
    tokens, heads, head_dim = key.shape
    constants, options = settings(heads, head_dim, k_cache.shape[2])
    kv_write_kernel[(tokens, triton.cdiv(heads, constants["BLOCK_H"]))](
        key, value, k_cache, v_cache, slot_mapping,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3], **constants, **options,
    )  # fmt: skip
