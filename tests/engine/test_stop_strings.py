"""Stop strings over the engine's real steps: nothing of one leaks, text, ids and log-probabilities stay aligned."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend import LLM, SamplingParams
from paged_backend.engine.outputs import SequenceDelta

PROMPT = "the cat and the dog or 12"
# Tokens of printable ASCII: one character each, and the longer ones of the tiny tokenizer.
PRINTABLE = [*range(36, 97), *range(259, 268)]


@pytest.fixture(scope="module")
def llm(text_model):
    with LLM(str(text_model), dtype="float32", num_kv_blocks=64, num_threads=1) as made:
        yield made


def _params(**options) -> SamplingParams:
    # A bias towards the long tokens, which the random model rarely writes; penalties keep it from repeating itself.
    defaults = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "repetition_penalty": 1.3}
    defaults["frequency_penalty"] = 0.5
    bias = dict.fromkeys(range(259, 268), 2.0)
    return SamplingParams(**{**defaults, "allowed_token_ids": PRINTABLE, "logit_bias": bias, **options})


def _stream(llm: LLM, params: SamplingParams) -> list[SequenceDelta]:
    engine = llm.engine
    engine.add_request(engine.make_request("r", PROMPT, params))
    deltas = []
    while engine.has_unfinished_requests():
        deltas += engine.step()
    return deltas


@pytest.fixture(scope="module")
def greedy(llm) -> list[SequenceDelta]:
    return _stream(llm, _params())


@pytest.fixture(scope="module")
def text(greedy) -> str:
    joined = "".join(delta.text for delta in greedy)
    # Long enough, varied, and with tokens of several characters: otherwise the tests below would show little.
    assert len(joined) > 64
    assert len(set(joined)) > 10
    assert any(len(delta.text) > 1 for delta in greedy)
    return joined


def _check(llm: LLM, deltas: list[SequenceDelta], text: str, stop: str, include: bool) -> None:
    start = text.index(stop)
    wanted = text[: start + len(stop)] if include else text[:start]
    shown = ""
    for delta in deltas:
        shown += delta.text
        # At every moment: a beginning of what may be shown.
        assert wanted.startswith(shown)
    assert shown == wanted
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    # The tokens end with the one that completes the match, not one earlier or later.
    spelled = llm.engine.tokenizer.decode(ids)
    assert spelled.startswith(text[: start + len(stop)])
    assert not llm.engine.tokenizer.decode(ids[:-1]).startswith(text[: start + len(stop)])
    for delta in deltas:
        assert len(delta.logprobs or []) == len(delta.token_ids)
        for position, token_id in zip(delta.logprobs or [], delta.token_ids, strict=True):
            assert next(iter(position)) == token_id
            assert position[token_id].decoded_token == llm.engine.tokenizer.decode([token_id])


def test_no_slice_of_eight_characters_leaks(llm, text):
    """Every one of them, with the stop string left out and kept."""
    for start in range(0, len(text) - 8, 2):
        include = start % 4 == 0
        stop = text[start : start + 8]
        params = _params(stop=stop, include_stop_str_in_output=include, logprobs=0)
        _check(llm, _stream(llm, params), text, stop, include)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_begins_and_ends_inside_tokens(llm, greedy, text, include):
    at, found = 0, None
    pieces = [delta.text for delta in greedy]
    for before, after in itertools.pairwise(pieces):
        stop = before[-1:] + after[:1]
        if len(before) > 1 and len(after) > 1 and text.index(stop) == at + len(before) - 1:
            found = stop
            break
        at += len(before)
    assert found, "the greedy text has two long tokens in a row"
    _check(llm, _stream(llm, _params(stop=found, include_stop_str_in_output=include, logprobs=1)), text, found, include)


@given(st.data())
@settings(max_examples=25)
def test_of_several_the_one_complete_first_wins(llm, text, data):
    cuts = data.draw(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 12)), min_size=2, max_size=4))
    stops = [text[start : start + length] for start, length in cuts]
    first = min(stops, key=lambda stop: text.index(stop) + len(stop))
    deltas = _stream(llm, _params(stop=stops))
    shown = "".join(delta.text for delta in deltas)
    # A token may complete several at once; then the one that is complete first in the text counts.
    end = text.index(first) + len(first)
    assert deltas[-1].stop_reason in stops
    assert text.index(deltas[-1].stop_reason) + len(deltas[-1].stop_reason) == end
    assert text.startswith(shown)
    assert len(shown) <= end


def test_what_was_held_back_is_released_at_the_end(llm, text, greedy):
    last = "".join(delta.text for delta in greedy)[-3:]
    deltas = _stream(llm, _params(stop=last + "\n never"))
    assert "".join(delta.text for delta in deltas) == text
    assert deltas[-1].finish_reason == "length"
