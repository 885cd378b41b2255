"""`SchedulerOutput`: the only thing the scheduler tells the worker, and `WorkerOutput`, the only answer.

The worker keeps one persistent row per sequence. A step carries differences: rows that appear, block ids that were
added, rows that go. The worker appends the tokens it samples to its own rows, so decode steps send no tokens down.
To the worker a preempted sequence is a removed one; when it resumes it is new again, with all its known tokens.
This module knows no torch, no requests and no text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_backend.sampling_params import SamplingParams


@dataclass(slots=True, frozen=True)
class NewSequence:
    """A row the worker must create before the step.

    Attributes:
        seq_id: unique over the engine's lifetime.
        token_ids: all known tokens (prompt, then already generated ones after a preemption).
        num_prompt_tokens: how many of `token_ids` are the client's prompt.
        block_ids: the block table at the start of this step (it already covers this step's tokens).
        params: the request's sampling parameters.
        seed: 64-bit sampling seed of this sequence; with the position it alone determines the randomness.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seed: int


@dataclass(slots=True, frozen=True)
class ScheduledSequence:
    """One row of the ragged batch: compute `num_new_tokens` tokens from position `num_computed_tokens` on.

    `samples` is true when the last of these is the sequence's last known token, so that its logits give the next one.
    """

    seq_id: int
    num_computed_tokens: int
    num_new_tokens: int
    samples: bool


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work.

    Attributes:
        removed: rows to drop before anything else (finished, aborted or preempted since the last step).
        new: rows to create, after `removed` and before the forward pass.
        new_block_ids: per running sequence (not in `new`), block ids to append to its block table.
        scheduled: the ragged batch, in scheduling order (the worker may reorder it).
        num_scheduled_tokens: sum of `num_new_tokens`.
    """

    removed: list[int] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    new_block_ids: dict[int, list[int]] = field(default_factory=dict)
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    num_scheduled_tokens: int = 0


@dataclass(slots=True)
class WorkerOutput:
    """The sampled tokens of a step: `token_ids[i]` continues sequence `seq_ids[i]`; only rows with `samples` appear."""

    seq_ids: list[int]
    token_ids: list[int]
