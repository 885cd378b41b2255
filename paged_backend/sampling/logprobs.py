"""Log-probabilities: of sampled tokens, of the most likely ones, and of a beam's continuations.

Tokens are ordered by score, equal scores by id (the lower first), so that a rank and a list of the best mean the same
thing on every device. The vocabulary is searched, never sorted. What leaves here is finite: a token that the model
rules out has the lowest float32. Knows scores; no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paged_backend.errors import PagedBackendError
from paged_backend.sampling.penalties import PenaltyBatch, penalise
from paged_backend.sampling.sampler import take_rows

_LOWEST = float(np.finfo(np.float32).min)


@dataclass(slots=True)
class LogprobBatch:
    """Log-probabilities of L rows, numpy arrays.

    Attributes:
        logprobs, ranks: float32 and int64 [L], of the sampled tokens; the most likely token has rank 1.
        top_ids, top_logprobs: int64 and float32 [L, k], the most likely tokens, best first.
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def token_logprobs(logits: torch.Tensor, tokens: np.ndarray, count: int) -> LogprobBatch:
    """Log-probabilities of sampled tokens and of the most likely ones.

    Args:
        logits: float32 [L, vocabulary], as the model gave them.
        tokens: int64 [L], the sampled tokens.
        count: how many of the most likely tokens to return (less for a smaller vocabulary); may be 0.
    """
    chosen = torch.from_numpy(tokens).to(logits.device)[:, None]
    top_ids = _most_likely(logits, count)
    # By logits and not by log-probabilities, in which rounding makes close tokens equal.
    ranks = _ranks(logits, tokens, top_ids)
    wanted = torch.cat([chosen, torch.from_numpy(top_ids).to(logits.device)], dim=-1)
    values = logits.log_softmax(dim=-1).gather(-1, wanted).clamp_(min=_LOWEST).cpu().numpy()
    return LogprobBatch(values[:, 0], ranks, top_ids, values[:, 1:])


def beam_candidates(logits: torch.Tensor, penalties: PenaltyBatch | None, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The best continuations of beams: penalties change the log-probabilities, as in transformers' beam search.

    Args:
        logits: float32 [L, vocabulary], as the model gave them.
        penalties: of these rows.
        count: how many continuations to return (less for a smaller vocabulary).

    Returns:
        int64 and float32 [L, count]: token ids, best first, and their log-probabilities.

    Raises:
        PagedBackendError: a row's logits are not finite where its maximum should be: the model's output is broken.
    """
    scores = logits.log_softmax(dim=-1)
    # Infinity or NaN anywhere makes the sum, and with it the whole row, NaN.
    broken = np.flatnonzero(scores[:, 0].isnan().cpu().numpy())
    if broken.size:
        raise PagedBackendError(f"the model produced logits that are not finite (beams {broken.tolist()} of the step)")
    if penalties is not None:
        penalise(scores, penalties)
    ids = _most_likely(scores, count)
    values = scores.gather(-1, torch.from_numpy(ids).to(scores.device)).clamp_(min=_LOWEST)
    return ids, values.cpu().numpy()


def _most_likely(scores: torch.Tensor, count: int) -> np.ndarray:
    """int64 [L, count]: where the largest scores of each row are, best first; equal ones by id."""
    vocabulary = scores.shape[-1]
    count = min(count, vocabulary)
    if count == 0:
        return np.empty((scores.shape[0], 0), dtype=np.int64)
    found, indices = scores.topk(min(count + 1, vocabulary), dim=-1)
    values, ids = found.cpu().numpy(), indices.cpu().numpy()
    # Of tokens equal to the last one, topk takes any; the surplus one tells whether there are more.
    tied = np.flatnonzero(values[:, count - 1] == values[:, -1]) if count < vocabulary else np.empty(0, dtype=np.int64)
    values, ids = values[:, :count], ids[:, :count]
    if tied.size:
        ids[tied] = _lowest_ids_at_the_edge(scores[torch.from_numpy(tied).to(scores.device)], values[tied], ids[tied])
    return np.take_along_axis(ids, np.lexsort((ids, -values), axis=-1), axis=-1)


def _lowest_ids_at_the_edge(scores: torch.Tensor, values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """`ids` [T, count] (their `values` descending) with the lowest ids among the tokens that equal the last one."""
    vocabulary, count = scores.shape[-1], ids.shape[-1]
    last = torch.from_numpy(values[:, -1:].copy()).to(scores.device)
    # Larger for lower ids; 0 for tokens that are not at the edge.
    key = torch.arange(vocabulary, 0, -1, dtype=torch.int32, device=scores.device)
    lowest = torch.where(scores == last, key, 0).topk(count, dim=-1).indices.cpu().numpy()
    edge = values == values[:, -1:]
    place = np.cumsum(edge, axis=-1) - 1
    return np.where(edge, np.take_along_axis(lowest, np.maximum(place, 0), axis=-1), ids)


def _ranks(scores: torch.Tensor, tokens: np.ndarray, top_ids: np.ndarray) -> np.ndarray:
    """int64 [L]: the place of each row's token in the order by score and id, from 1; `top_ids` are the first ones."""
    matches = top_ids == tokens[:, None]
    # An argmax needs a column.
    ranks = matches.argmax(axis=-1) + 1 if matches.shape[1] else np.zeros(len(tokens), dtype=np.int64)
    beyond = np.flatnonzero(~matches.any(axis=-1))
    if beyond.size:
        index, chosen = (torch.from_numpy(a).to(scores.device) for a in (beyond, tokens[beyond, None]))
        others = take_rows(scores, index)
        own = others.gather(-1, chosen)
        ids = torch.arange(scores.shape[-1], device=scores.device)
        ahead = (others > own) | ((others == own) & (ids < chosen))
        ranks[beyond] = ahead.sum(dim=-1).cpu().numpy() + 1
    return ranks
