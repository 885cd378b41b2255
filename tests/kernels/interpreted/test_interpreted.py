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

from paged_kernels.arguments import Options
from paged_kernels.decode_attention import decode_attention
from paged_kernels.split_rule import choose_splits

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])


@DTYPES
@pytest.mark.parametrize(("page", "dim", "group"), GRID)
def test_mixed_batch(page, dim, group, dtype):
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


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("splits", [1, 2, 5, 64])
def test_splits_agree(page, splits):
    """Any number of splits gives the reference's result, also more splits than there are tiles."""
    batch = make_batch([300, 1, 0, 65, 64], [1] * 5, heads=2, group=3, dim=64, page=page, dtype=torch.float32)
    batch["num_decodes"] = 5
    out = torch.full_like(batch["query"], 7.0)
    names = ("query", "k_cache", "v_cache", "block_tables", "seq_lens")
    decode_attention(
        *(batch[n] for n in names),
        None,
        scale=batch["scale"],
        max_query_len=1,
        max_seq_len=300,
        splits=splits,
        options=Options(),
        capability=80,
        out=out,
    )
    torch.testing.assert_close(out, run(batch, "reference"), **TOLERANCE[torch.float32])


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
