"""Repetition, presence and frequency penalties: lower (or raise) the scores of tokens that a sequence holds already.

Only entries of such tokens are touched, so that a row pays for its distinct tokens and not for the vocabulary, and a
row without penalties pays nothing. What a row's penalties are follows from its token ids and the length of its prompt
alone: `TokenHistory` only remembers counts that could be made anew at any time, so preemption cannot change them.

The order is vLLM's: repetition (prompt and output tokens; positive scores divided, negative ones multiplied, as in
transformers), then frequency (times the count in the output), then presence (once if in the output).
Knows numbers and scores; no requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_FLOAT32 = np.finfo(np.float32)
_FIRST_CAPACITY = 64


@dataclass(slots=True)
class PenaltyBatch:
    """The entries to penalise in a matrix of scores, numpy arrays [E].

    Attributes:
        rows, tokens: int64, where the entries are; no pair twice.
        counts: float32, how often the sequence has generated the token; 0 if only its prompt holds it.
        repetition, presence, frequency: float32, the penalties.
    """

    rows: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    repetition: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray


class TokenHistory:
    """The distinct tokens of one sequence that has penalties, and how often it generated each.

    Args:
        num_prompt_tokens: tokens of the prompt, which count for the repetition penalty only.
        repetition, presence, frequency: the penalties; 1, 0 and 0 are off.
    """

    def __init__(self, num_prompt_tokens: int, *, repetition: float, presence: float, frequency: float) -> None:
        # Within what float32 can divide by and multiply with.
        self.repetition = min(max(repetition, float(_FLOAT32.tiny)), float(_FLOAT32.max))
        self.presence = presence
        self.frequency = frequency
        self._num_prompt = num_prompt_tokens
        self._num_seen = 0 if repetition != 1.0 else num_prompt_tokens
        self._places: dict[int, int] = {}
        self._tokens = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        self._counts = np.zeros(_FIRST_CAPACITY, dtype=np.float32)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def tokens(self) -> np.ndarray:
        """int64 [n], distinct token ids."""
        return self._tokens[: len(self)]

    @property
    def counts(self) -> np.ndarray:
        """float32 [n], how often each was generated."""
        return self._counts[: len(self)]

    def follow(self, token_ids: np.ndarray) -> None:
        """Take in the tokens that the sequence, now `token_ids`, has gained since the last call."""
        prompt = token_ids[self._num_seen : self._num_prompt]
        output = token_ids[max(self._num_seen, self._num_prompt) :]
        self._num_seen = max(self._num_seen, len(token_ids))
        for token in dict.fromkeys(prompt.tolist()):
            self._place(token)
        for token, count in Counter(output.tolist()).items():
            # The place first: finding it may replace the array.
            place = self._place(token)
            self._counts[place] += count

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[place] = token
        return place


def gather_penalties(rows: Sequence[int], histories: Sequence[TokenHistory]) -> PenaltyBatch:
    """The entries of some histories, each for the row of scores given beside it."""
    lengths = [len(history) for history in histories]

    def spread(values: Sequence[float], dtype: type) -> np.ndarray:
        return np.repeat(np.array(values, dtype=dtype), lengths)

    return PenaltyBatch(
        rows=spread(rows, np.int64),
        tokens=np.concatenate([history.tokens for history in histories]),
        counts=np.concatenate([history.counts for history in histories]),
        repetition=spread([history.repetition for history in histories], np.float32),
        presence=spread([history.presence for history in histories], np.float32),
        frequency=spread([history.frequency for history in histories], np.float32),
    )


def penalise(scores: torch.Tensor, batch: PenaltyBatch) -> torch.Tensor:
    """Apply the penalties in place.

    Args:
        scores: float32 [R, vocabulary], contiguous; logits or log-probabilities.
        batch: the entries.

    Returns:
        float32 [E], what the entries were before, for `restore`.
    """
    entries, places = scores.view(-1), _places(scores, batch)
    counts, repetition, presence, frequency = (
        torch.from_numpy(values).to(scores.device)
        for values in (batch.counts, batch.repetition, batch.presence, batch.frequency)
    )
    before = entries.index_select(0, places)
    after = torch.where(before > 0, before / repetition, before * repetition)
    after = after - frequency * counts - presence * (counts > 0)
    # An extreme penalty must not make scores infinite, which would look like a broken model; a score that is not finite
    # stays, so that a broken model is seen.
    bounded = after.clamp(float(_FLOAT32.min), float(_FLOAT32.max))
    entries.scatter_(0, places, torch.where(before.isfinite(), bounded, before))
    return before


def restore(scores: torch.Tensor, batch: PenaltyBatch, before: torch.Tensor) -> None:
    """Undo `penalise`, bit for bit."""
    scores.view(-1).scatter_(0, _places(scores, batch), before)


def _places(scores: torch.Tensor, batch: PenaltyBatch) -> torch.Tensor:
    """Where the entries are in the flat matrix: one index is several times faster than two."""
    return torch.from_numpy(batch.rows * scores.shape[-1] + batch.tokens).to(scores.device)
