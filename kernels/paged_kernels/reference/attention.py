"""Paged attention in plain torch: gathers each sequence's keys and values, multiplies in float32, masks, softmax."""

import torch

from paged_kernels.arguments import Bounds, Options


def gather(cache: torch.Tensor, block_table: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Positions start .. end of one sequence, from the pages that hold them.

    cache: [num_blocks, num_kv_heads, block_size, ...]; returns [num_kv_heads, end - start, ...].
    """
    block_size = cache.shape[2]
    first, last = start // block_size, -(-end // block_size)
    blocks = cache[block_table[first:last].long()]  # [pages, heads, block_size, ...]
    return blocks.transpose(0, 1).flatten(1, 2)[:, start - first * block_size : end - first * block_size]


def dequantised(cache: torch.Tensor, scale: torch.Tensor | None, table: torch.Tensor, start: int, end: int):
    """float32 keys or values [num_kv_heads, end - start, head_dim] of positions start .. end."""
    # Some element types of 8 bits cannot be indexed by torch: their bits can.
    bits = cache.view(torch.int8) if cache.element_size() == 1 else cache
    values = gather(bits, table, start, end).view(cache.dtype).float()
    if scale is None:
        return values
    return values * (scale if scale.dim() == 0 else gather(scale, table, start, end)[..., None])


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    bounds: Bounds,
    options: Options,
    out: torch.Tensor,
) -> None:
    """See `ops.paged_attention`; writes every row of out. The host-side bounds are not needed here."""
    group = query.shape[1] // k_cache.shape[1]
    window = options.window
    out.zero_()
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        begin, end = starts[i], starts[i + 1]
        if length <= 0 or begin == end:
            continue
        own = torch.arange(length - (end - begin), length, device=query.device)
        # What is before the first query's window may be gone: masking its scores would not keep a NaN value out.
        seen = 0 if window is None else max(0, length - (end - begin) - window + 1)
        keys = dequantised(k_cache, options.k_scale, block_tables[i], seen, length).repeat_interleave(group, 0)
        values = dequantised(v_cache, options.v_scale, block_tables[i], seen, length).repeat_interleave(group, 0)
        rows = query[begin:end].float().transpose(0, 1)  # [heads, q_len, head_dim]
        scores = rows @ keys.transpose(1, 2) * scale
        distances = torch.arange(seen, length, device=query.device)[None] - own[:, None]  # <= 0 where visible
        weights = _weights(scores, distances, options)
        out[begin:end] = (weights @ values).transpose(0, 1).to(out.dtype)


def _weights(scores: torch.Tensor, distances: torch.Tensor, options: Options) -> torch.Tensor:
    """Softmax of scores [heads, q_len, tokens] after the options, in the order of the contract."""
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    if options.alibi_slopes is not None:
        scores = scores + options.alibi_slopes[:, None, None] * distances
    hidden = distances > 0
    if options.window is not None:
        hidden = hidden | (distances <= -options.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if options.sinks is None:
        return scores.softmax(-1)
    # One more column of scores, which takes its share of the softmax and has no value.
    sinks = options.sinks[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
