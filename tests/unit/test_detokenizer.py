"""Incremental text: deltas join to the whole, characters are never split, stop strings never leak."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.engine.detokenizer import IncrementalDetokenizer, OutputText
from paged_backend.sampling_params import SamplingParams

TEXTS = ["🌶读ส한", "Café 123 😊 naïve — “quotes”", "  two  spaces\n\n\ttab", "plain ascii", "a", "👩‍👩‍👧‍👦 family"]


class ByteTokenizer:
    """One token per byte: every character beyond ASCII is split over tokens. Token 256 is special."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        pieces = [b"<end>" if i == 256 else bytes([i]) for i in ids if not (i == 256 and skip_special_tokens)]
        return b"".join(pieces).decode("utf-8", errors="replace")


class SpaceTokenizer:
    """Like SentencePiece: each token is a word with a leading space, and decoding strips the first space."""

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return "".join(f" w{i}" for i in ids)[1:]


def _stream(text_state: OutputText, ids: list[int]) -> tuple[list[str], str | None]:
    """Feed tokens as the engine does; returns the deltas and the stop string."""
    deltas = []
    for token_id in ids:
        delta, stop = text_state.append(token_id)
        deltas.append(delta)
        if stop is not None:
            return deltas, stop
    delta, stop = text_state.finish()
    return [*deltas, delta], stop


@pytest.mark.parametrize("text", TEXTS)
def test_joined_stream_is_the_text_and_no_character_is_split(text):
    tokenizer = ByteTokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = [detokenizer.append(i) for i in tokenizer.encode(text)]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_spaces_between_words_survive():
    detokenizer = IncrementalDetokenizer(SpaceTokenizer())
    assert [detokenizer.append(i) for i in (1, 2, 3)] == ["w1", " w2", " w3"]


@given(st.binary(max_size=40))
def test_any_bytes_join_to_what_the_tokenizer_decodes(data):
    tokenizer = ByteTokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    joined = "".join(detokenizer.append(i) for i in data) + detokenizer.flush()
    assert joined == tokenizer.decode(data)


def test_special_tokens_are_left_out_or_kept():
    ids = [*b"ab", 256, *b"c"]
    for skip, wanted in ((True, "abc"), (False, "ab<end>c")):
        detokenizer = IncrementalDetokenizer(ByteTokenizer(), skip)
        assert "".join(detokenizer.append(i) for i in ids) == wanted


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.booleans())
@settings(max_examples=300)
def test_stop_strings_cut_exactly(text, stops, include):
    tokenizer = ByteTokenizer()
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    deltas, stop = _stream(OutputText(tokenizer, params), tokenizer.encode(text))
    # The oracle: feed the whole characters one by one and look for a stop string at the end.
    wanted, wanted_stop = text, None
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            wanted_stop = max(ending, key=len)
            wanted = text[:end] if include else text[: end - len(wanted_stop)]
            break
    assert ("".join(deltas), stop) == (wanted, wanted_stop)


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4))
@settings(max_examples=300)
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(text, stops):
    """Of an alphabet so small that beginnings overlap; the oracle compares every end of the text."""
    tokenizer = ByteTokenizer()
    state = OutputText(tokenizer, SamplingParams(stop=stops))
    shown = ""
    for end, token_id in enumerate(tokenizer.encode(text), start=1):
        delta, stop = state.append(token_id)
        shown += delta
        if stop is not None:
            return
        ends = (text[end - length : end] for length in range(min(end, 6), 0, -1))
        held = next((tail for tail in ends if any(stop.startswith(tail) for stop in stops)), "")
        assert shown == text[: end - len(held)]


def test_hostile_stop_strings_cost_little():
    """Sixty-four long strings that begin again and again: a token costs its characters, not their lengths."""
    stops = ["a" * 900 + "b" * i + "c" for i in range(1, 64)] + ["a" * 1023 + "d"]
    tokenizer = ByteTokenizer()
    state = OutputText(tokenizer, SamplingParams(stop=stops))
    started = time.perf_counter()
    for _ in range(1001):
        state.append(97)
    assert time.perf_counter() - started < 5.0
    assert state.finish()[0] == "a" * 1001


def test_text_is_held_back_only_as_far_as_needed():
    tokenizer = ByteTokenizer()
    state = OutputText(tokenizer, SamplingParams(stop=["abcd"]))
    deltas = [state.append(i)[0] for i in b"xxabcxab"]
    assert deltas == ["x", "x", "", "", "", "abcx", "", ""]
    assert state.finish() == ("ab", None)


@given(st.text(min_size=1, max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=2))
@settings(max_examples=200)
def test_span_finds_every_delta_by_decoding_alone(text, stops):
    tokenizer = ByteTokenizer()
    state = OutputText(tokenizer, SamplingParams(stop=stops))
    steps = [lambda i=i: state.append(i) for i in tokenizer.encode(text)] + [state.finish]
    for take in steps:
        delta, stop = take()
        span = state.span(len(delta))
        assert (span is None) == (delta == "")
        if span is not None:
            assert tokenizer.decode(span.token_ids)[span.start : span.end] == delta
        if stop is not None:
            break


def test_span_windows_stay_short():
    tokenizer = ByteTokenizer()
    state = OutputText(tokenizer, SamplingParams())
    for i in tokenizer.encode("a long plain text " * 50):
        delta, _ = state.append(i)
        assert len(state.span(len(delta)).token_ids) <= 2


class WordTokenizer:
    """Joins tokens by spaces, special ones too, as word-level tokenizers do. Ids from 90 are added tokens."""

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return " ".join(self._spell(i) for i in ids if not (skip_special_tokens and i >= 90))

    def added_token(self, token_id: int) -> str | None:
        return f"<{token_id}>" if token_id >= 90 else None

    def _spell(self, token_id: int) -> str:
        return self.added_token(token_id) or f"w{token_id}"


@pytest.mark.parametrize(
    ("skip", "spaces", "wanted"),
    [
        (False, True, "w1 <90> <91> w2 <92>"),
        (False, False, "w1 <90><91> w2 <92>"),
        (True, False, "w1 w2"),
    ],
)
def test_spaces_between_special_tokens(skip, spaces, wanted):
    params = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    state = OutputText(WordTokenizer(), params)
    deltas, _ = _stream(state, [1, 90, 91, 2, 92])
    assert "".join(deltas) == wanted


def test_each_delta_has_its_span_without_the_needless_spaces():
    tokenizer = WordTokenizer()
    state = OutputText(tokenizer, SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False))
    for token_id in (90, 91, 92, 1):
        delta, _ = state.append(token_id)
        span = state.span(len(delta))
        assert tokenizer.decode(span.token_ids, skip_special_tokens=False)[span.start : span.end] == delta


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 6, 20])
def test_text_before_the_minimum_is_not_matched(min_tokens):
    tokenizer = ByteTokenizer()
    state = OutputText(tokenizer, SamplingParams(stop="ab", min_tokens=min_tokens, max_tokens=30))
    deltas, stop = _stream(state, tokenizer.encode("abxabyabz"))
    ends = [start for start in (0, 3, 6) if start >= min_tokens]
    wanted = "abxabyabz"[: ends[0]] if ends else "abxabyabz"
    assert ("".join(deltas), stop) == (wanted, "ab" if ends else None)
