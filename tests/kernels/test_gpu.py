"""The Triton-lang kernels on a CUDA GPU, against the reference on the same GPU."""

import pytest
import torch
from kernel_cases import (
    GRID,
    check_attention,
    check_write,
    long_batch,
    long_window_batch,
    mixed_batch,
    to_device,
    window_batch,
    window_sizes,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@DTYPES
@pytest.mark.parametrize(("page", "dim", "group"), GRID)
def test_mixed_batch(page, dim, group, dtype):
    check_attention(to_device(mixed_batch(page, dim, group, dtype), "cuda"), "triton")


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
