"""Which tokens may be sampled, and biases: allowed tokens, masks of an output's form, bad words, minimum lengths.

    logits -- masks -- banned tokens -- biases --> to the penalties

What is ruled out becomes -inf. A mask touches its whole row, everything else few entries; a row without rules pays
nothing. Rules follow from a row's token ids and the length of its prompt alone, so preemption cannot change them.
Knows numbers and scores; no requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from paged_backend.token_rules import TokenRules

_FLOAT32 = np.finfo(np.float32)
_NO_TOKENS = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class ConstraintBatch:
    """Constraints of a matrix of scores, numpy arrays.

    Attributes:
        masked_rows: int64 [M], distinct rows with a mask, ascending.
        masks: uint8 [M, ceil(vocabulary / 8)], a bit per token, lowest bit first; 1: allowed.
        banned_rows, banned_tokens: int64 [B], entries that are ruled out; a pair may come twice.
        biased_rows, biased_tokens, biases: int64 and float32 [E], what is added to which entries; no pair twice.
    """

    masked_rows: np.ndarray
    masks: np.ndarray
    banned_rows: np.ndarray
    banned_tokens: np.ndarray
    biased_rows: np.ndarray
    biased_tokens: np.ndarray
    biases: np.ndarray

    @property
    def narrowed_rows(self) -> np.ndarray:
        """int64, ascending: the rows that may have no token left."""
        return np.union1d(self.masked_rows, self.banned_rows)


class TokenConstraints:
    """The rules of one sequence.

    Args:
        rules: as the request states them.
        num_prompt_tokens: tokens of the prompt, which no rule counts.
    """

    def __init__(self, rules: TokenRules, num_prompt_tokens: int) -> None:
        self._num_prompt = num_prompt_tokens
        self._min_tokens = num_prompt_tokens + rules.min_tokens
        self._ending = np.array(rules.ending, dtype=np.int64)
        self._allowed = None if rules.allowed is None else np.array(rules.allowed, dtype=np.int64)
        self._mask = np.empty(0, dtype=np.uint8)
        self._bad_tokens = np.array([word[0] for word in rules.bad_words if len(word) == 1], dtype=np.int64)
        self._bad_words = [word for word in rules.bad_words if len(word) > 1]
        self._longest = max(map(len, self._bad_words), default=0)
        self.biased_tokens = np.array([token for token, _ in rules.biases], dtype=np.int64)
        bounded = [min(max(bias, float(_FLOAT32.min)), float(_FLOAT32.max)) for _, bias in rules.biases]
        self.biases = np.array(bounded, dtype=np.float32)

    def mask(self, vocabulary: int) -> np.ndarray | None:
        """uint8 [ceil(vocabulary / 8)], the allowed tokens; None: all are."""
        if self._allowed is None:
            return None
        if not self._mask.size:
            allowed = np.zeros(vocabulary, dtype=bool)
            allowed[self._allowed] = True
            self._mask = np.packbits(allowed, bitorder="little")
        return self._mask

    def banned(self, token_ids: np.ndarray) -> np.ndarray:
        """int64, tokens that must not follow `token_ids` (prompt and output)."""
        found = [self._bad_tokens]
        if len(token_ids) < self._min_tokens:
            found.append(self._ending)
        if self._bad_words:
            # The longest word needs all its tokens but the last.
            output = tuple(token_ids[max(self._num_prompt, len(token_ids) - self._longest + 1) :].tolist())
            ends = [word[-1] for word in self._bad_words if output[len(output) - len(word) + 1 :] == word[:-1]]
            found.append(np.array(ends, dtype=np.int64))
        return found[0] if len(found) == 1 else np.concatenate(found)


def gather_constraints(
    rows: Iterable[tuple[int, TokenConstraints | None, np.ndarray, bytes | None]], vocabulary: int
) -> ConstraintBatch:
    """The constraints of some rows of a matrix of scores.

    Args:
        rows: ascending row numbers; each with its rules, its token ids, and the mask of its form (a bit per token).
        vocabulary: width of the matrix.
    """
    masked_rows, masks = [], []
    banned: list[tuple[int, np.ndarray]] = []
    biased: list[tuple[int, TokenConstraints]] = []
    for row, rules, token_ids, form in rows:
        mask = None if rules is None else rules.mask(vocabulary)
        if form is not None:
            of_form = _fitted(np.frombuffer(form, dtype=np.uint8), vocabulary)
            mask = of_form if mask is None else mask & of_form
        if mask is not None:
            masked_rows.append(row)
            masks.append(mask)
        if rules is not None:
            banned.append((row, rules.banned(token_ids)))
            biased.append((row, rules))
    return ConstraintBatch(
        masked_rows=np.array(masked_rows, dtype=np.int64),
        masks=np.array(masks, dtype=np.uint8).reshape(len(masks), -(-vocabulary // 8)),
        banned_rows=np.repeat(np.array([row for row, _ in banned], dtype=np.int64), [len(ids) for _, ids in banned]),
        banned_tokens=np.concatenate([ids for _, ids in banned]) if banned else _NO_TOKENS,
        biased_rows=np.repeat(
            np.array([row for row, _ in biased], dtype=np.int64), [len(item.biases) for _, item in biased]
        ),
        biased_tokens=np.concatenate([item.biased_tokens for _, item in biased]) if biased else _NO_TOKENS,
        biases=np.concatenate([item.biases for _, item in biased]) if biased else np.empty(0, dtype=np.float32),
    )


class Constraining:
    """Applies constraints to a matrix of scores in place, and undoes it bit for bit.

    Args:
        scores: float32 [R, vocabulary], contiguous.
        batch: the constraints.
        kept_rows: rows that `undo` must bring back; a masked row is copied for it, so name only those.
    """

    def __init__(self, scores: torch.Tensor, batch: ConstraintBatch, kept_rows: np.ndarray) -> None:
        self._scores = scores
        device, entries = scores.device, scores.view(-1)
        kept = batch.masked_rows[np.isin(batch.masked_rows, kept_rows)]
        self._kept = torch.from_numpy(kept).to(device)
        self._whole = scores[self._kept]
        if batch.masked_rows.size:
            excluded = _excluded(batch.masks, scores)
            if len(excluded) == len(scores):
                scores.masked_fill_(excluded, -torch.inf)
            else:
                rows = torch.from_numpy(batch.masked_rows).to(device)
                scores.index_copy_(0, rows, scores[rows].masked_fill_(excluded, -torch.inf))
        self._banned = _places(scores, batch.banned_rows, batch.banned_tokens)
        self._before_ban = entries.index_select(0, self._banned)
        entries.index_fill_(0, self._banned, -torch.inf)
        self._biased = _places(scores, batch.biased_rows, batch.biased_tokens)
        self._before_bias = entries.index_select(0, self._biased)
        biases = torch.from_numpy(batch.biases).to(device)
        after = (self._before_bias + biases).clamp_(float(_FLOAT32.min), float(_FLOAT32.max))
        # What is ruled out stays so, and a score that shows a broken model stays too.
        entries.scatter_(0, self._biased, torch.where(self._before_bias.isfinite(), after, self._before_bias))

    def undo(self) -> None:
        """Bring the kept rows back (and of the others what is cheap)."""
        entries = self._scores.view(-1)
        entries.scatter_(0, self._biased, self._before_bias)
        entries.scatter_(0, self._banned, self._before_ban)
        self._scores.index_copy_(0, self._kept, self._whole)


def stuck_rows(scores: torch.Tensor, batch: ConstraintBatch) -> np.ndarray:
    """int64, ascending: the rows in which the constraints left no token; `scores` are the constrained ones."""
    rows = batch.narrowed_rows
    best = scores[torch.from_numpy(rows).to(scores.device)].amax(dim=-1).cpu().numpy()
    return rows[np.isneginf(best)]


def _fitted(mask: np.ndarray, vocabulary: int) -> np.ndarray:
    """The mask in as many bytes as the vocabulary needs; tokens that it does not reach are ruled out."""
    width = -(-vocabulary // 8)
    return mask[:width] if len(mask) >= width else np.pad(mask, (0, width - len(mask)))


def _excluded(masks: np.ndarray, scores: torch.Tensor) -> torch.Tensor:
    """bool [M, vocabulary], what masks rule out. Unpacked where the scores are: bits are an eighth of the bytes."""
    if scores.device.type == "cpu":
        bits = np.unpackbits(np.bitwise_not(masks), axis=-1, count=scores.shape[-1], bitorder="little")
        return torch.from_numpy(bits.view(bool))
    packed = torch.from_numpy(masks).to(scores.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=scores.device)
    return ((packed[:, :, None] >> shifts) & 1).view(len(masks), -1)[:, : scores.shape[-1]] == 0


def _places(scores: torch.Tensor, rows: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(rows * scores.shape[-1] + tokens).to(scores.device)
