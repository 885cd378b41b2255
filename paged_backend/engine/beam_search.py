"""`BeamSearch`: which beams of a request go on, with which tokens, and which outputs are the best.

Follows transformers' beam search (sequences and scores): per step the best continuations over all beams; those that
end become finished hypotheses, scored by log-probability / length ** length_penalty; the best that do not end are the
next beams. It knows sequences and log-probabilities; the engine carries its decisions out by forking and freeing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

from paged_backend.request import FinishReason, Request, Sequence
from paged_backend.sched.output import TokenLogprobs


def num_candidates(width: int, num_stop_tokens: int) -> int:
    """Continuations to consider per step: enough that `width` remain even if each beam's best ones all end it."""
    return max(2, 1 + num_stop_tokens) * width


class Continuation(NamedTuple):
    """A beam with one more token; `score` is the log-probability of its whole output."""

    score: float
    parent: Sequence
    token_id: int


@dataclass(slots=True)
class Hypothesis:
    """A finished output; `score` is `cumulative_logprob` / length ** length_penalty, end-of-sequence token counted."""

    score: float
    token_ids: list[int]
    cumulative_logprob: float
    finish: FinishReason


class BeamSearch:
    """Beam search of one request.

    Args:
        request: its live sequences are the beams.
        stop_token_ids: tokens that end an output.

    The beams' continuations are reported one by one, in any steps; once `is_ready`, `advance` takes the next step.
    """

    def __init__(self, request: Request, stop_token_ids: frozenset[int]) -> None:
        params = request.params
        assert params.beam_width is not None
        self._request = request
        self._width = params.beam_width
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._stop_token_ids = stop_token_ids
        self._num_considered = num_candidates(self._width, len(stop_token_ids))
        self._scores = {request.sequences[0].seq_id: 0.0}
        self._reports: dict[int, TokenLogprobs] = {}
        self._num_recomputations = 0
        self.finished: list[Hypothesis] = []

    def report(self, sequence: Sequence, candidates: TokenLogprobs) -> None:
        """A beam's most likely next tokens, best first."""
        if self._num_recomputations != self._request.num_recomputations:
            # Every beam is computed and reports anew; to go on before the last has would fork beams without blocks.
            self._num_recomputations = self._request.num_recomputations
            self._reports.clear()
        self._reports[sequence.seq_id] = candidates

    def is_ready(self) -> bool:
        """True when every beam has reported."""
        return self._reports.keys() == self._scores.keys()

    def advance(self) -> list[Continuation]:
        """One step of the search: the beams to go on with, best first; none when the search is over."""
        considered = self._best_continuations()
        length = self._request.sequences[0].num_output_tokens + 1
        ends = [self._finish_reason(item, length) for item in considered]
        # With early stopping a full set is final, but all that end in the step that fills it compete for it.
        if not (self._early_stopping is True and len(self.finished) == self._width):
            self._finish(considered, ends, length)
        going_on = [item for item, finish in zip(considered, ends, strict=True) if finish is None][: self._width]
        self._reports.clear()
        if not going_on or self._is_over(going_on[0].score, length):
            return []
        return going_on

    def continued(self, scores: dict[int, float]) -> None:
        """What the beams are now: sequence ids and the log-probabilities of their outputs."""
        self._scores = scores

    def best(self, count: int) -> list[Hypothesis]:
        """The `count` best finished outputs, best first."""
        return self.finished[:count]

    def _best_continuations(self) -> list[Continuation]:
        beams = {sequence.seq_id: sequence for sequence in self._request.live_sequences()}
        every = (
            Continuation(score + logprob, beams[seq_id], token_id)
            for seq_id, score in self._scores.items()
            for token_id, logprob in zip(self._reports[seq_id].top_ids, self._reports[seq_id].top_logprobs, strict=True)
        )
        return heapq.nlargest(self._num_considered, every, key=lambda item: item.score)

    def _finish_reason(self, item: Continuation, length: int) -> FinishReason | None:
        if item.token_id in self._stop_token_ids:
            return FinishReason("stop")
        if self._request.num_prompt_tokens + length >= self._request.max_total_tokens:
            return FinishReason("length")
        return None

    def _finish(self, considered: list[Continuation], ends: list[FinishReason | None], length: int) -> None:
        """Keep the best finished outputs; of the continuations only as many as there are beams may become one."""
        for item, finish in zip(considered[: self._width], ends, strict=False):
            if finish is not None:
                token_ids = [*item.parent.output_token_ids, item.token_id]
                score = item.score / length**self._length_penalty
                self.finished.append(Hypothesis(score, token_ids, item.score, finish))
        # Stable: of equal scores the one found first stays ahead.
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self._width :]

    def _is_over(self, best_running: float, length: int) -> bool:
        """True when no running beam is expected to beat the worst of a full set of finished outputs."""
        if len(self.finished) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0.0:
            length = self._request.max_total_tokens - self._request.num_prompt_tokens
        return best_running / length**self._length_penalty <= self.finished[-1].score
