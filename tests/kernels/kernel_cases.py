"""Random paged batches and the checks every backend has to pass against `paged_kernels.reference`."""

import torch

from paged_kernels import ops

GARBAGE = 2**30
"""A block id that must never be dereferenced."""

GRID = [
    # (page, head_dim, group): every page with every head size and group, every head size with every group
    (8, 64, 1), (16, 64, 3), (32, 64, 7), (8, 64, 8),
    (16, 80, 1), (32, 80, 3), (8, 80, 7), (16, 80, 8),
    (32, 128, 1), (8, 128, 3), (16, 128, 7), (32, 128, 8),
]  # fmt: skip

TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    # Weights are rounded to bfloat16 before they meet values of up to 4.
    torch.bfloat16: {"atol": 6e-3, "rtol": 1e-2},
}


def make_caches(blocks, heads, page, dim, dtype, fill=float("nan")):
    """K and V caches as strided halves of one tensor [blocks, 2, heads, page, dim]."""
    both = torch.full((blocks, 2, heads, page, dim), fill, dtype=dtype)
    return both[:, 0], both[:, 1]


def make_batch(lens, query_lens, *, heads, group, dim, page, dtype, seed=0, shared=(), padding=0, spare=0):
    """Arguments of ops.paged_attention, as a dict.

    Pages are handed out in random order and unwritten slots hold NaN; table entries past a sequence's end hold
    GARBAGE. `shared` lists (a, b, pages): sequence b starts with the first pages of sequence a. The queries
    are a strided view of a fused QKV tensor and are followed by `padding` rows of no sequence.
    """
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-length // page) for length in lens]
    order = torch.randperm(sum(counts) + 3, generator=rng).tolist()
    k_cache, v_cache = make_caches(len(order), heads, page, dim, dtype)
    tables = torch.full((len(lens), max(counts, default=0) + 1 + spare), GARBAGE, dtype=torch.int32)
    for i, (length, count) in enumerate(zip(lens, counts, strict=True)):
        for j in range(count):
            tables[i, j] = block = order.pop()
            used = min(page, length - j * page)
            for cache in (k_cache, v_cache):
                cache[block, :, :used] = torch.randn(heads, used, dim, generator=rng).to(dtype)
    for a, b, pages in shared:
        tables[b, :pages] = tables[a, :pages]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    rows = int(starts[-1]) + padding
    fused = torch.randn(rows, (group + 2) * heads * dim, generator=rng).to(dtype)
    query = fused[:, : group * heads * dim].view(rows, group * heads, dim)
    return {
        "query": query, "k_cache": k_cache, "v_cache": v_cache, "block_tables": tables,
        "seq_lens": torch.tensor(lens, dtype=torch.int32), "query_start_loc": starts,
        "scale": dim**-0.5, "num_decodes": 0, "max_query_len": max(query_lens, default=0),
        "max_seq_len": max(lens, default=0),
    }  # fmt: skip


def mixed_batch(page, dim, group, dtype, seed=0):
    """Decodes and prefill chunks at every interesting length, two of each sharing pages."""
    decodes = [0, 1, page - 1, page, page + 1, 4 * page + 3, 4 * page + 3]
    chunks = [(page, page), (1, page + 1), (0, page), (page + 1, 3 * page + 1), (5, 3 * page + 2), (0, 0), (3, 0)]
    chunks += [(2 * page + 3, 2 * page + 3), (7, 2 * page + 5)]
    lens = decodes + [length for _, length in chunks]
    query_lens = [1] * len(decodes) + [rows for rows, _ in chunks]
    batch = make_batch(
        lens, query_lens, heads=2 if group < 7 else 1, group=group, dim=dim, page=page, dtype=dtype, seed=seed,
        shared=[(5, 6, 3), (5, len(lens) - 1, 2)], padding=2,
    )  # fmt: skip
    return {**batch, "num_decodes": len(decodes)}


