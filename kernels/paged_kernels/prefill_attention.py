"""Causal attention of ragged query chunks over the paged cache (Triton-lang).

Contract: the prefill rows of `ops.paged_attention`. One program per (tile of query tokens, kv head); its rows
are the tile's tokens times the query heads that share the kv head. Keys are walked in two phases:

    position  0 ........................ first row ...... last row
              |-- whole tiles, no mask --|-- diagonal: mask --|

With a sliding window (WINDOW > 0) they start at the tile of the first token that the first row sees, and those
that some rows see only in part are masked as well:

    position  first row's window ... last row's window ........ first row ...... last row
              |------- head: mask -------|-- whole tiles, no mask --|-- diagonal: mask --|

The host does not know how the tiles fall (that would mean waiting for the device), so the grid is a bound and
each program finds its sequence by binary search: sequence i starts at tile starts[i] // BLOCK_Q + i, which
leaves every sequence room for its last, partial tile. Query rows past the last sequence count as one more
sequence with nothing to attend to, and so become zeros.
"""

import torch
import triton
import triton.language as tl

from paged_kernels.arguments import Options
from paged_kernels.attention_options import constants_of, option_arguments, option_constants
from paged_kernels.launch_table import look_up, padded_head_dim
from paged_kernels.tiles import attend_tile, head_slopes, page_ids, start_rows, token_pointers


@triton.jit
def find_sequence(starts, first, num_seqs, tile, BLOCK_Q: tl.constexpr):
    """(sequence, tile within it) of a tile of the grid; sequence num_seqs is the padding behind the last."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        begin = (tl.load(starts + middle) - first) // BLOCK_Q + middle
        if begin <= tile:
            low = middle
        else:
            high = middle - 1
    return low, tile - ((tl.load(starts + low) - first) // BLOCK_Q + low)


@triton.jit
def attend_range(
    acc, row_max, row_sum, q, ids, begin, stop, end, positions, oldest, k_cache, v_cache, k_scale, v_scale, table,
    head, k_block, k_head, k_token, v_block, v_head, v_token, scale_block, scale_head, slopes, scale, soft_cap,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, QUANTISED: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Tiles begin .. stop of the context, of which tokens oldest .. end are there; masks only if MASK.

    `ids` are the pages at `begin`; returns those at `stop` as well.
    """
    dims = tl.arange(0, BLOCK_D)
    for t in range(begin, stop, TILE):
        k_rows = token_pointers(k_cache, ids, t, head, k_block, k_head, k_token, PAGE, TILE)
        v_rows = token_pointers(v_cache, ids, t, head, v_block, v_head, v_token, PAGE, TILE)
        k_scales = token_pointers(k_scale, ids, t, head, scale_block, scale_head, 1, PAGE, TILE)
        v_scales = token_pointers(v_scale, ids, t, head, scale_block, scale_head, 1, PAGE, TILE)
        tokens = t + tl.arange(0, TILE)
        loaded = tokens < end
        visible = tokens[None, :] <= positions[:, None]
        if WINDOW > 0:
            loaded = loaded & (tokens >= oldest)
            visible = visible & (tokens[None, :] > positions[:, None] - WINDOW)
        acc, row_max, row_sum = attend_tile(
            acc, row_max, row_sum, q, k_rows, v_rows, k_scales, v_scales, dims, loaded, visible,
            tokens[None, :] - positions[:, None], slopes, scale, soft_cap,
            HEAD_DIM, BLOCK_D, MASK, SOFT_CAP, ALIBI, QUANTISED, SCALES,
        )  # fmt: skip
        ids = page_ids(table, t + TILE, end, PAGE, TILE)
    return acc, row_max, row_sum, ids


