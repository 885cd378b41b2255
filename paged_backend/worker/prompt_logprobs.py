"""Log-probabilities of prompt tokens: of each computed position, those of the token that follows it in the prompt.

    position    p0    p1    p2    p3 (last of the prompt)
    says of    t1    t2    t3     the first generated token, which the sampler reports

Whatever cuts the prompt into pieces, every position is computed in some step and reported there. Knows rows and hidden
states; no requests.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from paged_backend.sampling.logprobs import token_logprobs
from paged_backend.sched.output import ScheduledSequence, TokenLogprobs
from paged_backend.worker.input_batch import NO_LOGPROBS, InputBatch

# Positions whose logits exist at the same time: a long chunk's, all at once, could outgrow the memory planned for.
_SLICE = 64


def prompt_logprobs(
    hidden: torch.Tensor,
    first_token: dict[int, int],
    scheduled: list[ScheduledSequence],
    state: InputBatch,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
) -> dict[int, tuple[int, list[TokenLogprobs]]]:
    """What a step says of the prompts it computed, for the rows that ask.

    Args:
        hidden: [T, hidden size], the step's hidden states.
        first_token: where in them each sequence begins.
        scheduled: what was computed.
        state: the rows.
        compute_logits: from hidden states to float32 logits.

    Returns:
        Per sequence, the first position reported and the log-probabilities from there on.
    """
    found = {}
    for item in scheduled:
        row = state.row(item.seq_id)
        count = int(state.num_prompt_logprobs[row])
        start = item.num_computed_tokens
        end = min(start + item.num_new_tokens, int(state.num_prompt_tokens[row]) - 1)
        if count == NO_LOGPROBS or end <= start:
            continue
        first = first_token[item.seq_id]
        reports: list[TokenLogprobs] = []
        for at in range(start, end, _SLICE):
            stop = min(at + _SLICE, end)
            logits = compute_logits(hidden[first + at - start : first + stop - start])
            tokens = state.token_ids[row, at + 1 : stop + 1].astype(np.int64)
            reports += _reports(logits, tokens, count)
        found[item.seq_id] = (start, reports)
    return found


def _reports(logits: torch.Tensor, tokens: np.ndarray, count: int) -> list[TokenLogprobs]:
    """`token_logprobs`, one object per row."""
    batch = token_logprobs(logits, tokens, count)
    return [
        TokenLogprobs(float(batch.logprobs[i]), int(batch.ranks[i]), top_ids, top_logprobs)
        for i, (top_ids, top_logprobs) in enumerate(
            zip(batch.top_ids.tolist(), batch.top_logprobs.tolist(), strict=True)
        )
    ]
