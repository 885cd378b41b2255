"""Log-probabilities against torch.log_softmax and a full sort; ties; ranks; beam candidates against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from paged_backend.errors import PagedBackendError
from paged_backend.sampling.logprobs import beam_candidates, token_logprobs
from paged_backend.sampling.penalties import TokenHistory, gather_penalties

LOWEST = np.finfo(np.float32).min


def _logits(rows: int, vocabulary: int, *, coarse: bool = False) -> torch.Tensor:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows + vocabulary)) * 3
    # Rounded, so that many tokens are equal, as with a bfloat16 model.
    return logits.round() if coarse else logits


def _order(row: torch.Tensor) -> list[int]:
    """Token ids by score, equal ones by id: a full sort."""
    return sorted(range(len(row)), key=lambda token: (-row[token].item(), token))


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("vocabulary", [1, 5, 160, 3001])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_brute_force(vocabulary, count, coarse):
    logits = _logits(6, vocabulary, coarse=coarse)
    before = logits.clone()
    tokens = np.random.default_rng(count).integers(0, vocabulary, 6)
    found = token_logprobs(logits, tokens, count)
    assert torch.equal(logits, before)
    assert found.top_ids.shape == found.top_logprobs.shape == (6, min(count, vocabulary))
    expected = logits.double().log_softmax(-1).numpy()
    for i, token in enumerate(tokens):
        order = _order(logits[i])
        assert found.top_ids[i].tolist() == order[:count]
        assert found.ranks[i] == order.index(token) + 1
        np.testing.assert_allclose(found.top_logprobs[i], expected[i, order[:count]], atol=1e-5)
        np.testing.assert_allclose(found.logprobs[i], expected[i, token], atol=1e-5)


def test_equal_tokens_come_by_id():
    flat = token_logprobs(torch.zeros(2, 1000), np.array([0, 999]), 3)
    assert flat.top_ids.tolist() == [[0, 1, 2]] * 2
    assert flat.ranks.tolist() == [1, 1000]
    steps = torch.tensor([[1.0, 2.0, 1.0, 3.0, 1.0, 2.0, 1.0]])
    assert token_logprobs(steps, np.array([2]), 5).top_ids.tolist() == [[3, 1, 5, 0, 2]]
    assert token_logprobs(steps, np.array([2]), 5).ranks.tolist() == [5]


def test_ranks_tell_apart_what_rounding_makes_equal():
    """Log-probabilities of large logits lose the last bits of a difference; the argmax is of rank 1 nonetheless."""
    logits = torch.zeros(1, 50)
    logits[0, 7] = 1e-7
    logits[0, 20] = 2e-7
    found = token_logprobs(logits, np.array([20]), 3)
    assert found.ranks.tolist() == [1]
    assert found.top_ids.tolist() == [[20, 7, 0]]


def test_large_logits_keep_their_digits():
    logits = torch.tensor([[20000.0, 20001.0, -20000.0]])
    found = token_logprobs(logits, np.array([0]), 3)
    np.testing.assert_allclose(found.top_logprobs[0], [-0.31326166, -1.3132616, -40001.3132], rtol=1e-6)


def test_what_is_ruled_out_is_finite():
    logits = torch.full((1, 30), -float("inf"))
    logits[0, 4] = 1.0
    found = token_logprobs(logits, np.array([4]), 3)
    assert (found.logprobs.tolist(), found.ranks.tolist(), found.top_ids.tolist()) == ([0.0], [1], [[4, 0, 1]])
    assert found.top_logprobs.tolist() == [[0.0, LOWEST, LOWEST]]


@pytest.mark.parametrize("coarse", [False, True])
def test_rows_do_not_depend_on_their_batch(coarse):
    logits, tokens = _logits(9, 500, coarse=coarse), np.arange(9) * 50
    together = token_logprobs(logits, tokens, 7)
    for i in range(9):
        alone = token_logprobs(logits[i : i + 1], tokens[i : i + 1], 7)
        for name in together.__slots__:
            assert np.array_equal(getattr(alone, name)[0], getattr(together, name)[i]), name


# ---- beams ---------------------------------------------------------------------------------------------------------


def test_beams_without_penalties_are_the_most_likely_tokens():
    logits = _logits(4, 300)
    ids, values = beam_candidates(logits, None, 8)
    expected = logits.log_softmax(-1).topk(8, dim=-1)
    assert ids.tolist() == expected.indices.tolist()
    assert values.tolist() == expected.values.tolist()


@pytest.mark.parametrize("penalty", [0.7, 1.8])
def test_beams_are_penalised_as_transformers_does(penalty):
    """On log-probabilities, which are not normalised again."""
    logits = _logits(3, 300)
    # The best tokens among those penalised, so that it matters.
    tokens = torch.cat([logits.topk(5, dim=-1).indices, torch.arange(60).reshape(3, 20)], dim=-1)
    histories = []
    for row in tokens.numpy():
        histories.append(TokenHistory(10, repetition=penalty, presence=0.0, frequency=0.0))
        histories[-1].follow(row)
    before = logits.clone()
    ids, values = beam_candidates(logits, gather_penalties(range(3), histories), 8)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(tokens, before.log_softmax(-1)).topk(8, dim=-1)
    assert torch.equal(logits, before)
    assert ids.tolist() == expected.indices.tolist()
    assert values.tolist() == expected.values.tolist()


def test_beams_presence_and_frequency_by_hand():
    logits = torch.zeros(1, 4)
    history = TokenHistory(1, repetition=1.0, presence=0.5, frequency=1.0)
    history.follow(np.array([0, 1, 2, 2]))
    ids, values = beam_candidates(logits, gather_penalties([0], [history]), 9)
    assert ids.tolist() == [[0, 3, 1, 2]]
    np.testing.assert_allclose(values, [[-np.log(4), -np.log(4), -np.log(4) - 1.5, -np.log(4) - 2.5]], rtol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_logits_of_beams_are_an_error(value):
    logits = _logits(3, 100)
    logits[1, 60] = value
    with pytest.raises(PagedBackendError, match=r"not finite \(beams \[1\]"):
        beam_candidates(logits, None, 4)
    with pytest.raises(PagedBackendError, match=r"not finite \(beams \[0\]"):
        beam_candidates(torch.full((1, 20), -float("inf")), None, 4)
