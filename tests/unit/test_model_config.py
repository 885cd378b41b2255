"""Model configurations: defaults, both spellings of RoPE, and early refusals that name what is wrong."""

from __future__ import annotations

import json

import pytest

from paged_backend.errors import ModelLoadError, UnsupportedError
from paged_backend.model.config import RopeConfig, read_model_config
from paged_backend.model_source import ModelSource

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": [3, 2],
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.fixture
def read(tmp_path):
    def read(**changes):
        values = {key: value for key, value in {**BASE, **changes}.items() if value != "absent"}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_model_config(ModelSource(tmp_path, is_gguf=False))

    return read


def test_defaults(read):
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.max_position) == (4, 16, 2048)
    assert (config.rms_norm_eps, config.rope) == (1e-6, RopeConfig(theta=10000.0))
    flags = ("tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm")
    assert not any(getattr(config, flag) for flag in flags)
    assert config.shape.eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
            RopeConfig(theta=5e5, kind="linear", factor=4.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(theta=5e5, kind="llama3", factor=8.0),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RopeConfig(theta=5e5, kind="llama3", factor=8.0),
        ),
    ],
)
def test_rope_spellings(read, changes, rope):
    assert read(**changes).rope == rope


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM.*Qwen2ForCausalLM"),
        ({"architectures": None}, "unnamed"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        # As transformers reads it: the older key counts where both stand.
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_unsupported_variants_are_named(read, changes, named):
    with pytest.raises(UnsupportedError, match=named):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": "absent"}, "vocab_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor must be a positive number, got '4'"),
        ({"rope_scaling": ["linear"]}, "rope_scaling must be an object"),
        ({"rope_theta": "x"}, "rope_theta must be a positive number"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number, got -1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"mlp_bias": "x" * 1000}, "mlp_bias must be true or false, got .{80}$"),
    ],
)
def test_bad_values_are_named(read, changes, named):
    with pytest.raises(ModelLoadError, match=named):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, 128),
        ({"architectures": ["MistralForCausalLM"]}, 4096),  # what transformers assumes
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, "use_sliding_window": True}, None),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 128,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            128,
        ),
        ({"sliding_window": 128}, None),
    ],
)
def test_sliding_windows(read, changes, window):
    config = read(num_key_value_heads=2, **changes)
    assert config.shape.sliding_window == window
    if window is not None:
        assert config.for_context(window).shape.sliding_window is None
        assert config.for_context(window + 1).shape.sliding_window == window


@pytest.mark.parametrize(
    "changes",
    [
        {"max_window_layers": 1},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_windows_in_some_layers_are_refused_where_they_matter(read, changes):
    written = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, "use_sliding_window": True, **changes}
    config = read(num_key_value_heads=2, **written)
    assert config.for_context(128).shape.sliding_window is None
    with pytest.raises(UnsupportedError, match=r"window of 128 tokens in some layers only .*to at most 128"):
        config.for_context(129)


@pytest.mark.parametrize("window", [-1, 0, 2.5, True, "16"])
def test_bad_windows_are_named(read, window):
    with pytest.raises(ModelLoadError, match="sliding_window must be a positive integer"):
        read(architectures=["MistralForCausalLM"], num_key_value_heads=2, sliding_window=window)


@pytest.mark.parametrize(
    ("written", "kv_heads"), [({}, 8), ({"num_key_value_heads": None}, 16), ({"num_key_value_heads": 2}, 2)]
)
def test_null_is_not_the_default(read, written, kv_heads):
    assert read(architectures=["MistralForCausalLM"], num_attention_heads=16, **written).num_kv_heads == kv_heads


def test_missing_config_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_model_config(ModelSource(tmp_path, is_gguf=False))
