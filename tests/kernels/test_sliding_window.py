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

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def attend_by_definition(batch):
    """Row by row and token by token, in float64: position p sees max(0, p - window + 1) .. p."""
    query, page = batch["query"].double(), batch["k_cache"].shape[2]
    group = query.shape[1] // batch["k_cache"].shape[1]
    out = torch.zeros_like(query)
    starts = batch["query_start_loc"].tolist()
    for i, length in enumerate(batch["seq_lens"].tolist()):
        table = batch["block_tables"][i].tolist()
        for row in range(starts[i], starts[i + 1] if length else starts[i]):
            p = length - starts[i + 1] + row
            seen = range(max(0, p - batch["window"] + 1), p + 1)
            for head in range(query.shape[1]):
                keys, values = (
                    torch.stack([c[table[t // page], head // group, t % page].double() for t in seen])
                    for c in (batch["k_cache"], batch["v_cache"])
                )
                out[row, head] = (keys @ query[row, head] * batch["scale"]).softmax(0) @ values
    return out


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
