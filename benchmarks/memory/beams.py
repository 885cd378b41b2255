"""Beam search without a model: the real `BeamSearch` over made-up log-probabilities.

At every position each beam has 64 candidate tokens whose logits are normal, with standard deviation `SHARPNESS`: about
as peaked as a language model's (the best token has 0.5 of the probability on average). Beams draw independently, so a
search's rivals die out as a random walk would have it; a real model's beams resemble each other more. What is forked,
copied and freed follows from the search alone. Knows sequences; the simulation applies the decisions.
"""

from __future__ import annotations

import numpy as np

from paged_backend.engine.beam_search import BeamSearch, num_candidates
from paged_backend.request import Request, Sequence
from paged_backend.sched.output import TokenLogprobs
from paged_backend.sched.scheduler import Scheduler

NUM_CANDIDATES = 64
SHARPNESS = 3.0


class SyntheticBeams:
    """One request's beam search.

    Args:
        request: has one sequence and a beam width.
        seed: determines every log-probability.
        sharpness: standard deviation of the logits.
    """

    def __init__(self, request: Request, seed: int, sharpness: float = SHARPNESS) -> None:
        assert request.params.beam_width is not None
        self._request = request
        self._search = BeamSearch(request, frozenset())
        self._count = num_candidates(request.params.beam_width, 0)
        self._rng = np.random.default_rng(seed)
        self._sharpness = sharpness

    def report(self, sequence: Sequence) -> None:
        """The sequence's logits are there."""
        logits = self._sharpness * self._rng.standard_normal(NUM_CANDIDATES)
        logits -= logits.max()
        logprobs = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-logprobs)[: self._count]
        self._search.report(sequence, TokenLogprobs(0.0, 0, best.tolist(), logprobs[best].tolist()))

    def advance(self, scheduler: Scheduler) -> tuple[list[Sequence], bool] | None:
        """Take the next step if every beam has reported: drop, fork and extend, as the engine does.

        Returns:
            None if a beam is missing, else the beams that are new and whether the search goes on.
        """
        if not self._search.is_ready():
            return None
        continuations = self._search.advance()
        if not continuations:
            return [], False
        request, kept = self._request, {item.parent.seq_id for item in continuations}
        for sequence in request.sequences:
            if sequence.seq_id not in kept:
                scheduler.finish_sequence(sequence)
        beams: list[Sequence] = []
        new: list[Sequence] = []
        for item in continuations:
            beam = item.parent
            if beam in beams:
                beam = request.fork_sequence(item.parent)
                scheduler.fork(item.parent, beam)
                new.append(beam)
            beams.append(beam)
        request.sequences = beams
        for beam, item in zip(beams, continuations, strict=True):
            beam.token_ids.append(item.token_id)
            scheduler.tell_token(beam, item.token_id)
        self._search.continued({beam.seq_id: item.score for beam, item in zip(beams, continuations, strict=True)})
        return new, True
