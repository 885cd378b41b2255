"""The worker on tiny models: greedy tokens equal transformers' however the work is cut up; sampling likewise."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers
from helpers import GREEDY, TINY_MODELS, drive, oracle_greedy

from paged_backend.config import EngineConfig
from paged_backend.errors import ConfigError, PagedBackendError
from paged_backend.sampling_params import SamplingParams
from paged_backend.sched.output import SchedulerOutput
from paged_backend.worker.worker import Worker

# One token, just under, at and over a block, and several blocks.
PROMPTS = [[5 + (i * 31 + j * j * 17 + j) % 150 for j in range(n)] for i, n in enumerate((1, 7, 8, 9, 33, 100))]
COUNT = 20


def _worker(path, backend="cpu", **options) -> Worker:
    options = {"num_kv_blocks": 128, "block_size": 8, "num_threads": 1, "dtype": "float32", **options}
    return Worker(EngineConfig(model=str(path), device="cpu", attention_backend=backend, **options))


@pytest.fixture(scope="module")
def expected(tiny_model):
    """transformers' greedy tokens after each prompt, per model."""
    known: dict[str, list[list[int]]] = {}

    def get(name: str) -> list[list[int]]:
        if name not in known:
            oracle = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32)
            known[name] = [oracle_greedy(oracle, prompt, COUNT) for prompt in PROMPTS]
        return known[name]

    return get


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_greedy_equals_transformers(tiny_model, expected, name, backend):
    worker = _worker(tiny_model(name), backend)
    assert drive(worker, PROMPTS, COUNT) == expected(name)
    # Chunked, with decodes and chunks of one token mixed in, joining at different steps; rows are recycled.
    assert drive(worker, PROMPTS, COUNT, budget=10, join_every=3, first_seq_id=100) == expected(name)


def test_alone_equals_batched(tiny_llama, expected):
    worker = _worker(tiny_llama, max_num_seqs=1)
    alone = [drive(worker, [prompt], COUNT, first_seq_id=i)[0] for i, prompt in enumerate(PROMPTS)]
    assert alone == expected("llama")


def test_seeded_sampling_does_not_depend_on_scheduling(tiny_llama):
    params = [
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=1.3, top_p=0.9),
        SamplingParams(temperature=0.8, top_k=9),
        GREEDY,
        SamplingParams(temperature=1.1, min_p=0.05, top_k=40, top_p=0.95, frequency_penalty=1.0),
        SamplingParams(temperature=2.0, repetition_penalty=1.1),
    ]
    seeds = [2**64 - 1, -(2**63), 0, 1, 77, 78]
    worker = _worker(tiny_llama)
    together = drive(worker, PROMPTS, COUNT, params=params, seeds=seeds)
    chunked = drive(worker, PROMPTS, COUNT, params=params, seeds=seeds, budget=7, join_every=2, first_seq_id=50)
    assert chunked == together
    other = drive(worker, PROMPTS, COUNT, params=params, seeds=[s + 1 for s in range(6)], first_seq_id=90)
    assert [a == b for a, b in zip(together, other, strict=True)] == [False, False, False, True, False, False]


def test_resumed_sequence_continues_as_if_never_preempted(tiny_llama):
    """A preempted sequence returns as a new row with all its tokens; they were sampled and count as such."""
    params = SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.2)
    worker = _worker(tiny_llama)
    whole = drive(worker, [PROMPTS[4]], COUNT, params=[params], seeds=[9])[0]
    first = drive(worker, [PROMPTS[4]], 8, params=[params], seeds=[9], first_seq_id=2)[0]
    resumed = drive(worker, [PROMPTS[4]], COUNT, params=[params], seeds=[9], generated=[first], first_seq_id=3)[0]
    assert resumed == whole
    assert resumed[:8] == first
    as_prompt = drive(worker, [PROMPTS[4] + first], COUNT - 8, params=[params], seeds=[9], first_seq_id=4)[0]
    assert as_prompt != whole[8:]


@pytest.mark.parametrize("penalty", [0.8, 1.5])
def test_repetition_penalty_equals_transformers(tiny_llama, penalty):
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    params = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    expected = [oracle_greedy(oracle, prompt, COUNT, repetition_penalty=penalty) for prompt in PROMPTS]
    worker = _worker(tiny_llama)
    assert drive(worker, PROMPTS, COUNT, params=[params] * len(PROMPTS)) == expected
    chunked = drive(worker, PROMPTS, COUNT, params=[params] * len(PROMPTS), budget=9, join_every=2, first_seq_id=50)
    assert chunked == expected


