"""From a step's logits to its results: constraints, penalties, sampling, log-probabilities, and the rows' new tokens.

    logits -- constraints, penalties on -- sample -- both off -- log-probabilities of the raw logits
    logits -- log-probabilities -- penalties -- the best continuations                          (beams)

Penalties and most constraints touch few entries of the logits, which are put back bit for bit: no copy of the logits is
made. A row pays only for what it asks for. Knows rows; no model and no plans.
"""

from __future__ import annotations

import numpy as np
import torch

from paged_backend.sampling.constraints import Constraining, ConstraintBatch, stuck_rows
from paged_backend.sampling.logprobs import beam_candidates, token_logprobs
from paged_backend.sampling.penalties import penalise, restore
from paged_backend.sampling.sampler import sample, sample_greedily, take_rows
from paged_backend.sched.output import TokenLogprobs, WorkerOutput
from paged_backend.worker.input_batch import NO_LOGPROBS, InputBatch


def choose_tokens(
    logits: torch.Tensor, seq_ids: list[int], rows: np.ndarray, state: InputBatch, masks: dict[int, bytes]
) -> WorkerOutput:
    """Sample a token for each sequence and append it to its row; report a beam's continuations instead.

    Args:
        logits: float32 [S, vocabulary]; after the call, rows with a mask hold anything, the others what they did.
        seq_ids: the S sequences.
        rows: int64 [S], their rows.
        state: the rows.
        masks: per sequence whose output has a form, the tokens that may follow (`SchedulerOutput.token_masks`).

    Raises:
        PagedBackendError: the model's output is broken.
    """
    if not masks and state.demanding.isdisjoint(rows.tolist()):
        tokens = sample_greedily(logits)
        state.append_tokens(rows, tokens)
        return WorkerOutput(seq_ids, tokens.tolist())
    output = WorkerOutput([], [])
    is_beam = state.is_beam[rows]
    if is_beam.any():
        part = _Part(logits, seq_ids, rows, np.flatnonzero(is_beam))
        _report_beams(part, state, output)
        drawn = np.flatnonzero(~is_beam)
    else:
        drawn = np.arange(len(rows))
    if drawn.size:
        _choose(_Part(logits, seq_ids, rows, drawn), state, masks, output)
    return output


class _Part:
    """Some of a step's rows, `chosen` ascending; the logits are a copy unless it is all of them."""

    def __init__(self, logits: torch.Tensor, seq_ids: list[int], rows: np.ndarray, chosen: np.ndarray) -> None:
        self.logits = take_rows(logits, torch.from_numpy(chosen).to(logits.device))
        self.seq_ids = [seq_ids[i] for i in chosen.tolist()]
        self.rows = rows[chosen]

    def select(self, chosen: np.ndarray) -> _Part:
        """Some of these rows."""
        return _Part(self.logits, self.seq_ids, self.rows, chosen)


def _report_beams(part: _Part, state: InputBatch, output: WorkerOutput) -> None:
    counts = state.num_logprobs[part.rows]
    ids, logprobs = beam_candidates(part.logits, state.penalties(part.rows), int(counts.max()))
    for i, seq_id in enumerate(part.seq_ids):
        count = counts[i]
        output.logprobs[seq_id] = TokenLogprobs(0.0, 0, ids[i, :count].tolist(), logprobs[i, :count].tolist())


def _choose(part: _Part, state: InputBatch, masks: dict[int, bytes], output: WorkerOutput) -> None:
    constraints = state.constraints(part.rows, part.seq_ids, masks, part.logits.shape[-1])
    if constraints is None:
        tokens = _sampled(part, state)
    else:
        part, tokens = _sampled_within(part, constraints, state, output)
    if not len(tokens):
        return
    state.append_tokens(part.rows, tokens)
    output.seq_ids += part.seq_ids
    output.token_ids += tokens.tolist()
    wanted = np.flatnonzero(state.num_logprobs[part.rows] != NO_LOGPROBS)
    if wanted.size:
        _report_sampled(part.select(wanted), tokens[wanted], state, output)


def _sampled(part: _Part, state: InputBatch) -> np.ndarray:
    penalties = state.penalties(part.rows)
    if penalties is None:
        return sample(part.logits, state.sampling(part.rows))
    raw = penalise(part.logits, penalties)
    tokens = sample(part.logits, state.sampling(part.rows))
    restore(part.logits, penalties, raw)
    return tokens


def _sampled_within(
    part: _Part, constraints: ConstraintBatch, state: InputBatch, output: WorkerOutput
) -> tuple[_Part, np.ndarray]:
    """Sample under constraints; returns the rows that had a token left, with raw logits, and their tokens."""
    wanted = np.flatnonzero(state.num_logprobs[part.rows] != NO_LOGPROBS)
    constraining = Constraining(part.logits, constraints, kept_rows=wanted)
    stuck = stuck_rows(part.logits, constraints)
    if not stuck.size:
        tokens = _sampled(part, state)
        constraining.undo()
        return part, tokens
    output.stuck += [part.seq_ids[i] for i in stuck.tolist()]
    going_on = np.setdiff1d(np.arange(len(part.rows)), stuck)
    tokens = np.empty(0, dtype=np.int64)
    if going_on.size:
        tokens = _sampled(part.select(going_on), state)
    constraining.undo()
    return part.select(going_on), tokens


def _report_sampled(part: _Part, tokens: np.ndarray, state: InputBatch, output: WorkerOutput) -> None:
    counts = state.num_logprobs[part.rows]
    found = token_logprobs(part.logits, tokens, int(counts.max()))
    for i, seq_id in enumerate(part.seq_ids):
        count = counts[i]
        output.logprobs[seq_id] = TokenLogprobs(
            float(found.logprobs[i]),
            int(found.ranks[i]),
            found.top_ids[i, :count].tolist(),
            found.top_logprobs[i, :count].tolist(),
        )
