"""Which model a served model stands for: the engine arguments in `<version>/model.json` and what overrides them.

The engine model reads its own file; the tokenizer models read that of the engine model beside them, so that there is
one place to configure. This module reads files and the environment; it imports neither torch nor the engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paged_backend.config import EngineConfig
from paged_backend.errors import ConfigError
from paged_backend.model.config import read_model_config
from paged_backend.model_source import resolve_model
from paged_backend.tokenizer import Tokenizer

# Set by `paged-backend serve --model`.
MODEL_VARIABLE = "PAGED_BACKEND_MODEL"
# Set by `paged-backend serve --drain-seconds`.
DRAIN_VARIABLE = "PAGED_BACKEND_DRAIN_SECONDS"
_DRAIN_S = 5.0
_FILE = "model.json"


@dataclass(frozen=True)
class ServingSettings:
    """What `model.json` says of serving rather than of the engine.

    Args:
        stream_interval: tokens that a stream gathers for each response after its first; more is less work per token.
        when_full: what happens to a request when `max_waiting_requests` wait: `refuse` it (UNAVAILABLE), or `block`
            until there is room, so that it and those behind it wait in the server, under the model's queue policy.

    Raises:
        ConfigError: a value is out of bounds; `field` names it.
    """

    stream_interval: int = 1
    when_full: str = "refuse"

    def __post_init__(self) -> None:
        interval = self.stream_interval
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            message = f"`stream_interval` must be an integer of at least 1, got {interval!r}"
            raise ConfigError(message, field="stream_interval")
        if self.when_full not in ("refuse", "block"):
            raise ConfigError(f"`when_full` must be refuse or block, got {self.when_full!r}", field="when_full")


_SERVING_KEYS = frozenset(field.name for field in fields(ServingSettings))


def serving_settings(version_dir: Path) -> ServingSettings:
    """How the model in `version_dir` is served.

    Raises:
        ConfigError: the file is missing or is not a JSON object, or a value is out of bounds.
    """
    values = _read(version_dir / _FILE)
    return ServingSettings(**{key: value for key, value in values.items() if key in _SERVING_KEYS})


def engine_arguments(version_dir: Path, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The engine arguments of the model in `version_dir`, with the environment's model if it names one.

    Raises:
        ConfigError: the file is missing or is not a JSON object.
    """
    values = {key: value for key, value in _read(version_dir / _FILE).items() if key not in _SERVING_KEYS}
    override = environ.get(MODEL_VARIABLE)
    if override:
        # A tokenizer named in the file belongs to the file's model.
        values.pop("tokenizer", None)
        values["model"] = override
    return values


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the engine arguments: {error}", field="model") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", field="model") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object of engine arguments", field="model")
    return values


def drain_seconds(environ: Mapping[str, str] = os.environ) -> float:
    """How long live requests may go on once the server stops or the model is unloaded.

    Raises:
        ConfigError: the environment's value is no number of seconds.
    """
    text = environ.get(DRAIN_VARIABLE)
    if not text:
        return _DRAIN_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= 86400.0:
        message = f"the environment variable {DRAIN_VARIABLE} must be a number of seconds from 0 to 86400, got {text!r}"
        raise ConfigError(message, field=DRAIN_VARIABLE)
    return seconds


def own_version_dir(args: Mapping[str, str]) -> Path:
    """The version directory of the model being initialized with `args`."""
    return Path(args["model_repository"]) / args["model_version"]


def engine_version_dir(args: Mapping[str, str]) -> Path:
    """The newest version directory of the engine model beside the one being initialized with `args`.

    Its name is the `engine_model` parameter in config.pbtxt.

    Raises:
        ConfigError: the parameter is missing, or no such model has a model.json.
    """
    parameters = json.loads(args["model_config"]).get("parameters", {})
    name = parameters.get("engine_model", {}).get("string_value")
    if not name:
        raise ConfigError("config.pbtxt lacks the parameter `engine_model`, which names the engine model beside it")
    folder = Path(args["model_repository"]).parent / name
    versions = [path.parent for path in folder.glob(f"*/{_FILE}") if path.parent.name.isdigit()]
    if not versions:
        raise ConfigError(f"no {folder}/<version>/{_FILE}: `engine_model` in config.pbtxt must name the engine model")
    return max(versions, key=lambda path: int(path.name))


def engine_config(args: Mapping[str, str]) -> EngineConfig:
    """The engine arguments, as written, of the engine model beside the one being initialized with `args`.

    Raises:
        ConfigError: they cannot be found or are wrong.
    """
    return EngineConfig.from_mapping(engine_arguments(engine_version_dir(args)))


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """The tokenizer of an engine with these arguments.

    Raises:
        ConfigError, ModelLoadError: it cannot be found or loaded.
    """
    return Tokenizer.load(resolve_model(config.tokenizer or config.model))


def context_length(config: EngineConfig) -> int:
    """Tokens that a sequence of an engine with these arguments can have at most; the engine may have to do with fewer.

    Raises:
        ConfigError, ModelLoadError, UnsupportedError: the model's files do not say.
    """
    return config.max_model_len or read_model_config(resolve_model(config.model)).max_position
