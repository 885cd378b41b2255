"""The sampler: right distributions, the sets transformers keeps, rows independent of each other, broken logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from paged_backend.errors import PagedBackendError
from paged_backend.sampling import sampler
from paged_backend.sampling.sampler import SamplingBatch, sample, token_weights
from paged_backend.sampling_params import SamplingParams

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
        {"top_k": 5, "top_p": 0.7},
        {"top_k": 3, "min_p": 0.3},
        {"min_p": 0.3, "top_p": 0.5},
        {"temperature": 0.3, "min_p": 0.05, "top_k": 3},
        {"temperature": 5.0, "top_p": 0.99},
        {"top_k": 10**9},  # above the vocabulary: off
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


def _shifted(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.amax(dim=-1, keepdim=True)


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
    # Tokens that are 2**40 times less likely than the first count as impossible here.
    expected &= _shifted(logits).double().exp() >= 2.0**-40
    kept = token_weights(_shifted(logits), _batch(6, **params)) > 0
    assert torch.equal(kept, expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.6},
        {"temperature": 1.8, "top_k": 30},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.03},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.02, "top_p": 0.95},
        {"temperature": 1.1, "min_p": 0.01, "top_k": 25, "top_p": 0.9},
    ],
)
def test_probabilities_are_those_of_transformers(params, seed):
    """transformers' warpers one after the other, in the documented order."""
    logits = _random_logits(6, 400, 2.5, seed)
    scores = TemperatureLogitsWarper(params["temperature"])(None, logits.double())
    for name, warper in (("min_p", MinPLogitsWarper), ("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper)):
        if name in params:
            scores = warper(params[name])(None, scores)
    weights = token_weights(_shifted(logits) / params["temperature"], _batch(6, **params)).double()
    assert torch.allclose(weights / weights.sum(-1, keepdim=True), scores.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-9, 1e-12])
def test_tiny_temperatures_equal_greedy_whatever_the_model_computes_in(dtype, temperature):
    """Logits rounded to half precision tie at the top, which a mere division by the temperature would not resolve."""
    logits = _random_logits(200, 3000, 1.0)
    # Less above the best than half precision can tell.
    logits[:, 2999] = logits.amax(dim=-1) * (1 + 1e-4)
    logits = logits.to(dtype).float()
    params = SamplingParams(temperature=temperature, top_k=10**6, top_p=0.9)
    batch = _batch(200, temperature=params.temperature, top_k=10**6, top_p=0.9, greedy=params.is_greedy)
    assert sample(logits, batch).tolist() == logits.argmax(-1).tolist()
    if dtype is not torch.float32:
        best = logits.topk(2, dim=-1).values
        assert (best[:, 0] == best[:, 1]).any(), "no ties: the test would show nothing"


@pytest.mark.parametrize("vocabulary", [64, 2048, 9999])
@pytest.mark.parametrize("scale", [0.0, 0.2, 3.0])
@pytest.mark.parametrize("k", [1, 7, 30])
def test_looking_at_the_best_blocks_changes_nothing(vocabulary, scale, k, monkeypatch):
    """Draws are those of the whole vocabulary, ties at the k-th place included (rounded logits have many)."""
    logits = (_random_logits(40, vocabulary, scale) * 8).round() / 8
    batch = _batch(40, top_k=k, temperature=3.0)
    batch.top_k[::2] = max(1, k // 2)
    batch.top_p[::3] = 0.8
    found = sample(logits, batch)
    monkeypatch.setattr(sampler, "_MOST_BLOCKS", 0.0)
    assert sample(logits, batch).tolist() == found.tolist()


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("top_p", [0.2, 0.7, 0.95, 0.9999])
def test_top_p_without_sorting_keeps_what_sorting_keeps(scale, top_p):
    logits = _random_logits(20, 5000, scale)
    logits[10:] = (logits[10:] * 4).round() / 4  # many that weigh the same
    shifted = _shifted(logits)
    kept = token_weights(shifted, _batch(20, top_p=top_p)) > 0
    weights = token_weights(shifted, _batch(20))
    for row, weight in zip(kept, weights, strict=True):
        heaviest, order = weight.sort(descending=True, stable=True)
        needed = int(np.ceil(np.float64(np.float32(top_p)) * int(weight.sum())))
        count = int(torch.searchsorted(heaviest.cumsum(0), needed)) + 1
        assert set(row.nonzero()[:, 0].tolist()) == set(order[:count].tolist())


@pytest.mark.parametrize("size", [1, 1 << 12, 1 << 30])
def test_slices_change_nothing(size, monkeypatch):
    logits, batch = _random_logits(48, 700, 2.0), _mixed_batch(48)
    found = sample(logits, batch)
    monkeypatch.setattr(sampler, "_SLICE_LOGITS", size)
    assert sample(logits, batch).tolist() == found.tolist()


def test_greedy_and_top_k_rows_mixed():
    """Each kind as if alone: greedy rows take the best token, rows with a k one of their k best."""
    logits = _random_logits(90, 2000, 1.0)
    batch = _batch(90, top_k=3, temperature=5.0)
    batch.greedy = np.arange(90) % 3 == 0
    batch.top_k[1::3] = 10**9
    tokens = torch.from_numpy(sample(logits, batch))
    ranks = (logits > logits.gather(-1, tokens[:, None])).sum(-1)
    assert (ranks[0::3] == 0).all()
    assert (ranks[2::3] < 3).all()
    assert (ranks[2::3] > 0).any()
    assert (ranks[1::3] >= 3).any()


def test_top_k_keeps_ties_and_top_p_takes_low_ids_first():
    flat = torch.zeros(1, 1000)
    assert (token_weights(flat, _batch(1, top_k=3)) > 0).sum() == 1000
    assert (token_weights(flat, _batch(1, top_p=0.25)) > 0).nonzero()[:, 1].tolist() == list(range(250))


@pytest.mark.parametrize("top_p", [1e-9, 0.3])
def test_top_p_keeps_at_least_one(top_p):
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    assert (token_weights(_shifted(logits), _batch(1, top_p=top_p)) > 0).tolist() == [[False, True, False]]


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
    together, weights = sample(logits, batch), token_weights(_shifted(logits), batch)
    for i in range(rows):
        one = np.array([i])
        assert sample(logits[one], batch.select(one))[0] == together[i]
        assert torch.equal(token_weights(_shifted(logits[one]), batch.select(one))[0], weights[i])
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
