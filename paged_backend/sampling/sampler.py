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
    best, tokens = _most_likely(logits)
    drawn = np.flatnonzero(~batch.greedy)
    if drawn.size:
        index = torch.from_numpy(drawn).to(logits.device)
        shifted = take_rows(logits, index) - take_rows(best, index)[:, None]
        tokens[index] = _draw(shifted, batch.select(drawn))
    # Checked last so that a GPU is waited for once; NaN reaches `best` from anywhere in its row.
    broken = np.flatnonzero(~np.isfinite(best.cpu().numpy()))
    if broken.size:
        raise PagedBackendError(f"the model produced logits that are not finite (rows {broken.tolist()} of the step)")
    return tokens.cpu().numpy()


def _most_likely(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and its (first) index of each row; NaN counts as the maximum."""
    if logits.device.type != "cpu":
        return logits.max(dim=-1)
    # numpy searches with SIMD instructions, torch's CPU kernel with a loop some ten times slower.
    tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(-1, tokens[:, None])[:, 0], tokens


def take_rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows `index` (ascending); all of them without a copy."""
    return tensor if index.shape[0] == tensor.shape[0] else tensor[index]


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
    # A power of two scales a float32 exactly; only the cut to an integer rounds.
    weights = (probabilities * _UNIT).long()
    if batch.min_p.any():
        floor = _column(batch.min_p, weights.device) * probabilities.amax(dim=-1, keepdim=True)
        weights = torch.where(probabilities < floor, 0, weights)
    return _top_p(_top_k(weights, scaled, batch), batch)


def _top_k(weights: torch.Tensor, scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Keep the k largest of each row, and whatever equals the k-th."""
    vocabulary = scaled.shape[-1]
    on = (batch.top_k > 0) & (batch.top_k < vocabulary)
    for rows in (np.flatnonzero(on & (batch.top_k <= _SMALL_K)), np.flatnonzero(on & (batch.top_k > _SMALL_K))):
        if not rows.size:
            continue
        index = torch.from_numpy(rows).to(weights.device)
        k = torch.from_numpy(batch.top_k[rows]).to(weights.device)[:, None]
        chosen = take_rows(scaled, index)
        kth = chosen.topk(int(batch.top_k[rows].max()), dim=-1).values.gather(-1, k - 1)
        weights = _with_rows(weights, index, torch.where(chosen < kth, 0, take_rows(weights, index)))
    return weights


def _top_p(weights: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Keep the smallest set of tokens that holds the share p of the remaining weight, the most likely first; of
    tokens that weigh the same at the edge, those with the lower ids."""
    rows = np.flatnonzero(batch.top_p < 1.0)
    if not rows.size:
        return weights
    index = torch.from_numpy(rows).to(weights.device)
    chosen = take_rows(weights, index)
    share = _column(batch.top_p[rows], weights.device).double()
    needed = (share * chosen.sum(dim=-1, keepdim=True)).ceil().long().clamp_(min=1)
    lightest, taken = _edge(chosen, needed)
    above = chosen >= lightest
    # Rarely, more tokens weigh as much as the last one taken than fit; the first of them do.
    if (above.sum(dim=-1, keepdim=True) > taken).any():
        equal = chosen == lightest
        heavier = chosen > lightest
        above = heavier | (equal & (equal.cumsum(dim=-1) <= taken - heavier.sum(dim=-1, keepdim=True)))
    return _with_rows(weights, index, torch.where(above, chosen, 0))


def _with_rows(tensor: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`tensor` with the rows `index` replaced."""
    if index.shape[0] == tensor.shape[0]:
        return rows
    tensor[index] = rows
    return tensor


def _edge(weights: torch.Tensor, needed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the heaviest tokens reach the weight `needed` [R, 1]: the weight of the last one taken and how many are
    taken, both [R, 1]. Looks at few candidates first, and at more only for the rows that fall short."""
    lightest, taken = torch.empty_like(needed), torch.empty_like(needed)
    pending = torch.arange(weights.shape[0], device=weights.device)
    count, vocabulary = _FIRST_CANDIDATES, weights.shape[-1]
    while pending.numel():
        heaviest = take_rows(weights, pending).topk(min(count, vocabulary), dim=-1).values
        reached, goal = heaviest.cumsum(dim=-1), take_rows(needed, pending)
        done = (reached[:, -1] >= goal[:, 0]) | (count >= vocabulary)
        last = torch.searchsorted(reached, goal).clamp_(max=heaviest.shape[-1] - 1)
        settled = pending[done]
        lightest[settled], taken[settled] = heaviest.gather(-1, last)[done], last[done] + 1
        pending = pending[~done]
        count *= _CANDIDATE_GROWTH
    return lightest, taken


def _column(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)[:, None]
