"""The sampler: right distributions, the sets transformers keeps, rows independent of each other, broken logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from paged_backend.errors import PagedBackendError
from paged_backend.sampling.sampler import SamplingBatch, sample, token_weights

TOY_LOGITS = np.array([2.0, 1.5, 1.5, 0.0, -1.0, 0.7, -8.0, 1.49], dtype=np.float32)


def _batch(rows: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, greedy=False, seed0=0) -> SamplingBatch:
    return SamplingBatch(
        greedy=np.full(rows, greedy),
        temperature=np.full(rows, temperature, dtype=np.float32),
        top_k=np.full(rows, top_k, dtype=np.int64),
        top_p=np.full(rows, top_p, dtype=np.float32),
        min_p=np.full(rows, min_p, dtype=np.float32),
        seeds=np.arange(seed0, seed0 + rows, dtype=np.uint64),
        positions=np.full(rows, 11, dtype=np.int64),
    )


def _exact(logits: np.ndarray, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The definition, in float64, one filter after the other."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    p /= p.sum()
    p[p < min_p * p.max()] = 0.0
    if 0 < top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0.0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p - 1e-12]] = 0.0
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 2},  # a tie at the second place: both stay
        {"top_k": 5},
        {"top_p": 0.01},
        {"top_p": 0.6},
        {"top_p": 0.95},
        {"min_p": 0.3},
        {"temperature": 0.7, "top_k": 4, "top_p": 0.8},
        {"temperature": 1.7, "min_p": 0.1, "top_p": 0.9},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_distribution(params):
    """Chi-square of 40000 draws against the exact probabilities; tokens of probability 0 never appear."""
    draws = 40_000
    expected = _exact(TOY_LOGITS, **params) * draws
    tokens = sample(torch.from_numpy(TOY_LOGITS).expand(draws, -1), _batch(draws, **params))
    counts = np.bincount(tokens, minlength=len(TOY_LOGITS))
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    freedom = kept.sum() - 1
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 1e-9


def _random_logits(rows: int, vocabulary: int, scale: float, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("vocabulary", [50, 5000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
@pytest.mark.parametrize(
    ("params", "warper"),
    [
        ({"top_k": 7}, TopKLogitsWarper(7)),
        ({"top_k": 40}, TopKLogitsWarper(40)),
        ({"top_k": 900}, TopKLogitsWarper(900)),
        ({"top_p": 0.1}, TopPLogitsWarper(0.1)),
        ({"top_p": 0.9}, TopPLogitsWarper(0.9)),
        ({"top_p": 0.999}, TopPLogitsWarper(0.999)),
        ({"min_p": 0.02}, MinPLogitsWarper(0.02)),
        ({"min_p": 0.5}, MinPLogitsWarper(0.5)),
    ],
)
def test_kept_sets_are_those_of_transformers(vocabulary, scale, params, warper):
    logits = _random_logits(6, vocabulary, scale)
    expected = warper(None, logits.double()) > -float("inf")
    # Tokens below 2**-40 count as impossible here.
    expected &= logits.double().softmax(-1) >= 2.0**-40
    kept = token_weights(logits, _batch(6, **params)) > 0
    assert torch.equal(kept, expected)


def test_top_k_keeps_ties_and_top_p_takes_low_ids_first():
    flat = torch.zeros(1, 1000)
    assert (token_weights(flat, _batch(1, top_k=3)) > 0).sum() == 1000
    assert (token_weights(flat, _batch(1, top_p=0.25)) > 0).nonzero()[:, 1].tolist() == list(range(250))


@pytest.mark.parametrize("top_p", [1e-9, 0.3])
def test_top_p_keeps_at_least_one(top_p):
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    assert (token_weights(logits, _batch(1, top_p=top_p)) > 0).tolist() == [[False, True, False]]


def test_tiny_temperature_is_greedy():
    logits = _random_logits(64, 500, 1.0)
    assert sample(logits, _batch(64, temperature=1e-5)).tolist() == logits.argmax(-1).tolist()


def test_greedy_ignores_everything_else():
    logits = _random_logits(5, 300, 1.0)
    batch = _batch(5, greedy=True, temperature=0.0, top_k=3, top_p=0.5, min_p=0.9)
    assert sample(logits, batch).tolist() == logits.argmax(-1).tolist()


def _mixed_batch(rows: int) -> SamplingBatch:
    rng = np.random.default_rng(5)
    return SamplingBatch(
        greedy=rng.random(rows) < 0.2,
        temperature=rng.uniform(0.2, 2.0, rows).astype(np.float32),
        top_k=rng.choice([0, -1, 1, 20, 700, 10**12], rows),
        top_p=rng.choice([1.0, 0.2, 0.9, 0.999], rows).astype(np.float32),
        min_p=rng.choice([0.0, 0.0, 0.05], rows).astype(np.float32),
        seeds=rng.integers(0, 2**64, rows, dtype=np.uint64),
        positions=rng.integers(0, 4000, rows),
    )


@pytest.mark.parametrize("vocabulary", [160, 4099])
def test_rows_do_not_depend_on_their_batch(vocabulary):
    """Bit for bit: the weights of a row alone, in any order and company, and so the token."""
    rows = 48
    logits, batch = _random_logits(rows, vocabulary, 2.0), _mixed_batch(rows)
    together, weights = sample(logits, batch), token_weights(logits, batch)
    for i in range(rows):
        one = np.array([i])
        assert sample(logits[one], batch.select(one))[0] == together[i]
        assert torch.equal(token_weights(logits[one], batch.select(one))[0], weights[i])
    order = np.random.default_rng(1).permutation(rows)
    assert sample(logits[order], batch.select(order)).tolist() == together[order].tolist()
    part = order[:7]
    assert sample(logits[part], batch.select(part)).tolist() == together[part].tolist()


def test_input_is_left_alone_and_positions_matter():
    logits = _random_logits(200, 1000, 0.5)
    before = logits.clone()
    first = sample(logits, _batch(200))
    later = _batch(200)
    later.positions += 1
    assert torch.equal(logits, before)
    assert (sample(logits, later) != first).mean() > 0.9
    assert sample(logits, _batch(200)).tolist() == first.tolist()


def test_masked_tokens_are_never_drawn():
    logits = torch.full((500, 64), -float("inf"))
    logits[:, [3, 60]] = 0.0
    assert set(sample(logits, _batch(500)).tolist()) == {3, 60}


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_logits_are_an_error(greedy, value):
    logits = _random_logits(4, 100, 1.0)
    logits[2, 17] = value
    with pytest.raises(PagedBackendError, match=r"not finite \(rows \[2\]"):
        sample(logits, _batch(4, greedy=greedy, top_p=0.9))
    logits[2] = -float("inf")
    with pytest.raises(PagedBackendError, match="not finite"):
        sample(logits, _batch(4, greedy=greedy))
