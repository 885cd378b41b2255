"""Sampling parameters and engine arguments refuse what they cannot mean, naming the field."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from paged_backend.config import ALIASES, IGNORED, EngineConfig, ModelShape, kv_block_bytes
from paged_backend.errors import ConfigError, InvalidRequestError
from paged_backend.model_source import DEMO_MODEL, resolve_model
from paged_backend.sampling_params import SamplingParams

BAD_PARAMS = [
    *[("temperature", v) for v in (-0.1, math.nan, math.inf, "1", None, True, [1], 10**400)],
    *[("top_p", v) for v in (0, 0.0, 1.01, -1, math.nan, "0.5", None)],
    *[("min_p", v) for v in (-0.1, 1.1, math.nan, "x", None)],
    *[("top_k", v) for v in (-2, 1.5, "3", None, False)],
    *[("seed", v) for v in (1.0, "1", 2**64, -(2**63) - 1, True)],
    *[("max_tokens", v) for v in (0, -1, 1.0, "16", True)],
    *[("stop", v) for v in ("", [""], 1, ["a", 2], {"a": 1})],
    *[("stop_token_ids", v) for v in (1, 0, False, {}, "", ["a"], [1.0], [True], "12", [-1])],
    *[("ignore_eos", v) for v in (0, "true", None)],
    *[("skip_special_tokens", v) for v in (1, None)],
]


@pytest.mark.parametrize(("name", "value"), BAD_PARAMS, ids=lambda v: repr(v)[:30])
def test_bad_sampling_parameter_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=f"`{name}`") as caught:
        SamplingParams.from_mapping({name: value})
    assert caught.value.field == name
    assert len(str(caught.value)) < 300


def test_unknown_parameter_is_refused_with_the_nearest_name():
    with pytest.raises(InvalidRequestError, match="did you mean `temperature`"):
        SamplingParams.from_mapping({"temprature": 1})


@pytest.mark.parametrize(
    "good",
    [
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 1, "seed": -1, "max_tokens": None},
        {"top_k": 10**6, "seed": 2**64 - 1, "stop": ["a", "b"], "stop_token_ids": [1, 2]},
        {"stop": "x", "ignore_eos": True},
    ],
)
def test_good_parameters_are_taken(good):
    SamplingParams.from_mapping(good)


@pytest.mark.parametrize(
    ("params", "greedy"),
    [({"temperature": 0}, True), ({"temperature": 1e-12}, True), ({"top_k": 1}, True), ({}, False)],
)
def test_greedy(params, greedy):
    assert SamplingParams(**params).is_greedy is greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "int4"),
        ("device", "tpu"),
        ("block_size", 12),
        ("block_size", True),
        ("num_kv_blocks", 0),
        ("max_model_len", 1),
        ("max_num_seqs", "8"),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", "0.9"),
        ("attention_backend", "flash"),
        ("trust_remote_code", True),
        ("trust_remote_code", 0),
        ("enforce_eager", "false"),
        ("populate_kv_cache", 1),
        ("model", ""),
        ("model", 3),
        ("tokenizer", 3),
        ("seed", -1),
        ("num_threads", 0),
        ("num_threads", 100_000),
    ],
)
def test_bad_engine_argument_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"`{name}`") as caught:
        EngineConfig.from_mapping({name: value})
    assert caught.value.field == name


def test_long_values_are_cut_in_the_message():
    with pytest.raises(ConfigError) as caught:
        EngineConfig(max_model_len="9" * 100_000)
    assert len(str(caught.value)) < 200
    # Python refuses to write out integers of this size.
    with pytest.raises(ConfigError, match=r"`num_threads` must be an integer from 1 to 1024, got an integer of"):
        EngineConfig(num_threads=10**5000)


def test_unknown_and_contradicting_arguments():
    with pytest.raises(ConfigError, match="did you mean `block_size`"):
        EngineConfig.from_mapping({"blok_size": 16})
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        EngineConfig(max_num_seqs=64, max_num_batched_tokens=32)
    with pytest.raises(ConfigError, match="twice"):
        EngineConfig.from_mapping({"num_kv_blocks": 3, "num_gpu_blocks_override": 4})


def test_a_vllm_model_json_works():
    text = '{"model": "m", "disable_log_requests": true, "gpu_memory_utilization": 0.5, "enforce_eager": true}'
    config = EngineConfig.from_mapping(json.loads(text))
    assert (config.model, config.gpu_memory_utilization, config.enforce_eager) == ("m", 0.5, True)


def test_no_argument_is_another_name_or_without_effect():
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert not names & (IGNORED | set(ALIASES))
    assert set(ALIASES.values()) <= names


SHAPE = ModelShape(num_layers=32, num_kv_heads=32, head_dim=128, vocab_size=32000, max_position=4096)


def test_block_bytes_of_llama_2_7b_are_8_mib():
    assert kv_block_bytes(SHAPE, 16, "float16") == 8 * 2**20


def test_resolve_closes_what_was_open():
    resolved = EngineConfig(max_num_batched_tokens=32).resolve(
        SHAPE, device="cpu", dtype="float32", num_kv_blocks=10, block_size=16
    )
    assert (resolved.max_num_seqs, resolved.max_model_len) == (32, 4096)
    assert (resolved.device, resolved.dtype, resolved.num_kv_blocks, resolved.block_size) == ("cpu", "float32", 10, 16)
    with pytest.raises(ConfigError, match="max_model_len"):
        EngineConfig(max_model_len=5000).resolve(SHAPE, device="cpu", dtype="float32", num_kv_blocks=1, block_size=16)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "must name"),
        ("/no/such/dir", "does not exist"),
        ("nothing.gguf", "does not exist"),
        ("bare", "does not exist"),
    ],
)
def test_missing_models_are_said_clearly(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve_model(name)


def test_models_on_disk(tmp_path):
    with pytest.raises(ConfigError, match=r"neither a config\.json nor"):
        resolve_model(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path)).is_gguf
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"2 \.gguf files"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert not resolve_model(str(tmp_path)).is_gguf
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"not a \.gguf"):
        resolve_model(str(tmp_path / "weights.bin"))
    assert resolve_model(DEMO_MODEL).path.suffix == ".gguf"
