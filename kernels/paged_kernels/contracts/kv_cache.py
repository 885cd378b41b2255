"""Contracts of what changes the KV cache: writes of new tokens, plain, quantised and with RoPE, and block copies."""

import torch

from paged_kernels.arguments import QUANTISED_DTYPES
from paged_kernels.backends import fail, implementation
from paged_kernels.contracts.attention import check_caches, check_scales


def _check_new_tokens(key, value, k_cache, slot_mapping):
    heads, dim = k_cache.shape[1], k_cache.shape[3]
    for name, rows in (("key", key), ("value", value)):
        if rows.dim() != 3 or rows.shape[1] != heads or rows.shape[2] != dim:
            fail(name, f"must be [num_tokens, {heads}, {dim}], as the cache, not {list(rows.shape)}")
        if rows.stride(2) != 1:
            fail(name, "last dimension must be contiguous")
        if rows.dtype != key.dtype:
            fail(name, f"dtype {rows.dtype} differs from {key.dtype}")
    if value.shape != key.shape:
        fail("value", "shape differs from key")
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != key.shape[:1]:
        fail("slot_mapping", f"must be int64 with {key.shape[0]} entries, one per token")
    if not slot_mapping.is_contiguous() or slot_mapping.device != key.device:
        fail("slot_mapping", f"must be contiguous and on {key.device}")


def _check_scaled_caches(k_cache, v_cache, k_scale, v_scale, like):
    if (k_scale is None) != (v_scale is None):
        fail("v_scale", "k_scale and v_scale must be given together")
    check_caches(k_cache, v_cache, like, k_scale is not None)
    if k_scale is not None:
        check_scales(k_scale, v_scale, k_cache)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: str,
) -> None:
    """Store the keys and values of new tokens in their cache slots; no other slot changes.

    key, value: [num_tokens, num_kv_heads, head_dim], may be strided views (of a fused QKV tensor, say) with a
    contiguous last dimension. slot_mapping: int64 [num_tokens]; -1 skips the token (a padding row). Slots must be
    distinct and inside the cache (not checked: that would wait for the device).
    Raises ValueError naming the argument at fault.
    """
    check_caches(k_cache, v_cache, key, False)
    _check_new_tokens(key, value, k_cache, slot_mapping)
    write = implementation("write_kv", backend, key.dtype, key.device)
    if key.shape[0]:
        write(key, value, k_cache, v_cache, slot_mapping)


def write_kv_quantised(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    backend: str,
) -> None:
    """`write_kv` into caches of float8_e4m3fn, float8_e5m2 or int8.

    k_scale, v_scale: float32 [], one number that values are divided by (what does not fit becomes the largest
    value), or [num_blocks, num_kv_heads, block_size]: then each token and head gets its own scale, the largest
    absolute value over the type's largest, which is written at the token's slot (1 where all values are 0).
    Values are rounded to nearest, halves to even. Otherwise as `write_kv`.
    Raises ValueError naming the argument at fault.
    """
    _check_scaled_caches(k_cache, v_cache, k_scale, v_scale, key)
    _check_new_tokens(key, value, k_cache, slot_mapping)
    write = implementation("write_kv_quantised", backend, key.dtype, key.device)
    if key.shape[0]:
        write(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def rope_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: str,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys (RoPE), store keys and values in their slots; returns the rotated queries.

    query: [num_tokens, num_q_heads, head_dim]; key, value: as in `write_kv`, of the same type. cos, sin:
    [num_tokens, rotary_dim / 2] of that type, rotary_dim even and at most head_dim: element i is paired with element
    i + rotary_dim / 2 (RoFormer, in the arrangement of transformers' Llama weights), the rest of a head is kept.
    Products are rounded to the type before they are added, as plain torch does. Rows of slot -1 are rotated and
    not stored. With k_scale and v_scale the cache is quantised: see `write_kv_quantised`.
    Returns a new contiguous tensor like query. Raises ValueError naming the argument at fault.
    """
    _check_scaled_caches(k_cache, v_cache, k_scale, v_scale, key)
    _check_new_tokens(key, value, k_cache, slot_mapping)
    tokens, dim = key.shape[0], key.shape[2]
    if query.dim() != 3 or query.shape[0] != tokens or query.shape[2] != dim:
        fail("query", f"must be [{tokens}, num_q_heads, {dim}], not {list(query.shape)}")
    if query.stride(2) != 1 or query.dtype != key.dtype or query.device != key.device:
        fail("query", f"must be {key.dtype} on {key.device} with a contiguous last dimension")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 2 or table.shape[0] != tokens or not 1 <= table.shape[1] <= dim // 2:
            fail(name, f"must be [{tokens}, rotary_dim / 2], at most {dim // 2}, not {list(table.shape)}")
        if table.dtype != key.dtype or table.device != key.device or not table.is_contiguous():
            fail(name, f"must be contiguous {key.dtype} on {key.device}")
    if sin.shape != cos.shape:
        fail("sin", "shape differs from cos")
    rotate_and_write = implementation("rope_write_kv", backend, key.dtype, key.device)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if tokens:
        rotate_and_write(query, key, value, cos, sin, k_cache, v_cache, slot_mapping, k_scale, v_scale, out)
    return out


def copy_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor, *, backend: str) -> None:
    """Copy whole blocks: within one cache (copy-on-write), or between a cache and a staging buffer (swapping).

    source, destination: [parts, num_blocks, ...] of one type, a block of a part contiguous (a cache of all layers
    is [layers * 2, num_blocks, heads, block_size, head_dim]); they may be the same tensor. pairs: int64 [n, 2] on the
    device, (source block, destination block); a pair with -1 is skipped (padding). Destinations must be distinct, and
    in one tensor none may be a source as well (not checked: that would wait for the device).
    Raises ValueError naming the argument at fault.
    """
    for name, tensor in (("source", source), ("destination", destination)):
        if tensor.dim() < 3:
            fail(name, "must be [parts, num_blocks, ...]")
        if tensor.numel() and not tensor[0, 0].is_contiguous():
            fail(name, "each block of a part must be contiguous")
    if destination.shape[0] != source.shape[0] or destination.shape[2:] != source.shape[2:]:
        fail("destination", f"must be [{source.shape[0]}, num_blocks, {list(source.shape[2:])}], as source")
    if destination.dtype != source.dtype or destination.device != source.device:
        fail("destination", f"must be {source.dtype} on {source.device}, as source")
    if pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2 or not pairs.is_contiguous():
        fail("pairs", "must be contiguous int64 [n, 2]")
    if pairs.device != source.device:
        fail("pairs", f"must be on {source.device}")
    # Bits are copied, whatever they stand for: backends need not know the quantised types.
    if source.dtype in QUANTISED_DTYPES:
        source, destination = source.view(torch.int8), destination.view(torch.int8)
    copy = implementation("copy_blocks", backend, torch.float32, source.device)
    if pairs.shape[0] and source.numel():
        copy(source, destination, pairs)
