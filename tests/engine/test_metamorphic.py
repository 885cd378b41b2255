"""However its work is scheduled, a request gives the same tokens and the same log-probabilities (real model, float32).

Alone = batched = chunked = cached = preempted by recomputation = preempted by swapping = with a window that is never
reached, for greedy and seeded sampling, four outputs side by side and four beams, all with penalties.
"""

from __future__ import annotations

import dataclasses

import pytest

from paged_backend import LLM, SamplingParams
from paged_backend.model import config as model_config
from paged_backend.model_source import DEMO_MODEL

TEXT = (
    "The block table maps the logical blocks of a sequence to physical blocks of the cache, and the scheduler decides "
    "at every step which sequences compute their next tokens, so that short answers never wait for long ones to end."
)
LENGTHS = (5, 16, 20, 32)
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
KINDS = {
    "greedy": {"temperature": 0, "logprobs": 3},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 42, "logprobs": 3},
    # Not the whole vocabulary: in the thin tail, tokens lie as close in the cumulative distribution as the rounding
    # errors of matrix products of other shapes (1e-5 in a logit), and the same random number may pick a neighbour.
    "n=4": {"temperature": 1.0, "top_p": 0.9, "seed": 7, "n": 4, "logprobs": 3},
    "beam 4": {"temperature": 0, "use_beam_search": True, "beam_width": 4, "n": 4},
}
CASES = {
    "greedy, no penalties": SamplingParams(max_tokens=7, ignore_eos=True, **KINDS["greedy"]),
    **{name: SamplingParams(max_tokens=7, ignore_eos=True, **how, **PENALTIES) for name, how in KINDS.items()},
}
# Engine arguments of each schedule, and the counters that show that it really happened.
SMALL = {"num_kv_blocks": 6, "watermark": 0.0}
SCHEDULES = {
    "batched": ({}, []),
    "chunked by 1": ({"long_prefill_token_threshold": 1}, []),
    "chunked by 7": ({"long_prefill_token_threshold": 7}, []),
    "chunked by 16": ({"long_prefill_token_threshold": 16}, []),
    "a step of 16": ({"max_num_batched_tokens": 16, "max_num_seqs": 16}, []),
    "a step of 64": ({"max_num_batched_tokens": 64}, []),
    "recomputed": ({**SMALL, "enable_prefix_caching": False}, ["recomputations"]),
    "recomputed from cache": ({**SMALL}, ["recomputations"]),
    "overlapped": ({"async_scheduling": True}, []),
    "overlapped and recomputed": ({**SMALL, "async_scheduling": True}, ["recomputations"]),
    "swapped": ({**SMALL, "preemption_mode": "swap", "swap_space": 0.1}, ["swaps_out", "swaps_in"]),
}


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    from paged_backend.model_source import resolve_model
    from paged_backend.tokenizer import Tokenizer

    token_ids = Tokenizer.load(resolve_model(DEMO_MODEL)).encode(TEXT)
    assert len(token_ids) >= max(LENGTHS)
    # Different first tokens, so that nothing is shared by accident.
    return [{"prompt_token_ids": [100 + n, *token_ids[: n - 1]]} for n in LENGTHS]


def _llm(**engine_args) -> LLM:
    engine_args = {"num_kv_blocks": 200, "num_threads": 1, **engine_args}
    return LLM(DEMO_MODEL, dtype="float32", check_integrity=True, **engine_args)


def _generate(llm: LLM, prompts: list[dict], params: SamplingParams) -> list[list]:
    """Per prompt and output: tokens and everything that has a log-probability in it."""
    results = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        for item in output.outputs:
            positions = [
                {token: (p.logprob, p.rank) for token, p in position.items()} for position in item.logprobs or []
            ]
            results.append((item.token_ids, item.text, item.cumulative_logprob, positions))
    return results


def _assert_same(found: list, expected: list) -> None:
    assert [(tokens, text) for tokens, text, _, _ in found] == [(tokens, text) for tokens, text, _, _ in expected]
    for (_, _, total, positions), (_, _, expected_total, expected_positions) in zip(found, expected, strict=True):
        assert total == pytest.approx(expected_total, abs=2e-3)
        assert len(positions) == len(expected_positions)
        for position, wanted in zip(positions, expected_positions, strict=True):
            assert position.keys() == wanted.keys()
            for token, (logprob, rank) in position.items():
                assert logprob == pytest.approx(wanted[token][0], abs=1e-4)
                # Deep in the tail neighbours are as close as rounding errors.
                assert rank == pytest.approx(wanted[token][1], rel=0.02, abs=0.5)


@pytest.fixture(scope="module")
def alone(prompts) -> dict[str, list]:
    """Each request by itself, nothing cached."""
    with _llm(enable_prefix_caching=False) as llm:
        return {
            name: [result for prompt in prompts for result in _generate(llm, [prompt], params)]
            for name, params in CASES.items()
        }


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_same(prompts, alone, schedule):
    engine_args, counters = SCHEDULES[schedule]
    with _llm(**engine_args) as llm:
        for name, params in CASES.items():
            before = llm.stats()
            _assert_same(_generate(llm, prompts, params), alone[name])
            after = llm.stats()
            for counter in counters:
                assert after[counter] > before[counter], f"{name}: no {counter}"
            if params.num_rows > 1:
                assert after["block_copies"] > before["block_copies"]
            assert after["blocks_used"] == after["host_blocks_used"] == 0


def test_cached_gives_the_same(prompts, alone):
    with _llm() as llm:
        for name, params in CASES.items():
            _generate(llm, prompts, params)
            hits = llm.stats()["prefix_cache_hits"]
            _assert_same(_generate(llm, prompts, params), alone[name])
            assert llm.stats()["prefix_cache_hits"] > hits
            llm.reset_prefix_cache()
            assert llm.stats()["blocks_cached"] == 0


def test_a_window_that_is_not_reached_gives_the_same(prompts, alone, monkeypatch):
    """The kernels mask and the scheduler releases by the window; with none of it in reach, nothing changes."""
    window = max(LENGTHS) + 7 + 1
    read = model_config._from_gguf

    def with_window(*arguments):
        return dataclasses.replace(read(*arguments), sliding_window=window, mixed_windows=False)

    monkeypatch.setattr(model_config, "_from_gguf", with_window)
    with _llm() as llm:
        assert llm.engine.scheduler.policy.sliding_window == window
        for name, params in CASES.items():
            _assert_same(_generate(llm, prompts, params), alone[name])


def test_siblings_differ_and_seeds_decide(prompts, alone):
    """Four samples at temperature 1 are not all equal; another seed gives another text."""
    outputs = alone["n=4"]
    for first in range(0, len(outputs), 4):
        assert len({tuple(tokens) for tokens, *_ in outputs[first : first + 4]}) > 1
    with _llm() as llm:
        texts = {
            seed: llm.generate(prompts[3], SamplingParams(seed=seed, max_tokens=12), use_tqdm=False)[0].outputs[0].text
            for seed in (1, 2, 3)
        }
    assert len(set(texts.values())) == 3
