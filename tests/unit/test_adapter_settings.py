"""Where the served models find the model they stand for."""

from __future__ import annotations

import json

import pytest

from paged_backend.config import EngineConfig
from paged_backend.errors import ConfigError
from paged_backend.triton_adapter.devices import claim_device
from paged_backend.triton_adapter.settings import (
    MODEL_VARIABLE,
    ServingSettings,
    drain_seconds,
    engine_arguments,
    engine_version_dir,
    own_version_dir,
    serving_settings,
)


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


# --- how it is served ---


def _version(folder, **values):
    (folder / "model.json").write_text(json.dumps({"model": "m", **values}))
    return folder


def test_serving_settings_are_no_engine_arguments(tmp_path):
    folder = _version(tmp_path, stream_interval=4, when_full="block", max_num_seqs=3)
    assert serving_settings(folder) == ServingSettings(stream_interval=4, when_full="block")
    assert engine_arguments(folder, {}) == {"model": "m", "max_num_seqs": 3}
    assert serving_settings(_version(tmp_path)) == ServingSettings()


@pytest.mark.parametrize(
    ("name", "value"), [("stream_interval", 0), ("stream_interval", True), ("when_full", "drop"), ("when_full", None)]
)
def test_bad_serving_settings_are_named(tmp_path, name, value):
    with pytest.raises(ConfigError, match=f"`{name}`") as info:
        serving_settings(_version(tmp_path, **{name: value}))
    assert info.value.field == name


@pytest.mark.parametrize(("text", "seconds"), [(None, 5.0), ("", 5.0), ("0", 0.0), ("2.5", 2.5)])
def test_drain_seconds(text, seconds):
    assert drain_seconds({} if text is None else {"PAGED_BACKEND_DRAIN_SECONDS": text}) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_bad_drain_seconds(text):
    with pytest.raises(ConfigError, match="PAGED_BACKEND_DRAIN_SECONDS"):
        drain_seconds({"PAGED_BACKEND_DRAIN_SECONDS": text})


# --- instance groups ---


def _instance(kind, device_id="0", **group):
    config = json.dumps({"instance_group": [group]} if group else {})
    return {"model_config": config, "model_instance_kind": kind, "model_instance_device_id": device_id}


@pytest.mark.parametrize(
    ("kind", "visible", "device", "shown"),
    [
        ("MODEL", None, "auto", None),
        ("CPU", None, "cpu", None),
        ("GPU", None, "cuda", "1"),
        ("GPU", "4,6", "cuda", "6"),
        ("GPU", "GPU-aaaa, GPU-bbbb", "cuda", "GPU-bbbb"),
    ],
)
def test_instance_kinds(kind, visible, device, shown):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    config = claim_device(EngineConfig(), _instance(kind, "1"), environ)
    assert config.device == device
    assert environ.get("CUDA_VISIBLE_DEVICES") == shown


@pytest.mark.parametrize(
    ("config", "args", "field"),
    [
        (EngineConfig(), _instance("MODEL", count=2), "instance_group"),
        (EngineConfig(device="cuda"), _instance("CPU"), "device"),
        (EngineConfig(device="cpu"), _instance("GPU"), "device"),
        (EngineConfig(), _instance("GPU", "3"), "instance_group"),
    ],
)
def test_instance_groups_that_do_not_fit(config, args, field):
    with pytest.raises(ConfigError) as info:
        claim_device(config, args, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert info.value.field == field
