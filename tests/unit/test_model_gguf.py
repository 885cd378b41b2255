"""GGUF weights: tiny files written here equal their directories; the demo model equals transformers' reading of it."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from helpers import drive, oracle_greedy
from safetensors.torch import load_file

from paged_backend.config import EngineConfig
from paged_backend.errors import ModelLoadError, UnsupportedError
from paged_backend.model.loader import load_model
from paged_backend.model_source import ModelSource
from paged_backend.worker.worker import Worker

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"


def _write(path, directory, architecture, *, drop=(), extra=None, metadata=None) -> ModelSource:
    """A directory's weights as llama.cpp's converter lays them out, in float32."""
    config = json.loads((directory / "config.json").read_text())
    heads, head_dim = config["num_attention_heads"], config.get("head_dim", 16)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    for key, value in (metadata or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            shape = values.shape
            values = values.reshape(-1, 2, head_dim // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        if _gguf_name(name) not in drop:
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(values))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource(path, is_gguf=True)


def _load(source: ModelSource):
    return load_model(source, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama", "llama"),
        ("llama_tied", "llama"),
        ("llama_biased", "llama"),
        ("mistral", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_same_weights_as_the_directory(tiny_model, tmp_path, name, architecture):
    directory = tiny_model(name)
    expected = _load(ModelSource(directory, is_gguf=False))
    got = _load(_write(tmp_path / "tiny.gguf", directory, architecture))
    assert dict(got.named_parameters()).keys() == dict(expected.named_parameters()).keys()
    for parameter_name, parameter in expected.named_parameters():
        assert torch.equal(got.get_parameter(parameter_name), parameter), parameter_name
    assert torch.equal(got.frequencies, expected.frequencies)
    assert got.config.eos_token_ids == (2,)


def test_frequency_factors_divide_the_frequencies(tiny_llama, tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    plain = _load(_write(tmp_path / "a.gguf", tiny_llama, "llama"))
    scaled = _load(_write(tmp_path / "b.gguf", tiny_llama, "llama", extra={"rope_freqs.weight": factors}))
    assert torch.equal(scaled.frequencies, plain.frequencies / torch.from_numpy(factors))


@pytest.mark.parametrize(
    ("architecture", "metadata", "named"),
    [
        ("gpt2", {}, "'gpt2'.*llama, qwen2, qwen3"),
        ("llama", {"llama.expert_count": 8}, "mixture"),
        ("llama", {"split.count": 3}, "merge"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, "yarn"),
        ("llama", {"llama.rope.dimension_count": 8}, r"rope\.dimension_count"),
    ],
)
def test_unsupported_files_are_named(tiny_llama, tmp_path, architecture, metadata, named):
    source = _write(tmp_path / "tiny.gguf", tiny_llama, architecture, metadata=metadata)
    with pytest.raises(UnsupportedError, match=named):
        _load(source)


def test_missing_and_unexpected_tensors_are_named(tiny_llama, tmp_path):
    extra = {"blk.0.ssm_in.weight": np.zeros((2, 2), dtype=np.float32)}
    source = _write(tmp_path / "tiny.gguf", tiny_llama, "llama", drop=("blk.1.ffn_up.weight",), extra=extra)
    with pytest.raises(ModelLoadError, match=r"missing: model.layers.1.mlp.up_proj.*unexpected: blk.0.ssm_in"):
        _load(source)


def test_truncated_file_is_refused(tiny_llama, tmp_path):
    source = _write(tmp_path / "tiny.gguf", tiny_llama, "llama")
    source.path.write_bytes(source.path.read_bytes()[:-4096])
    with pytest.raises(ModelLoadError, match="cut short"):
        _load(source)


def test_demo_model_is_transformers_reading_of_it(demo_model, demo_oracle):
    """Dequantised weights bit for bit, and greedy ids of one prompt. The one slow test of this file."""
    model = _load(ModelSource(demo_model, is_gguf=True))
    slots = model.weight_slots()
    state = demo_oracle.state_dict()
    assert set(state) - set(slots) == {"lm_head.weight"}  # tied
    for name in slots:
        assert torch.equal(slots[name], state[name]), name

    worker = Worker(EngineConfig(model=str(demo_model), dtype="float32", num_kv_blocks=16))
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert drive(worker, [prompt], 8) == [oracle_greedy(demo_oracle, prompt, 8)]
    worker.close()
