"""Where the served models find the model they stand for."""

from __future__ import annotations

import json

import pytest

from paged_backend.errors import ConfigError
from paged_backend.triton_adapter.settings import MODEL_VARIABLE, engine_arguments, engine_version_dir, own_version_dir


@pytest.fixture
def repository(tmp_path):
    for version, model in (("1", "old"), ("2", "new"), ("notes", "not a version")):
        folder = tmp_path / "llm" / version
        folder.mkdir(parents=True)
        (folder / "model.json").write_text(json.dumps({"model": model, "tokenizer": "t", "block_size": 16}))
    return tmp_path


def _args(repository, parameters):
    config = json.dumps({"parameters": parameters})
    return {"model_repository": str(repository / "tokenizer"), "model_version": "1", "model_config": config}


def test_tokenizer_models_read_the_newest_version_of_the_engine_model(repository):
    args = _args(repository, {"engine_model": {"string_value": "llm"}})
    folder = engine_version_dir(args)
    assert folder == repository / "llm" / "2"
    assert engine_arguments(folder, {}) == {"model": "new", "tokenizer": "t", "block_size": 16}
    assert own_version_dir(args) == repository / "tokenizer" / "1"


def test_the_environment_replaces_the_model_and_its_tokenizer(repository):
    values = engine_arguments(repository / "llm" / "1", {MODEL_VARIABLE: "/models/other"})
    assert values == {"model": "/models/other", "block_size": 16}


@pytest.mark.parametrize("parameters", [{}, {"engine_model": {"string_value": "nobody"}}])
def test_a_wrong_engine_model_is_named(repository, parameters):
    with pytest.raises(ConfigError, match="engine_model"):
        engine_version_dir(_args(repository, parameters))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_unusable_model_json_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "model.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model\.json"):
        engine_arguments(tmp_path, {})
