"""Rows, batch layout and memory sums, without a model."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import pytest
import torch

from paged_backend.config import EngineConfig, ModelShape, kv_block_bytes
from paged_backend.errors import ConfigError
from paged_backend.sampling_params import SamplingParams
from paged_backend.sched.output import NewSequence, ScheduledSequence
from paged_backend.token_rules import TokenRules
from paged_backend.worker.device import resolve_dtype
from paged_backend.worker.input_batch import InputBatch
from paged_backend.worker.kv_cache import allocate_kv_cache, available_memory, cpu_budget, cuda_budget, fit_num_blocks
from paged_backend.worker.model_runner import build_batch

GREEDY = SamplingParams(temperature=0.0)
SHAPE = ModelShape(num_layers=2, num_kv_heads=2, head_dim=16, vocab_size=160, max_position=256)
MIB = 2**20


def _add(rows: InputBatch, seq_id: int, tokens: int, blocks: list[int], params=GREEDY, seed=0) -> None:
    rows.add(NewSequence(seq_id, list(range(seq_id * 100, seq_id * 100 + tokens)), tokens, blocks, params, seed))


def test_batch_layout():
    """Single-token rows first, in scheduling order; a prefill chunk of one token is one of them."""
    rows = InputBatch(4)
    _add(rows, 1, 6, [9, 3])
    _add(rows, 2, 5, [7, 8])
    _add(rows, 3, 9, [4, 2, 6])
    scheduled = [
        ScheduledSequence(1, 1, 3, ()),
        ScheduledSequence(2, 4, 1, (2,)),
        ScheduledSequence(3, 7, 1, ()),
    ]
    batch = build_batch(scheduled, rows, 4)
    assert batch.rows.tolist() == [rows.row(2), rows.row(3), rows.row(1)]
    assert batch.num_decodes == 2
    assert batch.max_query_len == 3
    assert (batch.sampled_ids, batch.sampled_from.tolist()) == ([2], [0])
    assert batch.sampled_rows.tolist() == [rows.row(2)]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 5]
    assert batch.positions.tolist() == [4, 7, 1, 2, 3]
    assert batch.input_ids.tolist() == [204, 307, 101, 102, 103]
    assert batch.slot_mapping.tolist() == [8 * 4, 2 * 4 + 3, 9 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3]
    assert batch.seq_lens.tolist() == [5, 8, 4]


def test_plain_decode_samples_each_row_once():
    """As many samples as rows do not do: both may come from the logits of one."""
    rows = InputBatch(4)
    for seq_id in (1, 2):
        rows.add(NewSequence(seq_id, [5], 1, [seq_id], GREEDY, 0))
    _add(rows, 3, 4, [3])
    both, each = (
        ScheduledSequence(1, 0, 1, (1, 2)),
        [ScheduledSequence(1, 0, 1, (1,)), ScheduledSequence(3, 3, 1, (3,))],
    )
    batch = build_batch([both, ScheduledSequence(3, 1, 1, ())], rows, 4)
    assert (batch.sampled_from.tolist(), batch.is_plain_decode) == ([0, 0], False)
    assert build_batch(each, rows, 4).is_plain_decode


def test_rows_are_recycled_clean():
    rows = InputBatch(2)
    _add(rows, 1, 3, [5, 6, 7])
    _add(rows, 2, 3, [8])
    first = rows.row(1)
    rows.remove(1)
    _add(rows, 3, 2, [4])
    assert rows.row(3) == first
    assert len(rows) == 2
    assert rows.block_tables[first].tolist()[:4] == [4, 0, 0, 0]
    assert rows.num_tokens[first] == 2


def test_growth_keeps_every_row():
    rows = InputBatch(3)
    _add(rows, 1, 4, [1])
    _add(rows, 2, 3000, list(range(2, 400)))
    assert rows.token_ids[rows.row(1), :4].tolist() == [100, 101, 102, 103]
    assert rows.block_tables[rows.row(1), :2].tolist() == [1, 0]
    assert rows.block_tables[rows.row(2), :398].tolist() == list(range(2, 400))
    assert rows.token_ids.shape == (3, 4096)
    row = np.array([rows.row(2)])
    for token in range(1200):
        rows.append_tokens(row, np.array([token]))
    assert rows.num_tokens[row] == 4200
    assert rows.token_ids[row[0], 2998:3002].tolist() == [3198, 3199, 0, 1]


def test_sampling_rows():
    rows = InputBatch(2)
    _add(rows, 1, 4, [1], SamplingParams(temperature=0.5, top_k=2**70, top_p=0.25, min_p=0.125), seed=-1)
    _add(rows, 2, 3, [2])
    batch = rows.sampling(np.array([rows.row(2), rows.row(1)]))
    assert batch.greedy.tolist() == [True, False]
    assert batch.positions.tolist() == [3, 4]
    assert batch.seeds.tolist() == [0, 2**64 - 1]
    assert (batch.temperature[1], batch.top_p[1], batch.min_p[1]) == (0.5, 0.25, 0.125)
    assert batch.top_k[1] >= 2**60


# ---- memory --------------------------------------------------------------------------------------------------------


def _config(**options) -> EngineConfig:
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, **options)
    return config.resolve(SHAPE, device="cpu", dtype="float32", num_kv_blocks=1, block_size=16)


def test_cache_layout_is_the_block_formula():
    cache = allocate_kv_cache(SHAPE, 5, 8, torch.bfloat16, torch.device("cpu"))
    assert cache.shape == (2, 2, 6, 2, 8, 16)
    assert cache.numel() * cache.element_size() == 6 * kv_block_bytes(SHAPE, 8, "bfloat16")
    assert cache[0, 0, 3, 1].is_contiguous()  # a tile


def _is_there(block: torch.Tensor) -> bool:
    """Whether the page of a tensor's first element has been taken from the system."""
    page, state, libc = mmap.PAGESIZE, (ctypes.c_ubyte * 1)(), ctypes.CDLL(None, use_errno=True)
    address = block.data_ptr() // page * page
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(page), state) == 0
    return bool(state[0] & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="mincore as Linux has it")