def long_batch(page, dim, group, dtype, length=1500):
    """Contexts long enough to be split, beside short and empty ones, and a chunk far into a context."""
    batch = make_batch(
        [length, 3, 0, length // 2, length - 7], [1, 1, 1, 1, 20], heads=1, group=group, dim=dim, page=page,
        dtype=dtype, seed=3,
    )  # fmt: skip
    return {**batch, "num_decodes": 4}


def window_sizes(page):
    """One token, less than a page, a page, one more, several pages, and more than any context."""
    return (1, page - 3, page, page + 1, 3 * page, 10_000)


def windowed(batch, window):
    """The batch with that window, and with what no query of it sees any more taken away.

    Blocks wholly before the window of a sequence's first query are filled with NaN; every other sequence has lost
    their ids too. Only for batches whose sequences share no blocks.
    """
    page = batch["k_cache"].shape[2]
    starts = batch["query_start_loc"].tolist()
    for i, length in enumerate(batch["seq_lens"].tolist()):
        gone = max(0, length - (starts[i + 1] - starts[i]) - window + 1) // page
        table = batch["block_tables"][i, :gone]
        for cache in (batch["k_cache"], batch["v_cache"]):
            cache[table.long()] = float("nan")
        if i % 2:
            table.fill_(GARBAGE)
    return {**batch, "window": window}


def window_batch(page, dim, group, dtype, window):
    """Decodes and ragged chunks around multiples of a page, as `windowed` leaves them."""
    decodes = [0, 1, page, page + 1, 2 * page, 4 * page + 3, 5 * page - 1]
    chunks = [(page, page), (1, 3 * page), (0, page), (page + 1, 3 * page + 1), (5, 5 * page + 2), (3, 0)]
    chunks += [(2 * page + 3, 2 * page + 3), (7, 4 * page + 5)]
    batch = make_batch(
        decodes + [length for _, length in chunks], [1] * len(decodes) + [rows for rows, _ in chunks],
        heads=2 if group < 7 else 1, group=group, dim=dim, page=page, dtype=dtype, seed=window, padding=2,
    )  # fmt: skip
    return {**windowed(batch, window), "num_decodes": len(decodes)}


def long_window_batch(page, dtype, window):
    """Contexts and windows long enough to be split, and a chunk of several tiles far into a context."""
    batch = make_batch(
        [1500, 3, 0, 1100, 1493], [1, 1, 1, 1, 150], heads=1, group=3, dim=64, page=page, dtype=dtype, seed=5
    )
    return {**windowed(batch, window), "num_decodes": 4}


def to_device(batch, device):
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def run(batch, backend, **changes):
    return ops.paged_attention(**{**batch, **changes}, backend=backend)


def check_attention(batch, backend):
    """The backend agrees with the reference, and writes every row of out and none of its inputs."""
    before = {k: v.clone() for k, v in batch.items() if isinstance(v, torch.Tensor)}
    out = torch.full_like(batch["query"], 7.0)
    result = run(batch, backend, out=out)
    assert result.data_ptr() == out.data_ptr()
    expected = run(batch, "reference")
    assert not expected.isnan().any()
    torch.testing.assert_close(result, expected, **TOLERANCE[batch["query"].dtype])
    for name, tensor in before.items():
        torch.testing.assert_close(batch[name], tensor, rtol=0, atol=0, equal_nan=True)


def check_write(page, dim, heads, dtype, backend, tokens=13, device="cpu"):
    """Written slots hold exactly what was given, every other slot exactly what it held, slot -1 nothing."""
    rng = torch.Generator().manual_seed(page + dim)
    blocks = -(-tokens // page) + 4
    k_cache, v_cache = (c.to(device) for c in make_caches(blocks, heads, page, dim, dtype, fill=7.0))
    fused = torch.randn(tokens, 5 * heads * dim, generator=rng).to(dtype).to(device)
    key = fused[:, 3 * heads * dim : 4 * heads * dim].view(tokens, heads, dim)
    value = fused[:, 4 * heads * dim :].view(tokens, heads, dim)
    slots = torch.randperm(blocks * page, generator=rng)[:tokens]
    slots[[0, tokens // 2]] = -1
    expected = [k_cache.clone(), v_cache.clone()]
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0][slot // page, :, slot % page] = key[i]
            expected[1][slot // page, :, slot % page] = value[i]
    ops.write_kv(key, value, k_cache, v_cache, slots.to(device), backend=backend)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def check_far_block(dtype, backend, page=16, dim=64, device="cpu"):
    """A block past element 2**31 of its cache is written, read and copied where it is.

    On a CPU the memory is virtual: only the touched pages of it are ever backed.
    """
    block_elements = 2**30 + page * dim
    storage = torch.empty(2 * block_elements + page * dim, dtype=dtype, device=device)
    cache = storage.as_strided((3, 1, page, dim), (block_elements, page * dim, dim, 1))
    last = storage[-page * dim :].view(page, dim)
    key = torch.randn(page, 1, dim).to(dtype).to(device)
    slots = (torch.arange(page) + 2 * page).to(device)
    ops.write_kv(key, key, cache, cache, slots, backend=backend)
    assert torch.equal(last, key[:, 0])
    ints = {"dtype": torch.int32}
    batch = {
        "query": torch.randn(1 + 2 * page, 2, dim).to(dtype), "k_cache": cache, "v_cache": cache,
        "block_tables": torch.full((3, 1), 2, **ints), "seq_lens": torch.full((3,), page, **ints),
        "query_start_loc": torch.tensor([0, 1, 9, 9 + page], **ints), "scale": dim**-0.5,
        "num_decodes": 1, "num_short": 2, "max_query_len": page, "max_seq_len": page,
    }  # fmt: skip
    query, k_cache = to_device({k: v for k, v in batch.items() if k != "k_cache" and k != "v_cache"}, device), cache
    batch = {**query, "k_cache": k_cache, "v_cache": k_cache}
    out = run(batch, backend)
    near = cache[2:].clone()
    expected = run({**batch, "k_cache": near, "v_cache": near, "block_tables": batch["block_tables"] - 2}, "reference")
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])
    check_far_write(cache, last, key, slots, backend)


def check_far_write(cache, last, key, slots, backend):
    """RoPE with a write, and copies both ways, at the far block."""
    ones = torch.ones(len(key), key.shape[2] // 2, dtype=key.dtype, device=key.device)
    ops.rope_write_kv(-key, -key, -key, ones, ones * 0, cache, cache, slots, backend=backend)
    assert torch.equal(last, -key[:, 0])
    near = torch.zeros(1, 1, *cache.shape[1:], dtype=cache.dtype, device=cache.device)
    pairs = torch.tensor([[2, 0]], device=cache.device)
    ops.copy_blocks(cache[None], near, pairs, backend=backend)
    assert torch.equal(near[0, 0, 0], last)
    ops.copy_blocks(near * 2, cache[None], pairs.flip(1).contiguous(), backend=backend)
    assert torch.equal(last, -2 * key[:, 0])


def check_empty(dtype, backend):
    """No sequences, no query rows, no tokens to write: nothing happens, and what rows there are become zeros."""
    sizes = {"heads": 1, "group": 3, "dim": 64, "page": 16, "dtype": dtype}
    nothing = make_batch([], [], **sizes)
    assert run(nothing, backend).shape == (0, 3, 64)
    assert not run(make_batch([], [], padding=3, **sizes), backend).any()
    check_attention(make_batch([0, 0], [0, 0], padding=2, **sizes), backend)
    assert run(make_batch([5, 0], [0, 0], **sizes), backend).shape == (0, 3, 64)
    padded = make_batch([3, 0], [1, 1], padding=2, **sizes)
    check_attention({**padded, "num_decodes": 2}, backend)
    k_cache, v_cache = make_caches(1, 1, 16, 64, dtype, fill=7.0)
    none = torch.empty(0, 1, 64, dtype=dtype)
    ops.write_kv(none, none, k_cache, v_cache, torch.empty(0, dtype=torch.int64), backend=backend)
    assert (k_cache == 7).all()