def test_long_sequences_widen_the_rows(tmp_path):
    """Past the first 1024 token columns and 64 block columns, with a neighbour whose row must survive."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
    )
    torch.manual_seed(1)
    oracle = transformers.LlamaForCausalLM(config)
    oracle.save_pretrained(tmp_path)
    prompts = [[7, 8, 9], [j * j % 61 + 1 for j in range(1022)]]
    worker = _worker(tmp_path, num_kv_blocks=300)
    assert drive(worker, prompts, 6, budget=300) == [oracle_greedy(oracle, prompt, 6) for prompt in prompts]


def test_bfloat16_first_tokens_are_near_the_float32_choice(tiny_llama):
    """Rounding may swap close candidates; most first tokens agree."""
    wide, narrow = (drive(_worker(tiny_llama, dtype=dtype), PROMPTS, 1) for dtype in ("float32", "bfloat16"))
    assert sum(a == b for a, b in zip(wide, narrow, strict=True)) >= len(PROMPTS) - 2


# ---- configuration -------------------------------------------------------------------------------------------------


def test_resolved_configuration(tiny_llama):
    worker = Worker(EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", num_threads=1))
    resolved = worker.resolved
    assert (resolved.device, resolved.dtype, resolved.attention_backend) == ("cpu", "float32", "cpu")
    assert (resolved.block_size, resolved.max_model_len, resolved.max_num_seqs) == (16, 256, 64)
    # Memory would allow more: no more blocks than all sequences at full length can use.
    assert resolved.num_kv_blocks == 64 * 256 // 16
    assert worker.shape.eos_token_ids == (2,)


def test_auto_type_follows_the_processor(tiny_llama, monkeypatch):
    for able, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr("paged_backend.worker.device.cpu_multiplies_bfloat16", lambda able=able: able)
        assert _worker(tiny_llama, dtype="auto").resolved.dtype == dtype


def test_start_up_facts_are_logged(tiny_llama, caplog):
    with caplog.at_level(logging.INFO, logger="paged_backend"):
        _worker(tiny_llama)
    (line,) = caplog.messages
    for fact in (
        "float32 weights on cpu",
        "activations of up to",
        "128 blocks x 8 tokens = 1024 tokens",
        "4.0 requests of 256",
        "backend cpu",
    ):
        assert fact in line
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="paged_backend"):
        _worker(tiny_llama, swap_space=0.5, preemption_mode="auto")
    assert "swap space of 131072 blocks, 512.0 MiB; preemption mode auto" in caplog.messages
    assert caplog.messages[-1].startswith("recomputing takes ")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_model_len": 257}, "max_model_len"),
        ({"dtype": "float16"}, "dtype"),
        ({"num_kv_blocks": None, "kv_cache_memory_bytes": 4096}, "kv_cache_memory_bytes"),
        ({"num_kv_blocks": None, "kv_cache_memory_bytes": 2**60}, "kv_cache_memory_bytes"),
        ({"num_kv_blocks": 2**40}, "num_kv_blocks"),
    ],
)
def test_arguments_that_do_not_fit_are_named(tiny_llama, options, named):
    with pytest.raises(ConfigError, match=named) as caught:
        _worker(tiny_llama, **options)
    assert caught.value.field == named


def test_missing_device_and_backend_are_named(tiny_llama, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="attention_backend"):
        _worker(tiny_llama, "triton")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            Worker(EngineConfig(model=str(tiny_llama), device="cuda"))


def test_a_window_longer_than_any_sequence_is_none(tmp_path, tiny_model):
    import json
    import shutil

    path = tmp_path / "windowed"
    shutil.copytree(tiny_model("mistral"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "sliding_window": 64}))
    prompts = PROMPTS[:4]
    expected = drive(_worker(tiny_model("mistral")), prompts, COUNT)
    worker = _worker(path, max_model_len=64)
    assert worker.shape.sliding_window is None
    assert drive(worker, prompts, COUNT) == expected
    assert _worker(path, max_model_len=65).shape.sliding_window == 64


def test_close(tiny_llama):
    worker = _worker(tiny_llama)
    worker.close()
    worker.close()
    with pytest.raises(PagedBackendError, match="closed"):
        worker.execute(SchedulerOutput())