@pytest.mark.parametrize("populate", [False, True])
def test_the_first_request_waits_for_no_memory(populate):
    """The first blocks of every layer are there already, the rest of a large cache only if asked for."""
    cache = allocate_kv_cache(SHAPE, 1 << 14, 16, torch.float32, torch.device("cpu"), populate)
    places = [(layer, part) for layer in range(SHAPE.num_layers) for part in range(2)]
    assert all(_is_there(cache[place][1]) for place in places)
    assert {_is_there(cache[place][-2048]) for place in places} == {populate}


def test_impossible_allocation():
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        allocate_kv_cache(SHAPE, 2**50, 8, torch.float32, torch.device("cpu"))


def test_fitting_blocks():
    config = _config()
    block = kv_block_bytes(SHAPE, 16, "float32")
    assert fit_num_blocks(config, SHAPE, 10 * block, "x") == 9  # one is the null block
    assert fit_num_blocks(config, SHAPE, 2**40, "x") == 8 * 16  # all that 8 sequences of 256 tokens can use
    with pytest.raises(ConfigError, match=r"from somewhere by 0\.0 MiB"):
        fit_num_blocks(config, SHAPE, 2 * block - 1, "somewhere")


def test_cpu_budget():
    assert cpu_budget(_config(), 100 << 30)[0] == 4 << 30
    assert cpu_budget(_config(), 8 << 30)[0] == 2 << 30
    assert cpu_budget(_config(kv_cache_memory_bytes=7 * MIB), 8 * MIB)[0] == 7 * MIB
    with pytest.raises(ConfigError, match=r"of 6\.0 MiB by 1\.0 MiB"):
        cpu_budget(_config(kv_cache_memory_bytes=7 * MIB), 6 * MIB)


def test_cuda_budget():
    sizes = {"total": 100 * MIB, "used": 40 * MIB, "peak": 20 * MIB}
    assert cuda_budget(_config(), **sizes)[0] == 30 * MIB
    assert cuda_budget(_config(kv_cache_memory_bytes=35 * MIB), **sizes)[0] == 35 * MIB
    with pytest.raises(ConfigError, match=r"10\.0 MiB too little"):
        cuda_budget(_config(gpu_memory_utilization=0.5), **sizes)
    with pytest.raises(ConfigError, match=r"of 40\.0 MiB by 5\.0 MiB"):
        cuda_budget(_config(kv_cache_memory_bytes=45 * MIB), **sizes)


def test_available_memory_is_plausible():
    assert 2**24 < available_memory() < 2**50


def test_explicit_type_wins():
    assert resolve_dtype("float32", torch.device("cpu")) == "float32"
    assert resolve_dtype("auto", torch.device("cpu")) in ("float32", "bfloat16")


def test_rows_without_rules_pay_nothing():
    """No rules, no constraints; and of a batch in which one row has some, the others are not in them."""
    rows = InputBatch(4)
    for seq_id in (1, 2, 3):
        _add(rows, seq_id, 3, [seq_id])
    every = np.array([rows.row(seq_id) for seq_id in (1, 2, 3)])
    assert rows.constraints(every, [1, 2, 3], {}, 160) is None
    ruled = NewSequence(4, [5, 6], 2, [4], GREEDY, 0, rules=TokenRules(bad_words=((7,),)), num_prompt_logprobs=1)
    rows.add(ruled)
    assert rows.constraints(every, [1, 2, 3], {}, 160) is None
    found = rows.constraints(np.append(every, rows.row(4)), [1, 2, 3, 4], {2: bytes([255] * 20)}, 160)
    assert (found.masked_rows.tolist(), found.banned_rows.tolist(), found.biased_rows.tolist()) == ([1], [3], [])
    assert rows.num_prompt_reporting == 1
    rows.remove(4)
    assert rows.num_prompt_reporting == 0
    assert rows.constraints(every, [1, 2, 3], {}, 160) is None
