"""Attention of up to eight query tokens per sequence over the paged cache (Triton-lang, split-KV).

Contract: the decode and verification rows of `ops.paged_attention`. One program per (sequence, kv head, split of the
context); the query tokens times the query heads that share the kv head form the rows of its matrix products, padded
to 16. A group too large for one program is dealt to several (PARTS). With one split the program writes the output;
with more it writes a normalised fp32 partial result and its log2-sum-exp2, which a second kernel combines
(Flash-Decoding, Dao et al. 2023). How many splits is decided on the host: `split_rule.py`.

    context   0 ......... split_tokens ......... 2 * split_tokens ..... first query ... last query
              |--- split 0 ----|------- split 1 ------|------------- split 2: causal mask ------|

With a sliding window (WINDOW > 0) the splits divide what is in it, from the tile that holds its first token on.
"""

import torch
import triton
import triton.language as tl

from paged_kernels.arguments import MAX_SHORT_QUERY, Options
from paged_kernels.attention_options import constants_of, option_arguments, option_constants
from paged_kernels.launch_table import look_up, padded_head_dim
from paged_kernels.tiles import attend_tile, head_slopes, page_ids, start_rows, token_pointers

MAX_ROWS = 64
"""Query tokens * heads of one program; larger groups are dealt to several."""


