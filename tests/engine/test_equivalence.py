"""The demo model through the engine equals transformers, token for token, however its work is scheduled.

All in float32 with greedy sampling: alone, together, in small chunks, preempted, on scattered blocks.
"""

from __future__ import annotations

import random

import pytest
import torch

from paged_backend import LLM, SamplingParams
from paged_backend.model_source import DEMO_MODEL, resolve_model

LENGTHS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 64, 100, 127, 200, 350, 700)
NEW_TOKENS = 12
TEXT = (
    "Paris is the capital of France and lies on the river Seine. Water boils at one hundred degrees. The quick brown "
    "fox jumps over the lazy dog while 12 engineers count 345 blocks of memory in a café: “paged attention” works."
)
WORDS = TEXT.split()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Sixteen prompts of 1 to 700 tokens, as ids."""
    from paged_backend.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_model(DEMO_MODEL))
    rng = random.Random(7)
    made = []
    for length in LENGTHS:
        token_ids = tokenizer.encode(" ".join(rng.choice(WORDS) for _ in range(length + 8)))
        assert len(token_ids) >= length
        made.append(token_ids[:length])
    return made


@pytest.fixture(scope="module")
def expected(prompts, demo_oracle) -> list[list[int]]:
    """What transformers' `generate` gives for each prompt alone."""
    outputs = []
    torch.set_num_threads(1)
    for prompt in prompts:
        ids = torch.tensor([prompt])
        result = demo_oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        outputs.append(result[0, len(prompt) :].tolist())
    return outputs


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
