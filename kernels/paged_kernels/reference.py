"""The contracts of `paged_kernels.ops` in plain torch, written to be obviously right rather than fast.

Gathers each sequence's keys and values, multiplies in float32, masks, takes the softmax. The other backends
are tested against this one; it is also selectable (`attention_backend: reference`) to rule a kernel out.
"""

import torch


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


def gather(cache: torch.Tensor, block_table: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Positions start .. end of one sequence, from the pages that hold them: [num_kv_heads, end - start, head_dim]."""
    block_size = cache.shape[2]
    first, last = start // block_size, -(-end // block_size)
    blocks = cache[block_table[first:last].long()]  # [pages, heads, block_size, head_dim]
    return blocks.transpose(0, 1).flatten(1, 2)[:, start - first * block_size : end - first * block_size]


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """See `ops.paged_attention`; writes every row of out. The host-side bounds are not needed here."""
    group = query.shape[1] // k_cache.shape[1]
    out.zero_()
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        begin, end = starts[i], starts[i + 1]
        if length <= 0 or begin == end:
            continue
        own = torch.arange(length - (end - begin), length, device=query.device)
        # What is before the first query's window may be gone: masking its scores would not keep a NaN value out.
        seen = 0 if window is None else max(0, length - (end - begin) - window + 1)
        keys = gather(k_cache, block_tables[i], seen, length).float().repeat_interleave(group, 0)
        values = gather(v_cache, block_tables[i], seen, length).float().repeat_interleave(group, 0)
        rows = query[begin:end].float().transpose(0, 1)  # [heads, q_len, head_dim]
        scores = rows @ keys.transpose(1, 2) * scale
        positions = torch.arange(seen, length, device=query.device)
        hidden = positions[None] > own[:, None]
        if window is not None:
            hidden |= positions[None] <= own[:, None] - window
        scores = scores.masked_fill(hidden[None], float("-inf"))
        out[begin:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)
