"""The demo model through the engine equals transformers, token for token, however its work is scheduled.

All in float32 with greedy sampling: alone, together, in small chunks, preempted, on scattered blocks.
"""

from __future__ import annotations

import random

import pytest

from paged_backend import LLM, SamplingParams
from paged_backend.model_source import DEMO_MODEL

NEW_TOKENS = 12


@pytest.fixture(scope="module")
def prompts(greedy_prompts) -> list[list[int]]:
    return greedy_prompts


@pytest.fixture(scope="module")
def expected(greedy_expected) -> list[list[int]]:
    return greedy_expected


PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)


def _generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def _llm(**engine_args) -> LLM:
    # One thread: a second one gains little here, and waits for ever on a machine that is busy with something else.
    return LLM(DEMO_MODEL, dtype="float32", num_threads=1, check_integrity=True, **engine_args)


def test_alone_and_all_together(prompts, expected):
    with _llm(num_kv_blocks=400) as llm:
        assert [_generate(llm, [prompt])[0] for prompt in prompts] == expected
        assert _generate(llm, prompts) == expected
        stats = llm.stats()
        assert stats["preemptions"] == 0
        assert stats["blocks_used"] == 0
        assert stats["requests_running"] == stats["requests_waiting"] == 0
        assert stats["generation_tokens"] == 2 * sum(map(len, expected))


def test_in_small_chunks(prompts, expected):
    with _llm(num_kv_blocks=400, max_num_batched_tokens=32) as llm:
        assert _generate(llm, prompts) == expected


def test_preempted(prompts, expected):
    # The longest prompt and its output need 46 blocks of the 50.
    with _llm(num_kv_blocks=50) as llm:
        assert _generate(llm, prompts) == expected
        assert llm.stats()["preemptions"] > 0
        assert llm.stats()["blocks_used"] == 0


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_on_scattered_blocks(prompts, expected, backend):
    with _llm(num_kv_blocks=200, attention_backend=backend) as llm:
        pool = llm.engine.blocks.pool
        taken = pool.allocate(pool.num_blocks)
        random.Random(1).shuffle(taken)
        for block_id in taken:
            pool.release(block_id)
        assert _generate(llm, prompts) == expected


def test_seeded_sampling_does_not_depend_on_company(prompts):
    seeded = [SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=16) for i in range(6)]
    chosen = [{"prompt_token_ids": p} for p in prompts[3:9]]
    with _llm(num_kv_blocks=50) as llm:
        together = llm.generate(chosen, seeded, use_tqdm=False)
        for prompt, params, output in zip(chosen, seeded, together, strict=True):
            (alone,) = llm.generate(prompt, params, use_tqdm=False)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
