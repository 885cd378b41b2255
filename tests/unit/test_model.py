"""The decoder against transformers, and the loader's refusals."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from helpers import TINY_MODELS
from safetensors.torch import load_file, save_file

from paged_backend.errors import ModelLoadError
from paged_backend.model.attention import AttentionMetadata
from paged_backend.model.cpu_decoder import CpuDecoder
from paged_backend.model.loader import load_model
from paged_backend.model_source import ModelSource
from paged_backend.worker.kv_cache import allocate_kv_cache


def _load(path, dtype=torch.float32, *, native: bool = False, **options):
    model = load_model(ModelSource(path, is_gguf=False), dtype=dtype, device="cpu", **options)
    return CpuDecoder(model, max_tokens=256) if native else model


def _logits(model, prompt: list[int]) -> torch.Tensor:
    """All positions' logits of one prompt: float32 [T, vocabulary]."""
    length, block_size = len(prompt), 8
    blocks = -(-length // block_size)
    cache = allocate_kv_cache(model.config.shape, blocks, block_size, model.dtype, torch.device("cpu"))
    cache.fill_(float("nan"))
    table = np.arange(blocks, 0, -1, dtype=np.int32)
    positions = np.arange(length)
    metadata = AttentionMetadata(
        slot_mapping=torch.from_numpy(table[positions // block_size].astype(np.int64) * block_size + positions % 8),
        block_tables=torch.from_numpy(table)[None],
        seq_lens=torch.tensor([length], dtype=torch.int32),
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        num_decodes=0,
        max_query_len=length,
        max_seq_len=length,
        backend="reference",
    )
    with torch.inference_mode():
        hidden = model(torch.tensor(prompt), torch.from_numpy(positions), cache, metadata)
        return model.compute_logits(hidden)


PROMPT = [1, *((7 * i * i + 3 * i) % 150 + 5 for i in range(199))]


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_are_those_of_transformers(tiny_model, name, native):
    path = tiny_model(name)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    got = _logits(_load(path, native=native), PROMPT)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral_window"])
def test_bfloat16_is_close_to_float32(tiny_model, name, native):
    path = tiny_model(name)
    wide = _logits(_load(path), PROMPT)
    narrow = _logits(_load(path, torch.bfloat16, native=native), PROMPT)
    assert narrow.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(wide, narrow, dim=-1).min() > 0.995


def test_the_native_decoder_says_how_much_memory_it_holds(tiny_llama):
    """Packing pads and the embedding is kept as rows beside the head's panels, so it is more, but not much."""
    plain, native = _load(tiny_llama), _load(tiny_llama, native=True)
    assert 0.99 * plain.num_bytes <= native.num_bytes < 1.5 * plain.num_bytes


def test_native_logits_of_some_rows(tiny_llama):
    """Logits of rows asked for out of order are those rows', and a call's result outlives the next call."""
    model = _load(tiny_llama, native=True)
    every = _logits(model, PROMPT)
    hidden = torch.randn(9, model.config.hidden_size)
    with torch.inference_mode():
        all_rows, some_rows = model.compute_logits(hidden), model.compute_logits(hidden[torch.tensor([7, 2])])
    torch.testing.assert_close(some_rows, all_rows[[7, 2]], rtol=0, atol=0)
    torch.testing.assert_close(_logits(model, PROMPT), every, rtol=0, atol=0)


def test_loading_imports_no_transformers(tiny_llama, tmp_path):
    import subprocess
    import sys

    code = (
        "import sys, torch; from pathlib import Path; from paged_backend.model.loader import load_model; "
        "from paged_backend.model_source import ModelSource; "
        f"load_model(ModelSource(Path({str(tiny_llama)!r}), False), dtype=torch.float32, device='cpu'); "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_loaded_model_takes_no_gradients(tiny_llama):
    assert not any(parameter.requires_grad for parameter in _load(tiny_llama).parameters())


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tiny_llama, tmp_path):
    """A directory to damage, and its tensors."""
    path = tmp_path / "model"
    shutil.copytree(tiny_llama, path)
    return path, load_file(path / "model.safetensors")


def _save(path, tensors) -> None:
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_sharded_directories(copied):
    path, tensors = copied
    whole = _load(path)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, path / file)
    (path / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, parameter in _load(path).named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name))

    (path / "b.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"not there: b\.safetensors"):
        _load(path)


def test_index_may_not_point_outside(copied):
    path, _ = copied
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../model.safetensors"}}))
    with pytest.raises(ModelLoadError, match="not there"):
        _load(path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_unopened(copied, file):
    path, _ = copied
    (path / "model.safetensors").unlink()
    (path / file).write_bytes(b"anything at all")
    with pytest.raises(ModelLoadError, match=f"{file}.*convert them to safetensors"):
        _load(path)


def test_no_weights(copied):
    path, _ = copied
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors"):
        _load(path)


def test_damaged_weights(copied):
    path, _ = copied
    (path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!")
    with pytest.raises(ModelLoadError, match=r"cannot read .*model\.safetensors"):
        _load(path)


def test_missing_unexpected_and_misshaped_are_named(copied):
    path, tensors = copied
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2, 2)
    tensors["model.norm.weight"] = torch.ones(63)
    _save(path, tensors)
    with pytest.raises(ModelLoadError) as caught:
        _load(path)
    text = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in text
    assert "unexpected: model.layers.2.mlp.up_proj.weight" in text
    assert "mis-shaped: model.norm.weight [63], expected [64]" in text


def test_long_lists_of_names_are_cut(copied):
    path, tensors = copied
    _save(path, {"model.norm.weight": tensors["model.norm.weight"]})
    with pytest.raises(ModelLoadError, match="and 15 more"):
        _load(path)


def test_harmless_extras_are_ignored(copied):
    path, tensors = copied
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    _save(path, tensors)
    _load(path)


def test_integer_weights_are_refused(copied):
    path, tensors = copied
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int32)
    _save(path, tensors)
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight.*int32"):
        _load(path)
