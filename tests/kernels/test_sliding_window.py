"""Sliding windows: the reference against the definition, the numba kernels against the reference."""

import pytest
import torch
from kernel_cases import (
    GRID,
    check_attention,
    long_window_batch,
    make_batch,
    run,
    window_batch,
    window_sizes,
    windowed,
)
from option_cases import attend_by_definition

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.mark.parametrize("window", window_sizes(8))
def test_reference_is_the_definition(window):
    batch = window_batch(8, 16, 2, torch.float32, window)
    torch.testing.assert_close(run(batch, "reference").double(), attend_by_definition(batch), atol=2e-6, rtol=2e-5)


@DTYPES
@pytest.mark.parametrize(("page", "dim", "group"), GRID[::3])
def test_numba(page, dim, group, dtype):
    for window in window_sizes(page):
        check_attention(window_batch(page, dim, group, dtype, window), "cpu")


@DTYPES
@pytest.mark.parametrize("window", [5, 64, 512, 513, 700, 1024, 1499])
def test_numba_on_long_contexts(window, dtype):
    check_attention(long_window_batch(16, dtype, window), "cpu")


@pytest.mark.parametrize("window", [1, 20, 64, 90])
def test_chunked_prefill_has_the_same_bits(window):
    sizes = {"heads": 2, "group": 3, "dim": 64, "page": 16, "dtype": torch.float32}
    whole = windowed(make_batch([200], [200], **sizes), window)
    out = run(whole, "cpu")
    for begin, end in ((0, 7), (7, 48), (48, 131), (131, 200)):
        part = {**whole, "query": whole["query"][begin:end], "max_query_len": end - begin, "max_seq_len": end}
        part["seq_lens"] = torch.tensor([end], dtype=torch.int32)
        part["query_start_loc"] = torch.tensor([0, end - begin], dtype=torch.int32)
        assert torch.equal(run(part, "cpu"), out[begin:end])


def test_the_window_is_named_when_it_is_wrong():
    with pytest.raises(ValueError, match=r"^window: must be at least 1"):
        run(window_batch(8, 16, 2, torch.float32, 1), "reference", window=0)
