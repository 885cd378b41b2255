"""Reads what a model's files say about it: JSON files of a directory, the header of a GGUF file, end-of-sequence ids.

Shared by the tokenizer and the weight loader. Knows formats only: no torch, no architectures, no tensor data. The
GGUF header is parsed here rather than with `gguf.GGUFReader`, which builds an array object per string and takes
seconds on a vocabulary of fifty thousand.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from paged_backend.errors import ModelLoadError
from paged_backend.model_source import ModelSource

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NAMES_SHOWN = 5
_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# GGUF value types by number (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), as struct formats.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies: `shape` in torch's order (rows first), `ggml_type` by number, `offset` from file start."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF header: `metadata` by key (arrays are lists) and the tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ModelLoadError: the file cannot be read or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}", field="model") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object", field="model")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """As `read_json`, but an absent file gives an empty dictionary."""
    return read_json(path) if path.is_file() else {}


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of a GGUF file (versions 2 and 3, little endian).

    Raises:
        ModelLoadError: not a GGUF file, an unknown version, or a damaged header.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).parse()
    except (OSError, ValueError, KeyError, struct.error, OverflowError) as error:
        raise ModelLoadError(f"{path} is not a readable GGUF file: {error}", field="model") from error


def safetensors_files(path: Path) -> list[Path]:
    """The weight files of a directory, one or several.

    Raises:
        ModelLoadError: there are none, some are missing, or the weights are pickled.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in shards if Path(name).name != name or not (path / name).is_file()]
        if missing or not shards:
            raise ModelLoadError(f"{index} names files that are not there: {', '.join(missing)}", field="model")
        return [path / name for name in shards]
    whole = path / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(path.glob("*.safetensors"))
    if files:
        return files
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLED)
    if pickled:
        raise ModelLoadError(
            f"{path} holds only pickled weights ({', '.join(pickled[:_NAMES_SHOWN])}), which can run code when read "
            "and are refused; convert them to safetensors (transformers: from_pretrained, then "
            "save_pretrained(safe_serialization=True)) in a place you trust",
            field="model",
        )
    raise ModelLoadError(f"{path} holds no *.safetensors weights", field="model")


def check_weights(source: ModelSource) -> int:
    """Read the headers of all weight files and see that each file is as long as its header says; returns bytes.

    Raises:
        ModelLoadError: a file is missing, pickled, damaged or cut short, or of a type that is not known.
    """
    if source.is_gguf:
        _check_gguf(read_gguf(source.path))
        return source.path.stat().st_size
    files = safetensors_files(source.path)
    for file in files:
        try:
            # Reading the header compares the length, too.
            with safe_open(file, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"cannot read {file}: {error}", field="model") from error
    return sum(file.stat().st_size for file in files)


def _check_gguf(gguf: GGUFFile) -> None:
    # Imported late: directories need no gguf library.
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    size = gguf.path.stat().st_size
    for tensor in gguf.tensors.values():
        try:
            per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.ggml_type)]
        except (ValueError, KeyError):
            message = f"{gguf.path}: {tensor.name} has the unknown type {tensor.ggml_type}"
            raise ModelLoadError(message, field="model") from None
        if tensor.offset + math.prod(tensor.shape) // per_block * block_bytes > size:
            message = f"{gguf.path} is cut short: it has {size} bytes and {tensor.name} lies beyond; fetch it again"
            raise ModelLoadError(message, field="model")


def find_eos_token_ids(source: ModelSource, gguf: GGUFFile | None = None) -> tuple[int, ...]:
    """The ids that end a sequence, sorted; empty if the files name none.

    A directory's `generation_config.json` decides, else its `config.json`; a GGUF file's end-of-sequence,
    end-of-turn and end-of-message ids together play that role. `gguf` saves reading the header again.

    Raises:
        ModelLoadError: a file cannot be read, or the ids are no integers.
    """
    if source.is_gguf:
        metadata = (gguf or read_gguf(source.path)).metadata
        found = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        return tuple(sorted({int(i) for i in found if i is not None}))
    for name in ("generation_config.json", "config.json"):
        written = read_optional_json(source.path / name).get("eos_token_id")
        if written is None:
            continue
        ids = written if isinstance(written, list) else [written]
        if not all(isinstance(i, int) for i in ids):
            raise ModelLoadError(f"{source.path / name}: eos_token_id must be one or several integers", field="model")
        return tuple(sorted(set(ids)))
    return ()


class _Parser:
    """A cursor over a GGUF header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def parse(self) -> GGUFFile:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._u32()
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported (2 and 3 are)")
        num_tensors, num_keys = self._u64(), self._u64()
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._u32())
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        start = -(-self._at // alignment) * alignment
        tensors = {name: GGUFTensor(name, shape, kind, start + offset) for name, shape, kind, offset in infos}
        return GGUFFile(self._path, metadata, tensors)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        # The file lists the fastest-varying dimension first.
        shape = tuple(self._u64() for _ in range(self._u32()))[::-1]
        return name, shape, self._u32(), self._u64()

    def _u32(self) -> int:
        (value,) = _U32.unpack_from(self._data, self._at)
        self._at += 4
        return value

    def _u64(self) -> int:
        (value,) = _U64.unpack_from(self._data, self._at)
        self._at += 8
        return value

    def _string(self) -> str:
        start = self._at + 8
        end = start + self._u64()
        if end > len(self._data):
            raise ValueError("the file is cut short")
        self._at = end
        return self._data[start:end].decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = self._u32(), self._u64()
            if element in (_STRING, _ARRAY):
                return [self._value(element) for _ in range(count)]
            return list(self._scalars(element, count))
        return self._scalars(kind, 1)[0]

    def _scalars(self, kind: int, count: int) -> tuple:
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values
