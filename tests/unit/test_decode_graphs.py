"""Decode steps in padded, repeated form give what eager ones do; captured ones on a GPU too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import make_tiny_model

from paged_backend import LLM, SamplingParams
from paged_backend.model.loader import load_model
from paged_backend.model_source import ModelSource
from paged_backend.worker.decode_graphs import DecodeGraphs
from paged_backend.worker.kv_cache import allocate_kv_cache
from paged_backend.worker.model_runner import ModelRunner

PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 90 + 1 for j in range(n)]} for i, n in enumerate((1, 9, 16, 37, 5))]


def _generate(path, **engine_args) -> list[list[int]]:
    arguments = {"dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 64, "num_threads": 1, **engine_args}
    with LLM(str(path), check_integrity=True, **arguments) as llm:
        params = [SamplingParams(max_tokens=3 + i, temperature=0, ignore_eos=True) for i in range(len(PROMPTS))]
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_padded_steps_give_the_same(tiny_llama, monkeypatch):
    """Without a GPU nothing is captured, but buffers, padding and sizes are those of the graphs."""
    expected = _generate(tiny_llama, attention_backend="reference")
    captured = []

    def repeat(step):
        captured.append(step)
        return step

    init = ModelRunner.__init__

    def with_graphs(self, model, kv_cache, max_num_seqs, backend, *args, max_model_len, **options):
        init(self, model, kv_cache, max_num_seqs, backend, *args, max_model_len=max_model_len, **options)
        limits = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
        self._graphs = DecodeGraphs(model, kv_cache, backend=backend, capture=repeat, **limits)

    monkeypatch.setattr(ModelRunner, "__init__", with_graphs)
    assert _generate(tiny_llama, attention_backend="reference") == expected
    # Five sequences in a graph of eight, and fewer as they end; each size captured once.
    assert len(captured) == 4


def test_what_has_no_graph(tiny_llama):
    model = load_model(ModelSource(tiny_llama, is_gguf=False), dtype=torch.float32, device="cpu")
    cache = allocate_kv_cache(model.config.shape, 4, 8, torch.float32, torch.device("cpu"))
    limits = {"max_num_seqs": 300, "max_model_len": 64}
    graphs = DecodeGraphs(model, cache, backend="reference", capture=lambda step: step, **limits)
    assert [graphs.fits(count) for count in (0, 1, 256, 257)] == [False, True, True, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_captured_steps_give_the_same(tmp_path):
    path = make_tiny_model("llama", tmp_path)
    eager, captured = (
        _generate(path, device="cuda", block_size=16, enforce_eager=eager, gpu_memory_utilization=0.5)
        for eager in (True, False)
    )
    assert np.array_equal(eager[0], captured[0])
    assert eager == captured
