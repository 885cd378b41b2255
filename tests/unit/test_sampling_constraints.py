"""Constraints of single tokens: transformers' processors, undone bit for bit, rows on their own, nothing left."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from paged_backend.sampling.constraints import Constraining, TokenConstraints, gather_constraints, stuck_rows
from paged_backend.token_rules import TokenRules

VOCABULARY = 301
INF = float("inf")


def _logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


def _form(*allowed: int, vocabulary: int = VOCABULARY) -> bytes:
    """A mask as a compiled form gives it: whole words of 32 bits."""
    bits = np.zeros(-(-vocabulary // 32) * 32, dtype=bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").tobytes()


def _gather(*rows, num_prompt=0):
    """(row, rules, tokens, form) with rules as `TokenRules`."""
    made = [
        (row, rules and TokenConstraints(rules, num_prompt), np.array(tokens, dtype=np.int32), form)
        for row, rules, tokens, form in rows
    ]
    return gather_constraints(made, VOCABULARY)


def _applied(rules: TokenRules, tokens: list[int], num_prompt: int = 0, form: bytes | None = None) -> torch.Tensor:
    logits = _logits(1)
    Constraining(logits, _gather((0, rules, tokens, form), num_prompt=num_prompt), np.empty(0, dtype=np.int64))
    return logits


def test_allowed_tokens_are_transformers_suppressed_ones():
    allowed = (0, 7, 8, 255, 300)
    others = [token for token in range(VOCABULARY) if token not in allowed]
    expected = SuppressTokensLogitsProcessor(others)(None, _logits(1))
    assert torch.equal(_applied(TokenRules(allowed=allowed), []), expected)


@pytest.mark.parametrize("output", [[], [5], [9, 5], [5, 6], [4, 5, 6], [5, 5, 6], [6, 5]])
def test_bad_words_are_those_of_transformers(output):
    words = [(3,), (5, 6), (5, 6, 7), (5, 9), (6, 6), (300,)]
    processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=299)
    # transformers has no output of no tokens; a token in front that is in no word stands for it.
    ids = torch.tensor([[100, *output]])
    expected = processor(ids, _logits(1))
    assert torch.equal(_applied(TokenRules(bad_words=tuple(words)), [100, *output]), expected)


def test_bad_words_count_the_output_only():
    """A word that the prompt begins is not forbidden, as in vLLM."""
    rules = TokenRules(bad_words=((5, 6),))
    assert _applied(rules, [1, 5], num_prompt=2).isfinite().all()
    assert (_applied(rules, [1, 5], num_prompt=1) == -INF).nonzero().tolist() == [[0, 6]]


@pytest.mark.parametrize("count", [0, 3, 4, 5])
def test_minimum_length_is_that_of_transformers(count):
    tokens = list(range(10, 16 + count))
    processor = MinNewTokensLengthLogitsProcessor(6, 4, [2, 77], device="cpu")
    expected = processor(torch.tensor([tokens]), _logits(1))
    rules = TokenRules(min_tokens=4, ending=(2, 77))
    assert torch.equal(_applied(rules, tokens, num_prompt=6), expected)


def test_biases_are_those_of_transformers():
    biases = {0: 1.5, 9: -30.0, 300: 100.0}
    processor = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])
    expected = processor(torch.tensor([[4, 4]]), _logits(1))
    assert torch.equal(_applied(TokenRules(biases=tuple(biases.items())), [4, 4]), expected)


def test_fixed_order():
    """What is not allowed, a bad word or too early stays out, whatever its bias."""
    rules = TokenRules(
        allowed=(1, 2, 3, 4), bad_words=((3,),), min_tokens=5, ending=(2,), biases=((0, 1e30), (2, 1e30), (3, 1e30))
    )
    found = _applied(rules, [], form=_form(1, 2, 3, 9))
    assert found.isfinite().nonzero().tolist() == [[0, 1]]


def test_extreme_biases_stay_finite():
    rules = TokenRules(biases=((0, 1.7e308), (1, -1.7e308)))
    assert _applied(rules, []).isfinite().all()


def test_a_broken_model_is_still_seen():
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 5] = float("nan")
    batch = _gather((0, TokenRules(biases=((5, 1.0),)), [], None))
    Constraining(logits, batch, np.empty(0, dtype=np.int64))
    assert logits[0, 5].isnan()


RULES = [
    None,
    TokenRules(allowed=tuple(range(0, 300, 3))),
    TokenRules(bad_words=((1,), (5,), (5, 6)), min_tokens=9, ending=(5, 1)),
    TokenRules(biases=((1, 3.0), (5, -3.0))),
    TokenRules(allowed=(1, 5, 6), bad_words=((5,),), biases=((5, 9.0), (6, 1.0)), min_tokens=1, ending=(1,)),
]
FORMS = [None, _form(1, 2, 5, 6, 30, 33)]
_row = st.tuples(st.sampled_from(RULES), st.lists(st.integers(0, 9), max_size=4), st.sampled_from(FORMS))


@given(st.lists(_row, min_size=1, max_size=6), st.data())
@settings(max_examples=60)
def test_rows_stand_alone_and_kept_ones_come_back(rows, data):
    narrowed = [(i, *row) for i, row in enumerate(rows) if row[0] is not None or row[2] is not None]
    kept = np.array(data.draw(st.sets(st.integers(0, len(rows) - 1)).map(sorted)), dtype=np.int64)
    logits, raw = _logits(len(rows)), _logits(len(rows))
    constraining = Constraining(logits, _gather(*narrowed), kept)
    for i, rules, tokens, form in narrowed:
        alone = raw[i : i + 1].clone()
        Constraining(alone, _gather((0, rules, tokens, form)), np.empty(0, dtype=np.int64))
        assert torch.equal(logits[i : i + 1], alone)
    plain = [i for i, row in enumerate(rows) if row[0] is None and row[2] is None]
    assert torch.equal(logits[plain], raw[plain])
    constraining.undo()
    assert torch.equal(logits[kept], raw[kept])
    assert torch.equal(logits[plain], raw[plain])


def test_rows_with_nothing_left():
    nothing = TokenRules(allowed=(4,), bad_words=((4,),))
    batch = _gather((0, nothing, [], None), (1, TokenRules(allowed=(4,)), [], None), (3, None, [], _form()))
    logits = _logits(4)
    Constraining(logits, batch, np.empty(0, dtype=np.int64))
    assert stuck_rows(logits, batch).tolist() == [0, 3]


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 288])
def test_masks_of_any_width(vocabulary):
    """Tokens that a form does not know of, beyond its vocabulary, are ruled out."""
    logits = torch.zeros(1, 288)
    batch = gather_constraints([(0, None, np.empty(0), _form(0, vocabulary - 1, vocabulary=vocabulary))], 288)
    Constraining(logits, batch, np.empty(0, dtype=np.int64))
    assert set(logits[0].isfinite().nonzero()[:, 0].tolist()) == {0, vocabulary - 1}
