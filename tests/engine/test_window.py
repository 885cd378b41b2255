"""A model with a sliding window (16 tokens) through the engine: transformers' tokens, and blocks released behind it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from helpers import oracle_greedy

from paged_backend import LLM, SamplingParams

WINDOW, BLOCK_SIZE, NEW_TOKENS = 16, 8, 25
LENGTHS = (3, 15, 16, 17, 23, 24, 25, 40)
PROMPTS = [[1, *((7 * i * i + 3 * i + n) % 150 + 5 for i in range(n - 1))] for n in LENGTHS]


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model("mistral_window")


@pytest.fixture(scope="module")
def oracle(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def expected(oracle):
    return [oracle_greedy(oracle, prompt, NEW_TOKENS) for prompt in PROMPTS]


def _llm(path, **engine_args) -> LLM:
    engine_args = {"num_kv_blocks": 100, "block_size": BLOCK_SIZE, "num_threads": 1, **engine_args}
    return LLM(str(path), dtype="float32", skip_tokenizer_init=True, check_integrity=True, **engine_args)


def _generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[list[int]]]:
    """Per prompt and output: its tokens."""
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [[item.token_ids for item in output.outputs] for output in outputs]


def _params(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **changes})


@pytest.mark.parametrize(
    "engine_args",
    [
        {},
        {"attention_backend": "reference"},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"long_prefill_token_threshold": 3},
        {"num_kv_blocks": 14, "watermark": 0.0, "enable_prefix_caching": False},
        {"num_kv_blocks": 14, "watermark": 0.0, "preemption_mode": "swap", "swap_space": 0.1},
    ],
    ids=["whole", "reference", "small steps", "chunked", "recomputed", "swapped"],
)
def test_greedy_tokens_are_those_of_transformers(path, expected, engine_args):
    with _llm(path, **engine_args) as llm:
        assert [_generate(llm, [prompt], _params())[0][0] for prompt in PROMPTS] == expected
        # Together, and the second time with what the cache kept.
        for _ in range(2):
            assert [outputs[0] for outputs in _generate(llm, PROMPTS, _params())] == expected
        stats = llm.stats()
        assert stats["blocks_used"] == 0
        if engine_args.get("num_kv_blocks"):
            assert stats["swaps_in" if "swap_space" in engine_args else "recomputations"] > 0


def test_the_window_matters(path, oracle, expected):
    """Otherwise the tests above would show nothing."""
    config = transformers.AutoConfig.from_pretrained(path)
    config.sliding_window = None
    wide = transformers.AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32)
    assert [oracle_greedy(wide, prompt, NEW_TOKENS) for prompt in PROMPTS] != expected


def test_blocks_in_use_stay_bounded(path, oracle):
    """200 tokens would fill 25 blocks; the window spans 3 at most."""
    with _llm(path) as llm:
        engine = llm.engine
        engine.add_request(engine.make_request("long", PROMPTS[1], _params(max_tokens=200)))
        tokens, most = [], 0
        while engine.has_unfinished_requests():
            for delta in engine.step():
                tokens += delta.token_ids
            most = max(most, engine.stats()["blocks_used"])
        assert most <= WINDOW // BLOCK_SIZE + 1
        assert tokens == oracle_greedy(oracle, PROMPTS[1], 200)


def _most_blocks_used(llm: LLM, monkeypatch) -> list[int]:
    """A list whose last entry is the highest count of blocks in use after any step from here on."""
    most, step = [0], llm.engine.step

    def counted():
        deltas = step()
        most.append(max(most[-1], llm.stats()["blocks_used"]))
        return deltas

    monkeypatch.setattr(llm.engine, "step", counted)
    return most


def test_releasing_blocks_changes_nothing(path, monkeypatch):
    """What the masks hide anyway: the same tokens whether the blocks behind the window are kept or given back."""
    used, found = [], []
    for window in (WINDOW, None):
        with _llm(path) as llm:
            scheduler = llm.engine.scheduler
            scheduler.policy = dataclasses.replace(scheduler.policy, sliding_window=window)
            most = _most_blocks_used(llm, monkeypatch)
            kinds = (_params(), _params(n=3, temperature=1.0, seed=5))
            found.append([_generate(llm, PROMPTS, params) for params in kinds])
            used.append(most[-1])
    assert found[0] == found[1]
    assert used[0] < used[1]


@pytest.mark.parametrize("num_kv_blocks", [100, 16])
def test_siblings_of_a_shared_prompt(path, expected, num_kv_blocks):
    """Three outputs share the prompt's blocks, and each releases them at its own time."""
    params = [_params(n=3), _params(n=3, temperature=1.0, seed=5)]
    with _llm(path, num_kv_blocks=num_kv_blocks, watermark=0.0) as llm, _llm(path, num_kv_blocks=300) as other:
        assert _generate(llm, PROMPTS, params[0]) == [[tokens] * 3 for tokens in expected]
        sampled = _generate(llm, PROMPTS, params[1])
        assert sampled == [_generate(other, [prompt], params[1])[0] for prompt in PROMPTS]
        assert any(len({tuple(tokens) for tokens in outputs}) > 1 for outputs in sampled)
        assert llm.stats()["blocks_used"] == 0
