"""The Triton-lang kernels on a CUDA GPU, against the reference on the same GPU: the interpreted grid, and bfloat16."""

import pytest
import torch
from kernel_cases import (
    GRID,
    check_attention,
    check_far_block,
    check_write,
    long_batch,
    long_window_batch,
    mixed_batch,
    to_device,
    window_batch,
    window_sizes,
)
from operation_cases import check_operation, operation_grid
from option_cases import E4M3, OPTION_GRID, option_batch, short_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ALL = [torch.bfloat16, torch.float16, torch.float32]
DTYPES = pytest.mark.parametrize("dtype", ALL, ids=str)


@DTYPES
@pytest.mark.parametrize(("page", "dim", "group"), GRID)
def test_mixed_batch(page, dim, group, dtype):
    check_attention(to_device(mixed_batch(page, dim, group, dtype), "cuda"), "triton")


@DTYPES
@pytest.mark.parametrize(("page", "dim", "group", "options"), OPTION_GRID, ids=str)
def test_options(page, dim, group, options, dtype):
    if options.get("cache", (None,))[0] == E4M3 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3 on this GPU")
    check_attention(to_device(option_batch(page, dim, group, dtype, options), "cuda"), "triton")


@DTYPES
@pytest.mark.parametrize("page", [16, 64])
def test_short_queries(page, dtype):
    lens = (20_000, 700, 9, 0, 9000)
    check_attention(to_device(short_batch(page, 128, 4, dtype, lens=lens), "cuda"), "triton")


@DTYPES
@pytest.mark.parametrize("page", [16, 64])
def test_long_contexts(page, dtype):
    check_attention(to_device(long_batch(page, 128, 4, dtype, length=20_000), "cuda"), "triton")


@DTYPES
@pytest.mark.parametrize("page", [16, 64])
def test_windows(page, dtype):
    for window in window_sizes(page):
        check_attention(to_device(window_batch(page, 128, 3, dtype, window), "cuda"), "triton")
    for window in (5, 600, 1025):
        check_attention(to_device(long_window_batch(page, dtype, window), "cuda"), "triton")


@DTYPES
@pytest.mark.parametrize(("page", "dim", "heads"), [(8, 64, 1), (16, 80, 3), (32, 128, 8)])
def test_write(page, dim, heads, dtype):
    check_write(page, dim, heads, dtype, "triton", device="cuda")


@pytest.mark.parametrize(("name", "dtype"), operation_grid(*ALL), ids=str)
def test_operation(name, dtype):
    check_operation(name, dtype, "cuda", "triton")


def test_block_past_2_to_31_elements():
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB of free GPU memory")
    check_far_block(torch.bfloat16, "triton", device="cuda")
