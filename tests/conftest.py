"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import make_tiny_model

from paged_backend.errors import ConfigError
from paged_backend.model_source import DEMO_MODEL, resolve_model


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file; skips where its package is not installed."""
    try:
        return resolve_model(DEMO_MODEL).path
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def demo_oracle(demo_model):
    """The demo model as transformers reads it, in float32 (its GGUF reader takes long: once per session)."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        demo_model.parent, gguf_file=demo_model.name, dtype=torch.float32
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Makes (once per session) and returns the directory of a model named in `helpers.TINY_MODELS`."""
    directory = tmp_path_factory.mktemp("tiny_models")
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_tiny_model(name, directory)
        return made[name]

    return make


@pytest.fixture(scope="session")
def tiny_llama(tiny_model) -> Path:
    """Directory of a tiny random Llama: untied head, grouped queries."""
    return tiny_model("llama")
