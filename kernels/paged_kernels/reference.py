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


def gather(cache: torch.Tensor, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` positions of one sequence: [num_kv_heads, length, head_dim]."""
    pages = -(-length // cache.shape[2])
    blocks = cache[block_table[:pages].long()]  # [pages, heads, block_size, head_dim]
    return blocks.transpose(0, 1).flatten(1, 2)[:, :length]


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
        keys = gather(k_cache, block_tables[i], length).float().repeat_interleave(group, 0)
        values = gather(v_cache, block_tables[i], length).float().repeat_interleave(group, 0)
        rows = query[begin:end].float().transpose(0, 1)  # [heads, q_len, head_dim]
        scores = rows @ keys.transpose(1, 2) * scale
        positions = torch.arange(length, device=query.device)
        own = length - (end - begin) + torch.arange(end - begin, device=query.device)
        scores = scores.masked_fill(positions[None, None] > own[None, :, None], float("-inf"))
        out[begin:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)
