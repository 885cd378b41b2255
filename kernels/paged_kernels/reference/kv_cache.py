"""Changes of the KV cache in plain torch: writes of new tokens, quantised and with RoPE, and block copies."""

import torch

from paged_kernels.arguments import QUANTISED_DTYPES


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `ops.write_kv`."""
    block_size = k_cache.shape[2]
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, offsets] = key[used]
    v_cache[blocks, :, offsets] = value[used]


def quantise(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x / scale as `dtype`: too large values become its largest, halves go to even."""
    largest = QUANTISED_DTYPES[dtype]
    divided = (x.float() / scale).clamp(-largest, largest)
    return divided.round().to(dtype) if dtype == torch.int8 else divided.to(dtype)


def write_kv_quantised(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """See `ops.write_kv_quantised`."""
    block_size = k_cache.shape[2]
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    blocks, offsets = slots // block_size, slots % block_size
    for rows, cache, scale in ((key[used], k_cache, k_scale), (value[used], v_cache, v_scale)):
        if scale.dim() == 0:
            stored = quantise(rows, scale, cache.dtype)
        else:
            own = rows.float().abs().amax(-1) / QUANTISED_DTYPES[cache.dtype]  # [tokens, heads]
            own = torch.where(own == 0, 1.0, own)
            scale[blocks, :, offsets] = own
            stored = quantise(rows, own[..., None], cache.dtype)
        # torch does not index float8 tensors: their bits are moved.
        cache.view(torch.int8)[blocks, :, offsets] = stored.view(torch.int8)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of the first 2 * cos.shape[1] elements of each head of x [tokens, heads, head_dim]."""
    half = cos.shape[1]
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], -1)


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
    """See `ops.rope_write_kv`; out: the rotated queries."""
    out.copy_(rotate(query, cos, sin))
    key = rotate(key, cos, sin)
    if k_scale is None or v_scale is None:
        write_kv(key, value, k_cache, v_cache, slot_mapping)
    else:
        write_kv_quantised(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def copy_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    """See `ops.copy_blocks`."""
    used = pairs[(pairs >= 0).all(-1)]
    destination[:, used[:, 1]] = source[:, used[:, 0]]