# Lengths and tables are passed from any sequence on: their alignment and counts must not make new variants.
@triton.jit(
    do_not_specialize=["split_tokens", "table_row"],
    do_not_specialize_on_alignment=["tables", "lens", "starts"],
)
def decode_kernel(
    query, k_cache, v_cache, tables, lens, starts, out, part_out, part_lse, slopes, sinks, k_scale, v_scale,
    scale, soft_cap, scale_block, scale_head, split_tokens,
    q_token, q_head, k_block, k_head, k_token, v_block, v_head, v_token, out_token, out_head, table_row,
    GROUP: tl.constexpr, HEADS: tl.constexpr, QUERY: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    QUANTISED: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Longer than a screen because each line of it runs once per program: rows, the walk, the result.

    QUERY: bound of the query tokens, 1 where each sequence has exactly one (row i is sequence i, starts unused).
    """
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    seq = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) // PARTS).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lens + seq)
    first_row = seq
    count = 1
    if QUERY > 1:
        begin = tl.load(starts + seq)
        count = tl.load(starts + seq + 1) - begin
        first_row = begin.to(tl.int64)
    start = split * split_tokens
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(length - count + 1 - WINDOW, 0)
        start += oldest // TILE * TILE
    end = tl.minimum(length, start + split_tokens)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens_of_rows = rows // HEADS
    in_group = tl.program_id(1) % PARTS * HEADS + rows % HEADS
    real = (tokens_of_rows < count) & (tokens_of_rows < QUERY) & (in_group < GROUP)
    heads = head * GROUP + in_group
    positions = length - count + tokens_of_rows
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]
    at = (first_row + tokens_of_rows)[:, None] * q_token + heads[:, None] * q_head + dims[None, :]
    # A split behind the end of a short context reads and writes nothing.
    busy = (tokens_of_rows < tl.where(start < end, BLOCK_M, 0))[:, None]
    q = tl.load(query + at, mask=inside & busy, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    # The sink counts once: with the first split.
    with_sink = real & (tokens_of_rows < tl.where(split == 0, BLOCK_M, 0))
    row_max, row_sum = start_rows(heads, with_sink, sinks, SINKS, BLOCK_M)
    row_slopes = head_slopes(heads, real, slopes, ALIBI, BLOCK_M)
    v_factor = 1.0
    if SCALES == 1:
        scale *= tl.load(k_scale)
        v_factor = tl.load(v_scale)
    table = tables + seq * table_row
    ids = page_ids(table, start, end, PAGE, TILE)
    for t in range(start, end, TILE):
        k_rows = token_pointers(k_cache, ids, t, head, k_block, k_head, k_token, PAGE, TILE)
        v_rows = token_pointers(v_cache, ids, t, head, v_block, v_head, v_token, PAGE, TILE)
        k_scales = token_pointers(k_scale, ids, t, head, scale_block, scale_head, 1, PAGE, TILE)
        v_scales = token_pointers(v_scale, ids, t, head, scale_block, scale_head, 1, PAGE, TILE)
        tokens = t + tl.arange(0, TILE)
        loaded = tokens < end
        if WINDOW > 0:
            loaded = loaded & (tokens >= oldest)
        distances = tokens[None, :] - positions[:, None]
        if QUERY > 1:
            visible = loaded[None, :] & (distances <= 0)
            if WINDOW > 0:
                visible = visible & (distances > -WINDOW)
        else:
            visible = loaded[None, :]
        acc, row_max, row_sum = attend_tile(
            acc, row_max, row_sum, q, k_rows, v_rows, k_scales, v_scales, dims, loaded, visible, distances,
            row_slopes, scale, soft_cap, HEAD_DIM, BLOCK_D, True, SOFT_CAP, ALIBI, QUANTISED, SCALES,
        )  # fmt: skip
        ids = page_ids(table, t + TILE, end, PAGE, TILE)
    denominator = tl.where(row_sum == 0.0, 1.0, row_sum)  # nothing to attend to: zeros
    acc = acc * (v_factor / denominator)[:, None]
    if SPLIT:
        # Partials are [query row, query head, split, head_dim]; an empty split leaves -inf and no values.
        lse = tl.where(start < end, row_max + tl.log2(denominator), float("-inf"))
        row = seq * QUERY + tokens_of_rows
        at = (row * (tl.num_programs(1) // PARTS * GROUP) + heads) * tl.num_programs(2) + split
        tl.store(part_lse + at, lse, mask=real)
        tl.store(part_out + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside & busy)
    else:
        at = (first_row + tokens_of_rows)[:, None] * out_token + heads[:, None] * out_head + dims[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["starts"])
def combine_kernel(
    part_out, part_lse, starts, out, splits, out_token, out_head,
    QUERY: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Weighs the splits of one (query row, query head) by their share of the softmax's sum."""
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row = slot
    count = 1
    if QUERY > 1:
        begin = tl.load(starts + slot // QUERY)
        count = tl.load(starts + slot // QUERY + 1) - begin
        row = begin.to(tl.int64) + slot % QUERY
    if slot % QUERY < count:
        first = (slot * tl.num_programs(1) + head) * splits
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
        at = out + row * out_token + head * out_head + dims
        tl.store(at, acc.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def settings(
    *, group: int, head_dim: int, page: int, split: bool, element_size: int, capability: int,
    max_query_len: int = 1, cache_element_size: int | None = None, options: dict | None = None,
) -> tuple[dict, dict]:  # fmt: skip
    """(constexpr arguments, compile options) of decode_kernel; the compile gate builds the same.

    options: of `attention_options`; None: the plain kernel.
    """
    # One variant for all short queries: what more rows cost is little beside compiling when one comes along.
    query = 1 if max_query_len == 1 else MAX_SHORT_QUERY
    heads = min(group, MAX_ROWS // query)
    launch = look_up(
        "decode", capability=capability, head_dim=head_dim, rows=query * heads, element_size=element_size,
        cache_element_size=cache_element_size or element_size,
    )  # fmt: skip
    heads = min(heads, launch.rows // query)
    constants = {
        "GROUP": group, "HEADS": heads, "QUERY": query, "HEAD_DIM": head_dim, "PAGE": page, "SPLIT": split,
        "BLOCK_M": launch.rows, "BLOCK_D": padded_head_dim(head_dim), "TILE": launch.tile,
        **(options or option_constants()),
    }  # fmt: skip
    compiled = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
    if head_dim > 128:
        # Shared memory allows few of these programs at once; without a bound ptxas may spill to make room for more.
        compiled["maxnreg"] = 255
    return constants, compiled


def combine_settings(head_dim: int, query: int = 1) -> tuple[dict, dict]:
    """(constexpr arguments, compile options) of combine_kernel."""
    constants = {"QUERY": query, "HEAD_DIM": head_dim, "BLOCK_S": 16, "BLOCK_D": triton.next_power_of_2(head_dim)}
    return constants, {"num_warps": 4, "enable_fp_fusion": True}


def decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    splits: int,
    options: Options,
    capability: int,
    out: torch.Tensor,
) -> None:
    """Attends the queries of the sequences given; writes their rows of out and no other.

    query, out: [rows, num_q_heads, head_dim]. With query_start_loc None row i is the one token of sequence i; else
    sequence i has rows query_start_loc[i] .. query_start_loc[i + 1], at most max_query_len <= MAX_SHORT_QUERY.
    """
    assert max_query_len <= MAX_SHORT_QUERY
    num_seqs = seq_lens.shape[0]
    q_heads, head_dim = query.shape[1:]
    heads, page = k_cache.shape[1], k_cache.shape[2]
    constants, launch = settings(
        group=q_heads // heads, head_dim=head_dim, page=page, split=splits > 1, capability=capability,
        element_size=query.element_size(), cache_element_size=k_cache.element_size(), max_query_len=max_query_len,
        options=constants_of(options, k_cache.dtype),
    )  # fmt: skip
    # Whole tiles per split; rounding up may leave fewer splits than asked for.
    tile, bound = constants["TILE"], constants["QUERY"]
    longest = min(max_seq_len, options.window + bound + tile - 2) if options.window else max_seq_len
    split_tokens = triton.cdiv(triton.cdiv(max(1, longest), splits), tile) * tile
    starts = seq_lens if query_start_loc is None else query_start_loc
    part_out = part_lse = out  # not touched when there is one split
    if splits > 1:
        shape = (num_seqs * bound, q_heads, splits)
        part_out = torch.empty(*shape, head_dim, dtype=torch.float32, device=out.device)
        part_lse = torch.empty(shape, dtype=torch.float32, device=out.device)
    parts = triton.cdiv(q_heads // heads, constants["HEADS"])
    decode_kernel[(num_seqs, heads * parts, splits)](
        query, k_cache, v_cache, block_tables, seq_lens, starts, out, part_out, part_lse,
        *option_arguments(options, scale, seq_lens), split_tokens,
        query.stride(0), query.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        out.stride(0), out.stride(1), block_tables.stride(0), **constants, **launch,
    )  # fmt: skip
    if splits > 1:
        constants, launch = combine_settings(head_dim, bound)
        combine_kernel[(num_seqs * bound, q_heads)](
            part_out, part_lse, starts, out, splits, out.stride(0), out.stride(1), **constants, **launch
        )
