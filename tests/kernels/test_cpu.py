"""The numba kernels against the reference, and what they promise beyond it."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kernel_cases import (
    GRID,
    check_attention,
    check_empty,
    check_far_block,
    check_write,
    long_batch,
    make_batch,
    mixed_batch,
    run,
)

from paged_kernels.cpu import decode, micro, prefill

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SIZES = {"heads": 2, "group": 3, "dim": 64, "page": 16}


@DTYPES
@pytest.mark.parametrize(("page", "dim", "group"), GRID)
def test_mixed_batch(page, dim, group, dtype):
    check_attention(mixed_batch(page, dim, group, dtype), "cpu")


@DTYPES
@pytest.mark.parametrize("tokens", [13, 3000])
@pytest.mark.parametrize(("page", "dim", "heads"), [(8, 64, 1), (16, 80, 3), (32, 128, 8)])
def test_write(page, dim, heads, tokens, dtype):
    check_write(page, dim, heads, dtype, "cpu", tokens=tokens)


@DTYPES
def test_long_contexts(dtype):
    check_attention(long_batch(16, 64, 3, dtype), "cpu")


@DTYPES
def test_unusual_sizes(dtype):
    check_attention(mixed_batch(24, 20, 5, dtype), "cpu")


@DTYPES
def test_heads_in_several_items(dtype):
    batch = make_batch([300, 1, 129], [1, 1, 1], heads=7, group=1, dim=128, page=16, dtype=dtype)
    batch["num_decodes"] = 3
    check_attention(batch, "cpu")


@pytest.mark.parametrize("features", [(), ("avx512f",)])
@DTYPES
def test_with_fewer_instructions(dtype, features, monkeypatch):
    """What machines without AVX512-BF16, or without AVX-512, use."""
    monkeypatch.setattr(micro, "_may_use", lambda feature: feature in features)
    monkeypatch.setattr(decode, "build_decode", decode.build_decode.__wrapped__)
    monkeypatch.setattr(prefill, "build_prefill", prefill.build_prefill.__wrapped__)
    check_attention(mixed_batch(16, 80, 3, dtype), "cpu")


@DTYPES
def test_empty(dtype):
    check_empty(dtype, "cpu")


def test_block_past_2_to_31_elements():
    check_far_block(torch.bfloat16, "cpu")


def rows_of(batch, index):
    begin, end = batch["query_start_loc"][index : index + 2].tolist()
    return slice(begin, end)


def alone(batch, index):
    """One sequence of a batch as a batch of its own."""
    rows = rows_of(batch, index)
    length, count = int(batch["seq_lens"][index]), rows.stop - rows.start
    return {
        **batch, "query": batch["query"][rows], "block_tables": batch["block_tables"][index : index + 1],
        "seq_lens": batch["seq_lens"][index : index + 1],
        "query_start_loc": torch.tensor([0, count], dtype=torch.int32),
        "num_decodes": int(index < batch["num_decodes"]), "max_query_len": count, "max_seq_len": length,
    }  # fmt: skip


@DTYPES
def test_bits_do_not_depend_on_the_batch_or_the_threads(dtype):
    batch = make_batch([1200, 40, 700, 90], [1, 1, 1, 90], **SIZES, dtype=dtype)
    batch["num_decodes"] = 3
    together = run(batch, "cpu")
    for index in range(4):
        assert torch.equal(run(alone(batch, index), "cpu"), together[rows_of(batch, index)])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(run(batch, "cpu"), together)
    finally:
        torch.set_num_threads(threads)


def test_chunked_prefill_has_the_same_bits():
    whole = make_batch([90], [90], **SIZES, dtype=torch.float32)
    out = run(whole, "cpu")
    for begin, end in ((0, 7), (7, 48), (48, 90)):
        part = {**whole, "query": whole["query"][begin:end], "max_query_len": end - begin, "max_seq_len": end}
        part["seq_lens"] = torch.tensor([end], dtype=torch.int32)
        part["query_start_loc"] = torch.tensor([0, end - begin], dtype=torch.int32)
        assert torch.equal(run(part, "cpu"), out[begin:end])


def test_nan_in_a_written_slot_reaches_only_who_attends_to_it():
    batch = make_batch([40, 40, 33], [1, 1, 33], **SIZES, dtype=torch.float32)
    batch["num_decodes"] = 2
    batch["k_cache"][batch["block_tables"][1, 0], 0, 3] = float("nan")
    batch["k_cache"][batch["block_tables"][2, 1], 0, 4] = float("nan")  # position 20
    out = run(batch, "cpu")
    assert not out[0].isnan().any()
    assert out[1, :3].isnan().all()
    assert not out[1, 3:].isnan().any()
    assert not out[2 : 2 + 20].isnan().any()
    assert out[2 + 20 :, :3].isnan().all()


def test_bfloat16_stores_round_to_nearest_even():
    """A context of one token returns its value through float32, exactly; sums of two round to even."""
    value = torch.tensor([1.0, 1.0 + 2**-7], dtype=torch.bfloat16)
    batch = make_batch([2], [1], heads=1, group=1, dim=64, page=16, dtype=torch.bfloat16)
    batch["num_decodes"] = 1
    block = batch["block_tables"][0, 0]
    batch["k_cache"][block, :, :2] = 0
    batch["v_cache"][block, :, :2] = value[:, None]
    assert (run(batch, "cpu") == 1.0).all()  # halfway between the two: the even mantissa
    batch["v_cache"][block, :, 0] = value[1] + 2**-7
    assert (run(batch, "cpu") == 1.0 + 2**-6).all()


def test_concurrent_calls():
    batch = long_batch(16, 64, 3, torch.float32)
    expected = run(batch, "cpu")
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: run(batch, "cpu"), range(16)):
            assert torch.equal(result, expected)


def test_large_scores_do_not_overflow():
    batch = make_batch([50, 50], [1, 50], **SIZES, dtype=torch.float32)
    batch = {**batch, "num_decodes": 1, "scale": 300.0}
    # Scores near 1e4 carry an error of 1e-3 in float32, whoever computes them.
    torch.testing.assert_close(run(batch, "cpu"), run(batch, "reference"), atol=1e-2, rtol=0)


CHILD = """
import sys
import torch
from paged_kernels import ops
from paged_kernels.cpu import decode, kv_write, prefill
sizes = dict(num_q_heads=2, num_kv_heads=1, head_dim=16, block_size=16, dtype=torch.bfloat16)
ops.warmup(**sizes, backend="cpu")
kernels = [decode.build_decode(16, 2, decode.element_type(torch.bfloat16)),
           prefill.build_prefill(16, decode.element_type(torch.bfloat16)),
           kv_write._build(16, decode.element_type(torch.bfloat16))]
print([k.cache_hits for k in kernels])
"""


def test_compiled_kernels_are_kept_on_disk(tmp_path):
    """A second process compiles nothing."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root / "kernels")}
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(done.stdout.strip())
    assert outputs == ["[0, 0, 0]", "[1, 1, 1]"]
