"""Loads weights into a `Decoder`: safetensors directories and GGUF files. Pickled weights are never opened.

Names and shapes are checked before any data is read, and each tensor is converted on its own (large GGUF tensors in
slices), so the peak is the model plus one slice. Knows file formats and names; nothing of requests or caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from paged_backend.errors import ModelLoadError
from paged_backend.model.config import ModelConfig, read_model_config
from paged_backend.model.decoder import Decoder
from paged_backend.model_files import GGUFFile, GGUFTensor, read_gguf, safetensors_files
from paged_backend.model_source import ModelSource

# Elements dequantised at a time: enough to outweigh numpy's overhead, few enough to stay in the cache.
_SLICE_ELEMENTS = 1 << 20
_NAMES_SHOWN = 5


class _Weights(Protocol):
    """A checkpoint: names and shapes up front, data on request."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by transformers' weight name."""

    def copy(self, name: str, target: torch.Tensor) -> None:
        """Fill `target` (of the listed shape, any dtype and device) with the weight."""

    def close(self) -> None:
        """Release the files."""


def load_model(
    source: ModelSource, *, dtype: torch.dtype, device: str | torch.device, max_model_len: int | None = None
) -> Decoder:
    """Load a model in inference mode.

    Args:
        source: where its files are.
        dtype: of the weights, whatever the files hold.
        device: where they go.
        max_model_len: longest sequence that will be asked for; None: the model's context length.

    Raises:
        ModelLoadError: files missing, damaged or pickled; tensors missing, unexpected or mis-shaped (named).
        UnsupportedError: an architecture or variant this build does not do.
    """
    gguf = read_gguf(source.path) if source.is_gguf else None
    config = read_model_config(source, gguf)
    config = config.for_context(max_model_len or config.max_position)
    weights: _Weights = _SafetensorsWeights(source.path) if gguf is None else _GGUFWeights(gguf, config)
    try:
        with torch.device(device), _default_dtype(dtype):
            model = Decoder(config)
        _fill(model, weights, source.path)
    finally:
        weights.close()
    return model.requires_grad_(False).eval()


class _default_dtype:
    """Parameters made inside get `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._before)


def _fill(model: Decoder, weights: _Weights, path: Path) -> None:
    slots, shapes = model.weight_slots(), weights.shapes()
    frequency_factors = "rope_freqs.weight"
    if model.config.rope.kind == "factors":
        slots[frequency_factors] = torch.empty_like(model.frequencies)
    unexpected = [name for name in shapes if name not in slots and not _is_redundant(name, model.config)]
    problems = [
        *_listing("missing", (name for name in slots if name not in shapes)),
        *_listing("unexpected", unexpected),
        *_listing(
            "mis-shaped",
            (
                f"{name} {list(shapes[name])}, expected {list(slot.shape)}"
                for name, slot in slots.items()
                if name in shapes and shapes[name] != tuple(slot.shape)
            ),
        ),
    ]
    if problems:
        raise ModelLoadError(f"the weights in {path} do not fit the model: {'; '.join(problems)}", field="model")
    for name, slot in slots.items():
        weights.copy(name, slot)
    if model.config.rope.kind == "factors":
        model.frequencies /= slots[frequency_factors]


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Weights some checkpoints carry although the model computes or shares them."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _listing(what: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    if not names:
        return []
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return [f"{what}: {', '.join(names[:_NAMES_SHOWN])}{more}"]


class _SafetensorsWeights:
    """The safetensors files of a directory, one or sharded."""

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        self._files = {}
        try:
            for file in safetensors_files(path):
                handle = self._stack.enter_context(safe_open(file, framework="pt"))
                self._files.update(dict.fromkeys(handle.keys(), handle))
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise ModelLoadError(f"cannot read {file}: {error}", field="model") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def copy(self, name: str, target: torch.Tensor) -> None:
        tensor = self._files[name].get_tensor(name)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ModelLoadError(f"weight {name} has the unsupported type {tensor.dtype}", field="model")
        target.copy_(tensor)

    def close(self) -> None:
        self._stack.close()


class _GGUFWeights:
    """A GGUF file's tensors under transformers' names, dequantised by the `gguf` library."""

    def __init__(self, gguf: GGUFFile, config: ModelConfig) -> None:
        self._head_dim = config.head_dim
        # llama.cpp rotates neighbouring elements, so its llama files hold the rows of each query and key head
        # interleaved; qwen files keep transformers' order.
        interleaved = gguf.metadata.get("general.architecture") == "llama"
        self._interleaved = ("attn_q.", "attn_k.") if interleaved else ()
        self._tensors = {_transformers_name(name): tensor for name, tensor in gguf.tensors.items()}
        # As a plain array: numpy is slow at slicing its memmap class.
        self._data = np.asarray(np.memmap(gguf.path, dtype=np.uint8, mode="r"))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def copy(self, name: str, target: torch.Tensor) -> None:
        tensor = self._tensors[name]
        interleaved = any(part in tensor.name for part in self._interleaved)
        columns = tensor.shape[-1]
        lines = math.prod(tensor.shape[:-1])
        step = max(1, _SLICE_ELEMENTS // columns)
        if interleaved:  # whole heads at a time; a head's biases are a piece of the one line
            if len(tensor.shape) == 1:
                lines, columns = columns, 1
            step = -(-step // self._head_dim) * self._head_dim
        flat = target.view(lines, columns)
        for start in range(0, lines, step):
            stop = min(start + step, lines)
            values = self._dequantised(tensor, start * columns, stop * columns).reshape(stop - start, columns)
            if interleaved:
                values = _deinterleaved(values, self._head_dim)
            flat[start:stop].copy_(torch.from_numpy(values))

    def close(self) -> None:
        del self._data

    def _dequantised(self, tensor: GGUFTensor, start: int, stop: int) -> np.ndarray:
        """Elements `start` to `stop` (at quantisation block bounds) as a new float32 vector."""
        # Imported late: directories need no gguf library.
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            kind = GGMLQuantizationType(tensor.ggml_type)
            per_block, block_bytes = GGML_QUANT_SIZES[kind]
            begin, end = (tensor.offset + bound // per_block * block_bytes for bound in (start, stop))
            if end > len(self._data):
                raise ValueError("the file is cut short")
            # As one long row: the library loops in Python over groups of rows, and blocks do not care.
            values = np.asarray(dequantize(self._data[begin:end].reshape(1, -1), kind), dtype=np.float32)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise ModelLoadError(f"cannot dequantise {tensor.name}: {error}", field="model") from error
        # Unquantised tensors come as views of the file, which must not be written to.
        return (values if values.flags.writeable else values.copy()).reshape(-1)


def _deinterleaved(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo the interleaving of each head's halves along the rows: [heads * head_dim, ...] in, the same out."""
    pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _transformers_name(name: str) -> str:
    """`blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`; unknown names stay and are reported so."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _GGUF_LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_GGUF_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _GGUF_NAMES:
        return f"{_GGUF_NAMES[parts[0]]}.{parts[1]}"
    return name
