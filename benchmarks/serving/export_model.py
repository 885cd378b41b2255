"""Writes the model in the formats the peers read: same weights, one number type.

`.bench/models/<dtype>/` gets a safetensors directory (transformers, vLLM, this engine) and `model.gguf` (llama.cpp).
Made from the demo model's GGUF file, whose weights are quantised: everybody computes with the values that
dequantisation gives, so nobody computes with better ones. Runs in this project's environment.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import save_file

from benchmarks.serving.peers import GGUF_NAME
from paged_backend.model.config import ModelConfig, read_model_config
from paged_backend.model.loader import load_model
from paged_backend.model_source import ModelSource, resolve_model
from paged_backend.worker.device import TORCH_DTYPES

_GGUF_TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
_COPIED_ELSEWHERE = {"general.architecture", "general.file_type", "general.quantization_version"}


def export(model: str, dtype: str, directory: Path) -> Path:
    """Write both formats of `model` to `directory`, unless they are there; returns it.

    Args:
        model: a GGUF file of a Llama-family model, or the demo model's name.
        dtype: float32 or bfloat16.
        directory: made, with its parents; appears whole or not at all.

    Raises:
        ConfigError, ModelLoadError, UnsupportedError: as when serving the model.
        ValueError: it is no GGUF file.
    """
    if directory.is_dir():
        return directory
    source = resolve_model(model)
    if not source.is_gguf:
        raise ValueError(f"{source.path} is not a GGUF file; benchmarks start from one, since every peer can have it")
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    _write_safetensors(source, dtype, unfinished)
    _write_gguf(source.path, dtype, unfinished / GGUF_NAME)
    unfinished.rename(directory)
    return directory


def _write_safetensors(source: ModelSource, dtype: str, directory: Path) -> None:
    config = read_model_config(source)
    decoder = load_model(source, dtype=TORCH_DTYPES[dtype], device="cpu")
    slots = decoder.weight_slots()
    save_file(
        {name: slot.contiguous() for name, slot in slots.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    (directory / "config.json").write_text(json.dumps(_config_json(config, dtype), indent=1) + "\n")


def _config_json(config: ModelConfig, dtype: str) -> dict[str, object]:
    """What transformers would have written. Rope variants are left to models that the benchmarks do not use."""
    assert config.architecture == "LlamaForCausalLM" and config.rope.kind == "default", "a plain Llama"
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": list(config.eos_token_ids),
    }


def _write_gguf(source: Path, dtype: str, target: Path) -> None:
    """Copy a GGUF file with its matrices in `dtype`; vectors stay float32, as llama.cpp wants them."""
    reader = gguf.GGUFReader(source)
    matrix_type, file_type = _GGUF_TYPES[dtype]
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_file_type(file_type)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in _COPIED_ELSEWHERE:
            kind, *inner = field.types
            writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = matrix_type if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
