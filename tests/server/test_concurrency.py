"""Many clients at once: nobody gets another's text, everybody gets one final, short requests overtake long ones."""

from __future__ import annotations

import pytest
from server.client import GREEDY, Call, ask, wait_for

pytestmark = pytest.mark.server

NOUNS = ("lighthouse", "teapot", "river", "violin", "comet", "bakery", "tortoise", "library")


def _prompts(count: int) -> list[str]:
    return [f"{i} {NOUNS[i % len(NOUNS)]}s, {i + 1} {NOUNS[i % len(NOUNS)]}s," for i in range(count)]


def _all_at_once(served, model: str, prompts: list[str]) -> dict[str, str]:
    params = {**GREEDY, "max_tokens": 5, "ignore_eos": True}
    calls = [Call(served.grpc_url, model, {"text_input": prompt, "stream": True}, params) for prompt in prompts]
    answers = [call.wait(linger=0.02) for call in calls]
    assert [answer.finals for answer in answers] == [1] * len(prompts)
    assert all(all(answer.texts) for answer in answers)
    return {prompt: answer.text for prompt, answer in zip(prompts, answers, strict=True)}


def test_64_streams_get_their_own_text(served):
    prompts = _prompts(64)
    texts = _all_at_once(served, "paged_llm", prompts)
    assert len(set(texts.values())) > 32
    # A mixed-up text would hardly be mixed up the same way again in another order, with other neighbours.
    assert _all_at_once(served, "paged_ensemble", prompts[::-1]) == texts
    for prompt in prompts[::6]:
        assert ask(served.grpc_url, "paged_llm", prompt, 5, ignore_eos=True) == texts[prompt]
    wait_for(served.metrics_url, running=0, waiting=0, used=0)


def test_a_short_request_overtakes_a_long_one(served):
    params = {**GREEDY, "ignore_eos": True}
    long = Call(served.grpc_url, "paged_llm", {"text_input": "Once", "stream": True}, {**params, "max_tokens": 40})
    long.next()
    short = Call(served.grpc_url, "paged_llm", {"text_input": "Hi", "stream": True}, {**params, "max_tokens": 3})
    assert short.wait().finals == 1
    answer = long.wait()
    assert answer.finals == 1
    assert long.times[-1] > short.times[-1]


@pytest.mark.parametrize("request_id", ["", "same"])
def test_clients_with_the_same_request_id_get_their_own_answers(served, request_id):
    params = {**GREEDY, "max_tokens": 5, "ignore_eos": True}
    prompts = _prompts(4)
    calls = [
        Call(served.grpc_url, model, {"text_input": prompt, "stream": True}, params, request_id=request_id)
        for prompt in prompts
        for model in ("paged_llm", "paged_ensemble")
    ]
    answers = [call.wait() for call in calls]
    assert [answer.finals for answer in answers] == [1] * 8
    for prompt, engine, ensemble in zip(prompts, answers[::2], answers[1::2], strict=True):
        assert engine.text == ensemble.text == ask(served.grpc_url, "paged_llm", prompt, 5, ignore_eos=True)