# Lengths and tables are passed from any sequence on: their alignment and counts must not make new variants.
@triton.jit(
    do_not_specialize=["num_seqs", "total_q", "table_row"],
    do_not_specialize_on_alignment=["tables", "lens", "starts"],
)
def prefill_kernel(
    query, k_cache, v_cache, tables, lens, starts, out, slopes, sinks, k_scale, v_scale,
    scale, soft_cap, scale_block, scale_head, num_seqs, total_q,
    q_token, q_head, k_block, k_head, k_token, v_block, v_head, v_token, out_token, out_head, table_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    QUANTISED: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Longer than a screen because each phase of the walk passes on all there is to know of the cache."""
    # Last tiles first: they have the longest contexts.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    seq, within = find_sequence(starts, tl.load(starts), num_seqs, tile, BLOCK_Q)
    is_padding = seq == num_seqs
    q_begin = tl.load(starts + seq)
    q_end = tl.load(starts + seq + 1, mask=seq < num_seqs, other=total_q)
    tile_row = q_begin + within * BLOCK_Q
    if tile_row < q_end:
        length = tl.load(lens + seq, mask=seq < num_seqs, other=0)
        rows = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        tokens = rows // GROUP
        heads = head * GROUP + rows % GROUP
        real = (tokens < BLOCK_Q) & (tile_row + tokens < q_end)
        inside = real[:, None] & (dims < HEAD_DIM)[None, :]
        token_at = (tile_row + tokens).to(tl.int64)
        at = token_at[:, None] * q_token + heads[:, None] * q_head + dims[None, :]
        q = tl.load(query + at, mask=inside, other=0.0)
        # Position of the tile's first row, and the end of what its last row sees.
        first = length - (q_end - tile_row)
        end = tl.minimum(length, first + BLOCK_Q)
        whole = tl.maximum(first + 1, 0) // TILE * TILE
        if is_padding:
            end = 0
            whole = 0
        table = tables + seq.to(tl.int64) * table_row
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        row_max, row_sum = start_rows(heads, real, sinks, SINKS, BLOCK_M)
        row_slopes = head_slopes(heads, real, slopes, ALIBI, BLOCK_M)
        v_factor = 1.0
        if SCALES == 1:
            scale *= tl.load(k_scale)
            v_factor = tl.load(v_scale)
        oldest = 0
        unmasked = 0
        if WINDOW > 0:
            oldest = tl.maximum(first - WINDOW + 1, 0)
            begin = oldest // TILE * TILE
            unmasked = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE, whole)
            ids = page_ids(table, begin, end, PAGE, TILE)
            acc, row_max, row_sum, ids = attend_range(
                acc, row_max, row_sum, q, ids, begin, unmasked, end, first + tokens, oldest, k_cache, v_cache,
                k_scale, v_scale, table, head, k_block, k_head, k_token, v_block, v_head, v_token, scale_block,
                scale_head, row_slopes, scale, soft_cap,
                HEAD_DIM, PAGE, BLOCK_D, TILE, True, WINDOW, SOFT_CAP, ALIBI, QUANTISED, SCALES,
            )  # fmt: skip
        else:
            ids = page_ids(table, 0, end, PAGE, TILE)
        acc, row_max, row_sum, ids = attend_range(
            acc, row_max, row_sum, q, ids, unmasked, whole, end, first + tokens, oldest, k_cache, v_cache,
            k_scale, v_scale, table, head, k_block, k_head, k_token, v_block, v_head, v_token, scale_block,
            scale_head, row_slopes, scale, soft_cap,
            HEAD_DIM, PAGE, BLOCK_D, TILE, False, WINDOW, SOFT_CAP, ALIBI, QUANTISED, SCALES,
        )  # fmt: skip
        acc, row_max, row_sum, ids = attend_range(
            acc, row_max, row_sum, q, ids, whole, end, end, first + tokens, oldest, k_cache, v_cache,
            k_scale, v_scale, table, head, k_block, k_head, k_token, v_block, v_head, v_token, scale_block,
            scale_head, row_slopes, scale, soft_cap,
            HEAD_DIM, PAGE, BLOCK_D, TILE, True, WINDOW, SOFT_CAP, ALIBI, QUANTISED, SCALES,
        )  # fmt: skip
        acc = acc * (v_factor / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
        at = token_at[:, None] * out_token + heads[:, None] * out_head + dims[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


def settings(
    *, group: int, head_dim: int, page: int, max_query_len: int, element_size: int, capability: int,
    cache_element_size: int | None = None, options: dict | None = None,
) -> tuple[dict, dict]:  # fmt: skip
    """(constexpr arguments, compile options) of prefill_kernel; the compile gate builds the same.

    options: of `attention_options`; None: the plain kernel. Few rows for short chunks: the rest would be padding.
    """
    chosen = options or option_constants()
    # What an option computes with takes registers too (a sink does not), and so does masking a padded head dim.
    demanding = any(value for name, value in chosen.items() if name != "SINKS")
    demanding = demanding or head_dim < padded_head_dim(head_dim)
    launch = look_up(
        "prefill+" if demanding else "prefill", capability=capability, head_dim=head_dim,
        rows=max(1, max_query_len) * group, element_size=element_size,
        cache_element_size=cache_element_size or element_size,
    )  # fmt: skip
    block_m = max(launch.rows, triton.next_power_of_2(group))
    constants = {
        "GROUP": group, "HEAD_DIM": head_dim, "PAGE": page, "BLOCK_Q": block_m // group, "BLOCK_M": block_m,
        "BLOCK_D": padded_head_dim(head_dim), "TILE": launch.tile, **chosen,
    }  # fmt: skip
    compiled = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
    if demanding or capability < 90 or head_dim > 64:
        # Without a bound ptxas may aim at two programs per multiprocessor, and spill to get by with 128 registers.
        compiled["maxnreg"] = 255
    return constants, compiled


def prefill_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    first_row: int,
    max_query_len: int,
    options: Options,
    capability: int,
    out: torch.Tensor,
) -> None:
    """Attends the rows of query and out [total_q, num_q_heads, head_dim] that the sequences given share.

    query_start_loc [num_seqs + 1] starts at first_row or later; rows behind its last entry become zeros.
    """
    total_q, q_heads, head_dim = query.shape
    heads, page = k_cache.shape[1], k_cache.shape[2]
    num_seqs = seq_lens.shape[0]
    constants, launch = settings(
        group=q_heads // heads, head_dim=head_dim, page=page, max_query_len=max_query_len, capability=capability,
        element_size=query.element_size(), cache_element_size=k_cache.element_size(),
        options=constants_of(options, k_cache.dtype),
    )  # fmt: skip
    tiles = (total_q - first_row) // constants["BLOCK_Q"] + num_seqs + 1
    prefill_kernel[(tiles, heads)](
        query, k_cache, v_cache, block_tables, seq_lens, query_start_loc, out,
        *option_arguments(options, scale, seq_lens), num_seqs, total_q,
        query.stride(0), query.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        out.stride(0), out.stride(1), block_tables.stride(0), **constants, **launch,
    )  # fmt: skip
