"""Cases that have broken other engines, on a tiny real model: whole blocks, recycled blocks, tight pools, groups."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from paged_backend import LLM, SamplingParams
from paged_backend.engine import engine as engine_module

GREEDY = {"temperature": 0, "ignore_eos": True}


def _prompt(length: int, seed: int = 0) -> dict:
    return {"prompt_token_ids": [(seed * 37 + i * i * 7 + i) % 150 + 1 for i in range(length)]}


@pytest.fixture
def make(tiny_llama):
    """Engines with blocks of 16 tokens and every step checked, closed at the end."""
    made: list[LLM] = []

    def build(**engine_args) -> LLM:
        engine_args = {"num_kv_blocks": 64, "num_threads": 1, "check_integrity": True, **engine_args}
        made.append(LLM(str(tiny_llama), skip_tokenizer_init=True, dtype="float32", block_size=16, **engine_args))
        return made[-1]

    yield build
    for llm in made:
        llm.close()


def _tokens(llm: LLM, prompts: list[dict], params) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[item.token_ids for item in output.outputs] for output in outputs]


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_lengths_around_whole_blocks(make, length):
    cold, llm = make(enable_prefix_caching=False), make()
    for params in (
        SamplingParams(max_tokens=20, **GREEDY),
        SamplingParams(max_tokens=20, n=2, seed=5, ignore_eos=True),
    ):
        expected = _tokens(cold, [_prompt(length)], params)
        for _ in range(2):
            assert _tokens(llm, [_prompt(length)], params) == expected
    (output,) = llm.generate(_prompt(length), SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.num_cached_tokens == (length - 1) // 16 * 16


def test_recycled_blocks_give_what_a_cold_run_gives(make):
    llm, params = make(num_kv_blocks=8), SamplingParams(max_tokens=10, **GREEDY)
    first = _tokens(llm, [_prompt(40)], params)
    for seed in range(1, 5):
        _tokens(llm, [_prompt(60, seed)], params)
    assert llm.stats()["block_evictions"] > 0
    (again,) = llm.generate(_prompt(40), params, use_tqdm=False)
    assert again.num_cached_tokens == 0
    assert [[again.outputs[0].token_ids]] == first


@pytest.mark.parametrize("how", [GREEDY, {"seed": 3, "ignore_eos": True}, {"seed": 3, "n": 2, "ignore_eos": True}])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_two_requests_that_fit_the_pool_only_one_by_one(make, how, mode):
    """Seven blocks; two prompts of 34 tokens that want 35 (with n=2 fewer) new ones each."""
    params = SamplingParams(max_tokens=14 if how.get("n") else 35, **how)
    prompts = [_prompt(34, 1), _prompt(34, 2)]
    expected = [_tokens(make(), [prompt], params)[0] for prompt in prompts]
    llm = make(num_kv_blocks=7, preemption_mode=mode, swap_space=0.01, watermark=0.0)
    assert _tokens(llm, prompts, params) == expected
    stats = llm.stats()
    assert stats["preemptions"] > 0
    assert (stats["swaps_in"] > 0) == (mode == "swap")
    assert stats["blocks_used"] == stats["host_blocks_used"] == 0


def test_deltas_of_a_preempted_stream_join_without_loss_or_repetition(make):
    params = SamplingParams(max_tokens=35, **GREEDY)
    prompts = [_prompt(34, 1), _prompt(34, 2)]
    expected = [_tokens(make(), [prompt], params)[0][0] for prompt in prompts]
    engine = make(num_kv_blocks=7, watermark=0.0).engine
    for name, prompt in zip("ab", prompts, strict=True):
        engine.add_request(engine.make_request(name, prompt["prompt_token_ids"], params))
    joined: dict[str, list[int]] = {"a": [], "b": []}
    ends = []
    while engine.has_unfinished_requests():
        for delta in engine.step():
            joined[delta.request_id] += delta.token_ids
            ends += [delta.request_id] * delta.request_finished
    assert engine.stats()["preemptions"] > 0
    assert [joined["a"], joined["b"]] == expected
    assert sorted(ends) == ["a", "b"]


def test_penalties_see_a_cached_prompt(make):
    params = SamplingParams(max_tokens=12, repetition_penalty=1.5, presence_penalty=0.4, **GREEDY)
    cold = _tokens(make(enable_prefix_caching=False), [_prompt(50)], params)
    llm = make()
    for _ in range(2):
        assert _tokens(llm, [_prompt(50)], params) == cold
    assert llm.stats()["prefix_cache_hits"] == 48


def test_four_outputs_of_different_lengths_stream_by_index(make):
    """Each ends at its own stop token: per-index joins right, one finish per index, one final flag."""
    llm = make()
    params = SamplingParams(n=4, seed=11, max_tokens=30, ignore_eos=True)
    whole = _tokens(llm, [_prompt(20)], params)[0]
    # Tokens at which some of the four stop early.
    stops = [whole[0][3], whole[1][9]]
    params = SamplingParams(n=4, seed=11, max_tokens=30, ignore_eos=True, stop_token_ids=stops)
    engine = llm.engine
    engine.add_request(engine.make_request("a", _prompt(20)["prompt_token_ids"], params))
    joined: list[list[int]] = [[], [], [], []]
    reasons: dict[int, str] = {}
    finals = 0
    while engine.has_unfinished_requests():
        for delta in engine.step():
            assert delta.index not in reasons
            joined[delta.index] += delta.token_ids
            finals += delta.request_finished
            if delta.finish_reason:
                reasons[delta.index] = delta.finish_reason
    for tokens, full in zip(joined, whole, strict=True):
        end = next((i for i, token in enumerate(full) if token in stops), len(full) - 1)
        assert tokens == full[: end + 1]
    assert len({len(tokens) for tokens in joined}) > 1
    assert len(reasons) == 4
    assert finals == 1


def test_a_seed_means_the_same_alone_and_in_company(make):
    llm = make()
    seeded = SamplingParams(seed=42, max_tokens=16, ignore_eos=True)
    alone = _tokens(llm, [_prompt(20)], seeded)
    company = [SamplingParams(seed=i, max_tokens=16, ignore_eos=True) for i in range(5)]
    prompts = [_prompt(9, i) for i in range(5)]
    together = _tokens(llm, [*prompts[:2], _prompt(20), *prompts[2:]], [*company[:2], seeded, *company[2:]])
    assert together[2] == alone[0]
    others = [_tokens(llm, [_prompt(20)], params) for params in company]
    assert all(other != alone for other in others)


def test_a_preempted_request_resumes_on_its_own_cached_blocks(make):
    llm = make(num_kv_blocks=9, watermark=0.0, max_num_batched_tokens=32)
    params = SamplingParams(max_tokens=30, **GREEDY)
    prompts = [_prompt(30, seed) for seed in range(4)]
    expected = [_tokens(make(), [prompt], params)[0] for prompt in prompts]
    assert _tokens(llm, prompts, params) == expected
    assert llm.stats()["recomputations"] > 0


@pytest.mark.parametrize("is_first", [False, True], ids=["waiting", "running"])
def test_a_deadline_ends_a_request_and_frees_its_blocks(make, is_first, monkeypatch):
    engine = make(max_num_seqs=1, max_num_batched_tokens=64).engine
    requests = {}
    for name in ("late", "patient") if is_first else ("patient", "late"):
        params = SamplingParams(max_tokens=200 if name == "late" else 9, **GREEDY)
        timeout_s = 60.0 if name == "late" else None
        requests[name] = engine.make_request(name, [1, 2, 3], params, timeout_s=timeout_s)
        engine.add_request(requests[name])
    late, patient = requests["late"], requests["patient"]
    engine.step()
    assert (late.first_token_time is not None) == is_first
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 61.0, perf_counter_ns=time.perf_counter_ns)
    monkeypatch.setattr(engine_module, "time", clock)
    ended = [delta for delta in engine.step() if delta.request_id == "late"]
    assert [(delta.finish_reason, delta.request_finished) for delta in ended] == [("timeout", True)]
    assert engine.live_request_ids() == ["patient"]
    while engine.has_unfinished_requests():
        engine.step()
    assert patient.sequences[0].num_output_tokens == 9
    assert engine.stats()["blocks_used"] == 0
