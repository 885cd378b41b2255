"""The Triton-lang kernels, interpreted on CPU tensors, against the reference. Needs TRITON_INTERPRET=1.

float32 and float16 only: the interpreter gets bfloat16 wrong (see `test_gpu.py`).
"""

import pytest
import torch
from kernel_cases import (
    GRID,
    TOLERANCE,
    check_attention,
    check_empty,
    check_far_block,
    check_write,
    long_batch,
    long_window_batch,
    make_batch,
    mixed_batch,
    run,
    window_batch,
    window_sizes,
)
from option_cases import OPTION_GRID, option_batch, short_batch, with_options

from paged_kernels.arguments import Options
from paged_kernels.decode_attention import decode_attention
from paged_kernels.split_rule import choose_splits

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])


@pytest.mark.parametrize(("page", "dim", "group"), GRID)
def test_mixed_batch(page, dim, group):
    """Every size with both types, in turns: twice the whole grid would take twice as long."""
    index = GRID.index((page, dim, group))
    dtype = (torch.float32, torch.float16)[(index + index // 4) % 2]
    check_attention(mixed_batch(page, dim, group, dtype), "triton")


@DTYPES
@pytest.mark.parametrize(("page", "dim", "heads"), [(8, 64, 1), (16, 80, 3), (32, 128, 8), (24, 96, 5)])
def test_write(page, dim, heads, dtype):
    check_write(page, dim, heads, dtype, "triton")


@DTYPES
def test_long_contexts_are_split(dtype):
    batch = long_batch(16, 64, 3, dtype)
    assert choose_splits(4, 1, batch["max_seq_len"], multiprocessors=4) > 1
    check_attention(batch, "triton")


@pytest.mark.parametrize(("page", "dim", "group"), [(64, 112, 5), (128, 64, 2), (24, 96, 16), (16, 16, 17)])
def test_unusual_sizes(page, dim, group):
    """Pages that are a tile, a multiple of one and no power of two; head sizes and groups of every kind."""
    check_attention(mixed_batch(page, dim, group, torch.float32), "triton")


@pytest.mark.parametrize("splits", [1, 2, 5, 64])
def test_splits_agree(splits):
    """Any number of splits gives the reference's result, also more splits than there are tiles; a sink counts once."""
    for page, options in ((16, {}), (64, {"sinks": True}))[: 2 if splits < 64 else 1]:
        batch = make_batch([300, 1, 0, 65, 64], [1] * 5, heads=2, group=3, dim=64, page=page, dtype=torch.float32)
        check_splits({**with_options(batch, **options), "num_decodes": 5}, splits)


@pytest.mark.parametrize("splits", [1, 3])
def test_splits_of_short_queries_agree(splits):
    check_splits(short_batch(16, 64, 3, torch.float32, lens=(200, 130, 9, 0, 64)), splits)
    options = {"window": 100, "cache": (torch.int8, "token"), "alibi": True}
    check_splits(short_batch(32, 32, 10, torch.float32, options, lens=(200, 130, 9, 0, 64)), splits)


def check_splits(batch, splits):
    single = batch["num_decodes"] > 0
    names = ("query", "k_cache", "v_cache", "block_tables", "seq_lens")
    out = torch.full_like(batch["query"], 7.0)
    expected = run(batch, "reference")
    chosen = {name: batch.get(name) for name in Options.__slots__}
    decode_attention(
        *(batch[n] for n in names), None if single else batch["query_start_loc"], scale=batch["scale"],
        max_query_len=1 if single else batch["max_query_len"], max_seq_len=batch["max_seq_len"], splits=splits,
        options=Options(**chosen), capability=80, out=out,
    )  # fmt: skip
    rows = int(batch["query_start_loc"][-1])
    torch.testing.assert_close(out[:rows], expected[:rows], **TOLERANCE[torch.float32])
    assert (out[rows:] == 7).all()  # rows of no sequence are the caller's


@pytest.mark.parametrize("index", range(len(OPTION_GRID)))
def test_options(index):
    page, dim, group, options = OPTION_GRID[index]
    check_attention(option_batch(page, dim, group, (torch.float32, torch.float16)[index % 2], options), "triton")


def test_short_queries_alone():
    """A batch of short queries is split over its contexts without being told so."""
    check_attention(short_batch(16, 64, 3, torch.float32), "triton")
    check_attention(short_batch(64, 80, 8, torch.float16, {"sinks": True}, lens=(600, 300, 8, 0, 1)), "triton")


def test_options_without_the_kernel_are_seen():
    """The cases above can fail: each option changes the result."""
    for name, value in (("window", 3), ("soft_cap", 0.5), ("alibi", True), ("sinks", True)):
        plain = option_batch(8, 16, 2, torch.float32, {})
        assert (run(with_options(plain, **{name: value}), "triton") - run(plain, "triton")).abs().max() > 0.01


def test_long_chunks_cross_tiles():
    """Chunks of several query tiles, with and without history, and a group that leaves spare rows."""
    batch = make_batch(
        [150, 333, 90], [150, 100, 90], heads=1, group=3, dim=64, page=16, dtype=torch.float32, padding=70
    )
    check_attention(batch, "triton")


@pytest.mark.parametrize("window", window_sizes(16))
def test_windows(window):
    check_attention(window_batch(16, 64, 3, torch.float32, window), "triton")


def test_windows_of_other_sizes_float32():
    """Pages that are a tile, heads and groups that are no power of two; half precision."""
    check_attention(window_batch(64, 16, 5, torch.float32, 65), "triton")
    check_attention(window_batch(24, 80, 1, torch.float32, 30), "triton")
    check_attention(window_batch(8, 64, 8, torch.float16, 9), "triton")


@pytest.mark.parametrize("window", [5, 600, 1025])
def test_windows_on_long_contexts(window):
    """Windows of one split and of several, and chunks whose tiles are masked at both ends and whole between."""
    check_attention(long_window_batch(64, torch.float32, window), "triton")


@DTYPES
def test_empty(dtype):
    check_empty(dtype, "triton")


def test_block_past_2_to_31_elements():
    check_far_block(torch.float16, "triton")
