"""Chooses the next tokens of a mixed batch from their logits.

Greedy rows take the argmax and pay for nothing else. The others go through a fixed order: temperature, min-p, top-k,
top-p, then the inverse of the cumulative distribution at one uniform number per row.

Probabilities become integers (units of 2**-40) before anything is summed over the vocabulary. Integer sums are exact
in any order, so which tokens top-p keeps and which one is drawn cannot depend on how a device arranges the sum, and
therefore not on the other rows of the batch. No path sorts the whole vocabulary unless top-p really needs it.

Knows logits and numbers; no requests, no models, no text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paged_backend.errors import PagedBackendError
from paged_backend.sampling.rng import uniform

_UNIT = float(1 << 40)
# Up to this k, torch.topk beats sorting by far; rows beyond it are handled apart so that they slow down no others.
_SMALL_K = 256
# How many candidates top-p looks at before it takes more; most distributions need few.
_FIRST_CANDIDATES = 64
_CANDIDATE_GROWTH = 8


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters of R rows, as numpy arrays [R].

    Attributes:
        greedy: bool, rows that take the most likely token.
        temperature: float32, positive where not greedy.
        top_k: int64, values below 1 are off.
        top_p: float32 in (0, 1].
        min_p: float32 in [0, 1].
        seeds: uint64, one per sequence.
        positions: int64, tokens the sequence has before the one to sample.
    """

    greedy: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray

    def select(self, rows: np.ndarray) -> SamplingBatch:
        """The given rows."""
        return SamplingBatch(
            *(getattr(self, name)[rows] for name in self.__slots__)  # in the order of the fields
        )


def sample(logits: torch.Tensor, batch: SamplingBatch) -> np.ndarray:
    """Choose one token per row.

    Args:
        logits: float32 [R, vocabulary]; not changed.
        batch: the rows' parameters.

    Returns:
        int64 [R] token ids.

    Raises:
        PagedBackendError: a row holds NaN or infinity where its maximum should be: the model's output is broken.
    """
    best, tokens = logits.max(dim=-1)
    drawn = np.flatnonzero(~batch.greedy)
    if drawn.size:
        whole = drawn.size == logits.shape[0]
        index = torch.from_numpy(drawn).to(logits.device)
        shifted = (logits if whole else logits[index]) - (best if whole else best[index])[:, None]
        tokens[index] = _draw(shifted, batch.select(drawn))
    # Checked last so that a GPU is waited for once; NaN reaches `best` from anywhere in its row.
    broken = np.flatnonzero(~np.isfinite(best.cpu().numpy()))
    if broken.size:
        raise PagedBackendError(f"the model produced logits that are not finite (rows {broken.tolist()} of the step)")
    return tokens.cpu().numpy()


def _draw(shifted: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Sample from rows of logits whose maximum is 0."""
    device = shifted.device
    scaled = shifted.div_(_column(batch.temperature, device))
    weights = token_weights(scaled, batch)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    chance = _column(uniform(batch.seeds, batch.positions), device).double()
    target = torch.minimum((chance * total).long(), total - 1)
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=weights.shape[-1] - 1)


def token_weights(scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """What each token weighs after all filters: int64 [R, vocabulary], 0 for tokens that are left out.

    Args:
        scaled: float32 [R, vocabulary], logits divided by the temperature.
        batch: the rows' parameters.
    """
    probabilities = scaled.softmax(dim=-1)
    # float64 holds a float32 times a power of two exactly; only the cut to an integer rounds.
    weights = (probabilities.double() * _UNIT).long()
    _apply_min_p(weights, probabilities, batch)
    _apply_top_k(weights, scaled, batch)
    _apply_top_p(weights, batch)
    return weights


def _apply_min_p(weights: torch.Tensor, probabilities: torch.Tensor, batch: SamplingBatch) -> None:
    if not batch.min_p.any():
        return
    floor = _column(batch.min_p, weights.device) * probabilities.amax(dim=-1, keepdim=True)
    weights.masked_fill_(probabilities < floor, 0)


def _apply_top_k(weights: torch.Tensor, scaled: torch.Tensor, batch: SamplingBatch) -> None:
    """Keep the k largest of each row, and whatever equals the k-th."""
    vocabulary = scaled.shape[-1]
    on = (batch.top_k > 0) & (batch.top_k < vocabulary)
    for rows in (np.flatnonzero(on & (batch.top_k <= _SMALL_K)), np.flatnonzero(on & (batch.top_k > _SMALL_K))):
        if not rows.size:
            continue
        index = torch.from_numpy(rows).to(weights.device)
        k = torch.from_numpy(batch.top_k[rows]).to(weights.device)[:, None]
        chosen = scaled[index]
        kth = chosen.topk(int(batch.top_k[rows].max()), dim=-1).values.gather(-1, k - 1)
        weights[index] = weights[index].masked_fill_(chosen < kth, 0)


def _apply_top_p(weights: torch.Tensor, batch: SamplingBatch) -> None:
    """Keep the smallest set of tokens that holds the share p of the remaining weight, the most likely first; of
    tokens that weigh the same at the edge, those with the lower ids."""
    rows = np.flatnonzero(batch.top_p < 1.0)
    if not rows.size:
        return
    index = torch.from_numpy(rows).to(weights.device)
    chosen = weights[index]
    share = _column(batch.top_p[rows], weights.device).double()
    needed = (share * chosen.sum(dim=-1, keepdim=True)).ceil().long().clamp_(min=1)
    lightest, allowed = _edge(chosen, needed)
    equal = chosen == lightest
    ambiguous = equal.sum(dim=-1, keepdim=True) > allowed
    if ambiguous.any():
        equal &= equal.cumsum(dim=-1) <= allowed
    weights[index] = chosen.masked_fill_(~(equal | (chosen > lightest)), 0)


def _edge(weights: torch.Tensor, needed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the heaviest tokens reach the weight `needed` [R, 1]: the weight of the last one taken, and how many of
    that weight are taken; both [R, 1]. Looks at few candidates first, at more while some row falls short."""
    count, vocabulary = _FIRST_CANDIDATES, weights.shape[-1]
    while True:
        heaviest = weights.topk(min(count, vocabulary), dim=-1).values
        reached = heaviest.cumsum(dim=-1)
        if count >= vocabulary or bool((reached[:, -1:] >= needed).all()):
            break
        count *= _CANDIDATE_GROWTH
    last = torch.searchsorted(reached, needed).clamp_(max=heaviest.shape[-1] - 1)
    lightest = heaviest.gather(-1, last)
    first_equal = (heaviest > lightest).sum(dim=-1, keepdim=True)
    return lightest, last - first_equal + 1


def _column(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)[:, None]
