"""Penalties: transformers' repetition penalty, presence and frequency by hand, counts that follow a growing row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from paged_backend.errors import PagedBackendError
from paged_backend.sampling.penalties import PenaltyBatch, TokenHistory, gather_penalties, penalise, restore
from paged_backend.sampling.sampler import SamplingBatch, sample

VOCABULARY = 300


def _history(tokens, num_prompt, *, repetition=1.0, presence=0.0, frequency=0.0) -> TokenHistory:
    history = TokenHistory(num_prompt, repetition=repetition, presence=presence, frequency=frequency)
    history.follow(np.array(tokens, dtype=np.int32))
    return history


def _batch(tokens, num_prompt, **penalties) -> PenaltyBatch:
    return gather_penalties([0], [_history(tokens, num_prompt, **penalties)])


def _logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


def _greedy(rows: int) -> SamplingBatch:
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    return SamplingBatch(greedy=np.ones(rows, dtype=bool), **{name: np.zeros(rows) for name in names})


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.1, 3.0])
@pytest.mark.parametrize("num_prompt", [1, 40, 200])
def test_repetition_is_that_of_transformers(penalty, num_prompt):
    """Over prompt and output alike, whichever is longer."""
    tokens = np.random.default_rng(num_prompt).integers(0, VOCABULARY, 200)
    logits = _logits(1)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(tokens)[None], logits.clone())
    penalise(logits, _batch(tokens, num_prompt, repetition=penalty))
    assert torch.equal(logits, expected)


def test_presence_and_frequency_by_hand():
    """Prompt 5, 5, 6 counts for neither; of the output 6, 7, 7, 7 each token for both."""
    logits = torch.zeros(1, 10)
    penalise(logits, _batch([5, 5, 6, 6, 7, 7, 7], 3, presence=0.5, frequency=0.25))
    assert logits[0].tolist() == [0, 0, 0, 0, 0, 0, -0.75, -1.25, 0, 0]
    logits = torch.zeros(1, 10)
    penalise(logits, _batch([5, 5, 6, 6, 7, 7, 7], 3, presence=-2.0, frequency=-1.0))
    assert logits[0].tolist() == [0, 0, 0, 0, 0, 0, 3.0, 5.0, 0, 0]


def test_all_together_in_order():
    """Repetition first, then the others subtract from its result; a prompt token is only divided."""
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0]])
    penalise(logits, _batch([0, 1, 2, 3, 3], 2, repetition=2.0, presence=0.5, frequency=0.25))
    assert logits[0].tolist() == [1.0, -4.0, 0.25, -5.0, 2.0]


def test_an_argmax_is_taken_after_penalties_and_logits_come_back():
    logits = _logits(3)
    best = logits.argmax(-1)
    before = logits.clone()
    histories = [_history([int(best[row])], 0, presence=2.0, frequency=2.0, repetition=9.0) for row in (0, 2)]
    batch = gather_penalties([0, 2], histories)
    raw = penalise(logits, batch)
    tokens = sample(logits, _greedy(3))
    assert (tokens == best.numpy()).tolist() == [False, True, False]
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert torch.equal(logits[1], before[1])
    restore(logits, batch, raw)
    assert torch.equal(logits, before)


def test_rows_do_not_depend_on_their_batch():
    rng = np.random.default_rng(2)
    histories = [
        _history(
            rng.integers(0, VOCABULARY, length),
            length // 2,
            repetition=rng.uniform(0.5, 2),
            presence=rng.uniform(-2, 2),
            frequency=rng.uniform(-2, 2),
        )
        for length in (1, 3, 64, 65, 500)
    ]
    together = _logits(7)
    alone = together.clone()
    penalise(together, gather_penalties([0, 1, 3, 4, 6], histories))
    for row, history in zip((0, 1, 3, 4, 6), histories, strict=True):
        penalise(alone[row : row + 1], gather_penalties([0], [history]))
    assert torch.equal(together, alone)


@pytest.mark.parametrize("repetition", [1.0, 1.5])
@pytest.mark.parametrize("steps", [[10], [3, 7], [4] + [1] * 6, [1] * 10])
def test_counts_follow_the_row_however_it_grows(repetition, steps):
    """Made at once or kept up: the same tokens and counts."""
    tokens = np.array([9, 8, 9, 9, 7, 7, 9, 6, 7, 5], dtype=np.int32)
    history = TokenHistory(4, repetition=repetition, presence=1.0, frequency=0.0)
    for end in np.cumsum(steps):
        history.follow(tokens[:end])
    expected = {7: 3, 9: 1, 6: 1, 5: 1} | ({8: 0} if repetition != 1.0 else {})
    assert dict(zip(history.tokens.tolist(), history.counts.tolist(), strict=True)) == expected


def test_many_distinct_tokens():
    tokens = np.concatenate([np.arange(1000), np.arange(500, 1500)])
    history = _history(tokens, 1000, repetition=2.0)
    assert history.tokens.tolist() == list(range(1500))
    assert history.counts.tolist() == [0.0] * 500 + [1.0] * 1000


def test_nothing_to_penalise_yet():
    logits = _logits(1)
    expected = logits.clone()
    penalise(logits, _batch([1, 2, 3], 3, frequency=1.0))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("repetition", [5e-324, 1e-300, 1e300])
def test_extreme_penalties_are_no_broken_model(repetition):
    logits = torch.tensor([[30.0, -30.0, 0.0, 1.0]])
    penalise(logits, _batch([0, 1, 2], 3, repetition=repetition))
    assert logits.isfinite().all()
    assert sample(logits, _greedy(1)).tolist() == [0 if repetition < 1 else 3]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_model_is_still_seen(value):
    logits = torch.zeros(1, 10)
    logits[0, 3] = value
    penalise(logits, _batch([3], 1, repetition=2.0))
    with pytest.raises(PagedBackendError, match="not finite"):
        sample(logits, _greedy(1))


def test_tokens_that_the_model_rules_out_stay_so():
    logits = torch.tensor([[-float("inf"), 1.0]])
    penalise(logits, _batch([0, 0], 0, repetition=0.5, presence=-2.0))
    assert logits.tolist() == [[-float("inf"), 1.0]]
