"""Attention of one query token per sequence over the paged cache (Triton-lang, split-KV).

Contract: the decode rows of `ops.paged_attention`. One program per (sequence, kv head, split of the context);
the query heads that share the kv head form the rows of its matrix products, padded to 16. With one split the
program writes the output; with more it writes a normalised fp32 partial result and its log2-sum-exp2, which a
second kernel combines (Flash-Decoding). The number of splits is chosen on the host from bounds known there. With a
sliding window (WINDOW > 0) the splits divide what is in it, from the tile that holds its first token on.
"""

import torch
import triton
import triton.language as tl

from paged_kernels.tiles import attend_tile, launch_settings, page_ids, token_pointers

MAX_SPLITS = 128
MIN_SPLIT_TOKENS = 256
_PROGRAMS_PER_SM = 3
LOG2_E = 1.4426950408889634


# Lengths and tables are passed from any sequence on: their alignment and counts must not make new variants.
@triton.jit(
    do_not_specialize=["split_tokens", "table_row"],
    do_not_specialize_on_alignment=["tables", "lens"],
)
def decode_kernel(
    query, k_cache, v_cache, tables, lens, out, part_out, part_lse, scale, split_tokens,
    q_token, q_head, k_block, k_head, k_token, v_block, v_head, v_token, out_token, out_head, table_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lens + seq)
    start = split * split_tokens
    if WINDOW > 0:
        start += tl.maximum(length - WINDOW, 0) // TILE * TILE
    end = tl.minimum(length, start + split_tokens)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = head * GROUP + rows
    inside = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(query + seq * q_token + heads[:, None] * q_head + dims[None, :], mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    table = tables + seq * table_row
    ids = page_ids(table, start, end, PAGE, TILE)
    for t in range(start, end, TILE):
        k_rows = token_pointers(k_cache, ids, t, head, k_block, k_head, k_token, PAGE, TILE)
        v_rows = token_pointers(v_cache, ids, t, head, v_block, v_head, v_token, PAGE, TILE)
        tokens = t + tl.arange(0, TILE)
        loaded = tokens < end
        if WINDOW > 0:
            loaded = loaded & (tokens >= length - WINDOW)
        acc, row_max, row_sum = attend_tile(
            acc, row_max, row_sum, q, k_rows, v_rows, dims, loaded, loaded[None, :], scale,
            HEAD_DIM, BLOCK_D, True, True,
        )  # fmt: skip
        ids = page_ids(table, t + TILE, end, PAGE, TILE)
    denominator = tl.where(row_sum == 0.0, 1.0, row_sum)  # nothing to attend to: zeros
    acc = acc / denominator[:, None]
    if SPLIT:
        # Partials are [sequence, query head, split, head_dim]; an empty split leaves -inf and no values.
        lse = row_max + tl.log2(denominator)
        at = (seq * tl.num_programs(1) * GROUP + heads) * tl.num_programs(2) + split
        tl.store(part_lse + at, lse, mask=rows < GROUP)
        if start < end:
            tl.store(part_out + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
    else:
        at = out + seq * out_token + heads[:, None] * out_head + dims[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    part_out, part_lse, out, splits, out_token, out_head,
    HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Weighs the splits of one (sequence, query head) by their share of the softmax's sum."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    first = (seq * tl.num_programs(1) + head) * splits
    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_S)
    top = tl.full([BLOCK_S], float("-inf"), dtype=tl.float32)
    for s in range(0, splits, BLOCK_S):
        lse = tl.load(part_lse + first + s + lanes, mask=s + lanes < splits, other=float("-inf"))
        top = tl.maximum(top, lse)
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_S], dtype=tl.float32)
    for s in range(0, splits, BLOCK_S):
        lse = tl.load(part_lse + first + s + lanes, mask=s + lanes < splits, other=float("-inf"))
        weights = tl.exp2(lse - base)
        total += weights
        # Values of empty splits were never written, so they must not be read: 0 * NaN is NaN.
        used = (lse > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
        at = (first + s + lanes)[:, None] * HEAD_DIM + dims[None, :]
        acc += tl.sum(tl.load(part_out + at, mask=used, other=0.0) * weights[:, None], 0)
    denominator = tl.sum(total, 0)
    acc = acc / tl.where(denominator == 0.0, 1.0, denominator)
    at = out + seq * out_token + head * out_head + dims
    tl.store(at, acc.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def settings(
    *, group: int, head_dim: int, page: int, split: bool, element_size: int, capability: int, window: int = 0
) -> tuple[dict, dict]:
    """(constexpr arguments, compile options) of decode_kernel; the compile gate builds the same. Window 0: none."""
    block_m = max(16, triton.next_power_of_2(group))
    tiles, options = launch_settings(
        head_dim=head_dim, block_m=block_m, element_size=element_size, capability=capability, tile=64, stages=3
    )
    constants = {"GROUP": group, "HEAD_DIM": head_dim, "PAGE": page, "SPLIT": split, "BLOCK_M": block_m}
    return {**constants, **tiles, "WINDOW": window}, options


def combine_settings(head_dim: int) -> tuple[dict, dict]:
    """(constexpr arguments, compile options) of combine_kernel."""
    constants = {"HEAD_DIM": head_dim, "BLOCK_S": 16, "BLOCK_D": triton.next_power_of_2(head_dim)}
    return constants, {"num_warps": 4, "enable_fp_fusion": True}


def choose_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, multiprocessors: int) -> int:
    """Parts to cut each context into: about three programs per multiprocessor, none under 256 tokens."""
    wanted = -(-_PROGRAMS_PER_SM * multiprocessors // max(1, num_seqs * num_kv_heads))
    return max(1, min(wanted, max_seq_len // MIN_SPLIT_TOKENS, MAX_SPLITS))


def decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    max_seq_len: int,
    splits: int,
    window: int = 0,
    capability: int,
    out: torch.Tensor,
) -> None:
    """query, out: [num_seqs, num_q_heads, head_dim], row i belonging to sequence i; writes out. Window 0: none."""
    num_seqs, q_heads, head_dim = query.shape
    heads, page = k_cache.shape[1], k_cache.shape[2]
    constants, options = settings(
        group=q_heads // heads, head_dim=head_dim, page=page, split=splits > 1,
        element_size=query.element_size(), capability=capability, window=window,
    )  # fmt: skip
    # Whole tiles per split; rounding up may leave fewer splits than asked for.
    tile = constants["TILE"]
    longest = min(max_seq_len, window + tile - 1) if window else max_seq_len
    split_tokens = triton.cdiv(triton.cdiv(max(1, longest), splits), tile) * tile
    part_out = part_lse = out  # not touched when there is one split
    if splits > 1:
        part_out = torch.empty(num_seqs, q_heads, splits, head_dim, dtype=torch.float32, device=out.device)
        part_lse = torch.empty(num_seqs, q_heads, splits, dtype=torch.float32, device=out.device)
    decode_kernel[(num_seqs, heads, splits)](
        query, k_cache, v_cache, block_tables, seq_lens, out, part_out, part_lse, scale * LOG2_E, split_tokens,
        query.stride(0), query.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        out.stride(0), out.stride(1), block_tables.stride(0), **constants, **options,
    )  # fmt: skip
    if splits > 1:
        constants, options = combine_settings(head_dim)
        combine_kernel[(num_seqs, q_heads)](
            part_out, part_lse, out, splits, out.stride(0), out.stride(1), **constants, **options
        )
