"""Checks of a model repository: its configuration, engine arguments and model files. Loads tokenizers, no weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from paged_backend.config import EngineConfig
from paged_backend.doctor.report import Finding, failure, ok, warning
from paged_backend.errors import PagedBackendError
from paged_backend.model.config import read_model_config
from paged_backend.model_files import check_weights
from paged_backend.model_source import resolve_model
from paged_backend.server import repository
from paged_backend.server.install import BACKEND_NAME
from paged_backend.tokenizer import Tokenizer
from paged_backend.triton_adapter.settings import engine_arguments, serving_settings

_MIB = 1024**2
_ENGINE_PARAMETER = re.compile(r'key:\s*"engine_model"\s*value\s*\{\s*string_value:\s*"([^"]+)"')

_OUR_BACKEND = re.compile(rf'^\s*backend:\s*"{BACKEND_NAME}"', re.MULTILINE)


def check_repository(given: str | None, model: str | None) -> Iterator[Finding]:
    """Every model of the repository at `given` (None: the default one).

    Args:
        model: what `serve --model` would be given; None: each model's own.
    """
    folder = repository.find_repository(given)
    yield ok("repository", str(folder))
    configs = sorted(folder.glob("*/config.pbtxt"))
    engines = [path.parent for config in configs for path in config.parent.glob("*/model.json")]
    for config in configs:
        yield from _check_config(config)
    for version in sorted(engines):
        yield from _check_engine(version, model)
    if not engines:
        yield warning("repository", "no model has a <version>/model.json, so none is of this backend")


def _check_config(config: Path) -> Iterator[Finding]:
    name = config.parent.name
    text = config.read_text(errors="replace")
    if _OUR_BACKEND.search(text) and not list(config.parent.glob("*/model.json")):
        yield failure(name, f'{config} says backend: "{BACKEND_NAME}", but {config.parent} has no <version>/model.json')
    match = _ENGINE_PARAMETER.search(text)
    if match and not list((config.parent.parent / match[1]).glob("*/model.json")):
        yield failure(name, f"`engine_model` in {config} names {match[1]!r}, which has no <version>/model.json")


def _check_engine(version: Path, model: str | None) -> Iterator[Finding]:
    name = version.parent.name
    try:
        arguments = engine_arguments(version)
        if model is not None:
            arguments = {key: value for key, value in arguments.items() if key != "tokenizer"} | {"model": model}
        config = EngineConfig.from_mapping(arguments)
        serving_settings(version)
        yield ok(name, f"engine arguments in {version / 'model.json'}")
        yield from _check_weights(name, config)
        if config.skip_tokenizer_init:
            yield ok(name, "no tokenizer (skip_tokenizer_init)")
        else:
            Tokenizer.load(resolve_model(config.tokenizer or config.model))
            yield ok(name, "the tokenizer loads")
    except PagedBackendError as error:
        yield failure(name, str(error))


def _check_weights(name: str, config: EngineConfig) -> Iterator[Finding]:
    source = resolve_model(config.model)
    model = read_model_config(source)
    model.for_context(config.max_model_len or model.max_position)
    size = check_weights(source)
    yield ok(name, f"{source.path}: {model.architecture}, {size / _MIB:.0f} MiB of weights")
    available = _available_memory()
    if available is not None and size > available:
        advice = "free memory, or serve it on a GPU from safetensors"
        yield warning(name, f"the machine has {available / _MIB:.0f} MiB of memory available: {advice}")


def _available_memory() -> int | None:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else None
