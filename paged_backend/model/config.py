"""`ModelConfig`: the dimensions and variants of a Llama-family decoder, read from config.json or GGUF metadata.

Says early, by name, what this build does not do: other architectures, activations, RoPE kinds, windows in some layers
only, quantised directories.
Knows no torch and no weights. Defaults for keys a config.json leaves out are transformers' for that architecture.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from paged_backend.config import ModelShape
from paged_backend.errors import ModelLoadError, UnsupportedError
from paged_backend.model_files import GGUFFile, find_eos_token_ids, read_gguf, read_json
from paged_backend.model_source import ModelSource

# Architectures by their name in config.json, with what their classes assume when a key is absent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "max_window_layers": 28,
    },
    "Qwen3ForCausalLM": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "max_window_layers": 28,
        "head_dim": 128,
    },
}
SUPPORTED_ARCHITECTURES = tuple(_DEFAULTS)
# GGUF's `general.architecture`; Mistral's files say llama.
_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is `default`, `linear`, `llama3` or `factors` (per-frequency divisors in the weights).

    `factor` divides frequencies; the last three belong to `llama3` (Llama 3.1's smoothed context extension).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder.

    `sliding_window` is the number of tokens a query sees, itself included; None when it sees them all. With
    `mixed_windows` it may hold in some layers only. The bias and norm flags say which optional weights exist.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    mixed_windows: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_position"):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelLoadError(f"the model's {name} must be a positive integer, got {value!r}", field="model")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"the model's {self.num_heads} heads do not divide into {self.num_kv_heads} KV heads", field="model"
            )
        window = self.sliding_window
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ModelLoadError(
                f"the model's sliding_window must be a positive integer, got {window!r}", field="model"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"the model's head_dim ({self.head_dim}) must be even for RoPE", field="model")

    @property
    def shape(self) -> ModelShape:
        """What the engine needs to know."""
        return ModelShape(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            max_position=self.max_position,
            eos_token_ids=self.eos_token_ids,
            sliding_window=self.sliding_window,
        )

    def for_context(self, max_model_len: int) -> ModelConfig:
        """The model as it is with sequences of at most `max_model_len` tokens: a window they fit in is none.

        Raises:
            UnsupportedError: they reach beyond a window that holds in some layers only.
        """
        if self.sliding_window is None:
            return self
        if self.sliding_window >= max_model_len:
            return dataclasses.replace(self, sliding_window=None, mixed_windows=False)
        if self.mixed_windows:
            raise UnsupportedError(
                f"a sliding window of {self.sliding_window} tokens in some layers only (`layer_types`, "
                f"`max_window_layers`) is not supported for sequences of up to {max_model_len}; set `max_model_len` "
                f"to at most {self.sliding_window}",
                field="max_model_len",
            )
        return self


def read_model_config(source: ModelSource, gguf: GGUFFile | None = None) -> ModelConfig:
    """Read a model's configuration; `gguf` saves reading the header again.

    Raises:
        ModelLoadError: missing or contradictory values.
        UnsupportedError: an architecture or variant this build does not do; the message lists what it does.
    """
    if source.is_gguf:
        return _from_gguf(source, gguf or read_gguf(source.path))
    return _from_json(source, read_json(source.path / "config.json"))


# ---- config.json --------------------------------------------------------------------------------------------------


def _from_json(source: ModelSource, written: dict[str, Any]) -> ModelConfig:
    architecture = _architecture(written)
    # A key written as null means "none" and keeps the class's default out.
    values = {key: value for key, value in {**_DEFAULTS[architecture], **written}.items() if value is not None}
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedError(
            f"quantised directories ({method}) are not supported; use the unquantised model or a GGUF file",
            field="model",
        )
    _require_silu(values.get("hidden_act", "silu"))
    heads, hidden = _need(values, "num_attention_heads"), _need(values, "hidden_size")
    qwen2 = architecture == "Qwen2ForCausalLM"
    window, mixed_windows = _window(architecture, values)
    attention_bias = _flag(values, "attention_bias") and architecture != "MistralForCausalLM"
    return ModelConfig(
        architecture=architecture,
        vocab_size=_need(values, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_need(values, "intermediate_size"),
        num_layers=_need(values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads", heads),
        head_dim=values.get("head_dim") or hidden // heads,
        rms_norm_eps=_positive(values, "rms_norm_eps"),
        max_position=_need(values, "max_position_embeddings"),
        rope=_rope_from_json(values),
        tie_word_embeddings=_flag(values, "tie_word_embeddings"),
        qkv_bias=attention_bias or qwen2,
        o_bias=attention_bias and not qwen2,
        mlp_bias=_flag(values, "mlp_bias") and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=window,
        mixed_windows=mixed_windows,
        eos_token_ids=find_eos_token_ids(source),
    )


def _architecture(values: dict[str, Any]) -> str:
    names = values.get("architectures") or []
    if isinstance(names, list):
        for name in names:
            if name in _DEFAULTS:
                return name
    raise UnsupportedError(
        f"model architecture {', '.join(map(str, names)) or 'unnamed'} is not supported (supported: "
        f"{', '.join(SUPPORTED_ARCHITECTURES)})",
        field="model",
    )


def _window(architecture: str, values: dict[str, Any]) -> tuple[int | None, bool]:
    """(the window, whether some layers have none)."""
    types = values.get("layer_types")
    if architecture == "MistralForCausalLM":
        # transformers' class windows every layer whatever `layer_types` says, but such a file was meant otherwise.
        return values.get("sliding_window"), "full_attention" in (types or ())
    if architecture == "LlamaForCausalLM" or not _flag(values, "use_sliding_window"):
        return None, False
    if not types:
        # Qwen's windows begin at layer `max_window_layers`.
        layers, first = _need(values, "num_hidden_layers"), _need(values, "max_window_layers")
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if "sliding_attention" not in types:
        return None, False
    return values.get("sliding_window", 4096), "full_attention" in types


def _rope_from_json(values: dict[str, Any]) -> RopeConfig:
    """transformers 5 writes `rope_parameters`; older files have `rope_theta` and `rope_scaling`."""
    # Where both stand, transformers goes by the older one.
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    written = values.get(name) or {}
    if not isinstance(written, dict):
        raise _bad(name, "an object", written)
    kind = written.get("rope_type", written.get("type", "default"))
    partial = written.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedError(f"partial rotary embeddings ({partial}) are not supported", field="model")
    theta = _positive({"rope_theta": 10000.0, **values, **written}, "rope_theta")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=_positive(written, "factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=_positive(written, "factor"),
            low_freq_factor=_positive(written, "low_freq_factor"),
            high_freq_factor=_positive(written, "high_freq_factor"),
            original_max_position=int(_positive(written, "original_max_position_embeddings")),
        )
    raise _unsupported_rope(kind)


# ---- GGUF ---------------------------------------------------------------------------------------------------------


def _from_gguf(source: ModelSource, gguf: GGUFFile) -> ModelConfig:
    metadata, tensors = gguf.metadata, gguf.tensors
    kind = metadata.get("general.architecture")
    if kind not in _GGUF_ARCHITECTURES:
        raise UnsupportedError(
            f"GGUF architecture {kind!r} is not supported (supported: {', '.join(_GGUF_ARCHITECTURES)})", field="model"
        )
    values = {key[len(kind) + 1 :]: value for key, value in metadata.items() if key.startswith(f"{kind}.")}
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedError(
            f"{gguf.path} is one part of several; merge them with llama-gguf-split --merge", field="model"
        )
    if values.get("expert_count"):
        raise UnsupportedError("mixture-of-experts models are not supported", field="model")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{gguf.path} lacks the tensor token_embd.weight", field="model")
    heads, hidden = _need(values, "attention.head_count"), _need(values, "embedding_length")
    head_dim = values.get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, head_dim) != head_dim:
            raise UnsupportedError(f"{key} = {values[key]} beside {head_dim} is not supported", field="model")
    return ModelConfig(
        architecture=_GGUF_ARCHITECTURES[kind],
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=_need(values, "feed_forward_length"),
        num_layers=_need(values, "block_count"),
        num_heads=heads,
        num_kv_heads=values.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=_positive(values, "attention.layer_norm_rms_epsilon"),
        max_position=_need(values, "context_length"),
        rope=_rope_from_gguf(values, "rope_freqs.weight" in tensors),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        sliding_window=values.get("attention.sliding_window") or None,
        # Only Mistral, whose files say llama, has its window in every layer; Qwen's layers are not listed in the file.
        mixed_windows=kind != "llama" or "attention.sliding_window_pattern" in values,
        eos_token_ids=find_eos_token_ids(source, gguf),
    )


def _rope_from_gguf(values: dict[str, Any], has_factors: bool) -> RopeConfig:
    theta = _positive({"rope.freq_base": 10000.0, **values}, "rope.freq_base")
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta=theta, kind="factors" if has_factors else "default")
    if kind == "linear" and not has_factors:
        return RopeConfig(theta=theta, kind=kind, factor=_positive(values, "rope.scaling.factor"))
    raise _unsupported_rope(kind)


# ---- both ---------------------------------------------------------------------------------------------------------


def _need(values: dict[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise ModelLoadError(f"the model's configuration lacks {key}", field="model")
    return values[key]


def _positive(values: dict[str, Any], key: str) -> float:
    value = _need(values, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise _bad(key, "a positive number", value)
    return float(value)


def _flag(values: dict[str, Any], key: str) -> bool:
    value = values.get(key, False)
    if not isinstance(value, bool):
        raise _bad(key, "true or false", value)
    return value


def _bad(key: str, wanted: str, value: object) -> ModelLoadError:
    return ModelLoadError(f"the model's {key} must be {wanted}, got {value!r:.80}", field="model")


def _require_silu(activation: str) -> None:
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"activation {activation!r} is not supported (supported: silu)", field="model")


def _unsupported_rope(kind: str) -> UnsupportedError:
    return UnsupportedError(f"RoPE scaling {kind!r} is not supported (supported: linear, llama3)", field="model")
