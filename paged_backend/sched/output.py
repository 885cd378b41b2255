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
    from paged_backend.token_rules import TokenRules


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
        num_logprobs: how many top log-probabilities to return at each of its sampling positions; None: none at all.
        is_beam: a beam of a beam search: nothing is sampled, the top log-probabilities are its continuations.
        rules: rules about single tokens, None if there are none.
        num_prompt_logprobs: how many top log-probabilities to return of each prompt token computed; None: none at all.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    num_logprobs: int | None = None
    is_beam: bool = False
    rules: TokenRules | None = None
    num_prompt_logprobs: int | None = None


# Not frozen: making one is the largest single cost of planning a decode, and a frozen one costs three times as much.
@dataclass(slots=True)
class ScheduledSequence:
    """One row of the ragged batch: compute `num_new_tokens` tokens from position `num_computed_tokens` on.

    `samples` names the sequences whose next token is drawn from the logits of the last of these tokens: none while
    known tokens remain, else the sequence itself, and at the end of a shared prompt its siblings too, each with its own
    row's parameters and seed.
    """

    seq_id: int
    num_computed_tokens: int
    num_new_tokens: int
    samples: tuple[int, ...]


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work. The worker applies the fields in this order, then computes.

    Attributes:
        removed: rows to drop (finished, aborted or preempted since the last step).
        swap_out: (device block, host block) contents to copy.
        swap_in: (host block, device block) contents to copy; never in a step with `swap_out`.
        copies: (source, destination) device blocks to copy, as if all sources were read before any is written.
        new: rows to create.
        new_token_ids: tokens to append to rows not in `new` that the worker did not sample itself (beam search).
        new_block_ids: per row not in `new`, block ids to append to its block table.
        replaced_block_ids: per row not in `new`, (table index, block id) to overwrite.
        null_blocks: per row not in `new`, how many leading table entries have become the null block.
        scheduled: the ragged batch, in scheduling order (the worker may reorder it).
        num_scheduled_tokens: sum of `num_new_tokens`.
        token_masks: the tokens that may be sampled, for sampling sequences whose output has a form: a bit per token,
            lowest bit first, padded with zeros. Filled in by the engine.
    """

    removed: list[int] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    new_token_ids: dict[int, list[int]] = field(default_factory=dict)
    new_block_ids: dict[int, list[int]] = field(default_factory=dict)
    replaced_block_ids: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    null_blocks: dict[int, int] = field(default_factory=dict)
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    num_scheduled_tokens: int = 0
    token_masks: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the raw logits (before penalties and temperature), for a beam with the
    penalties applied to the log-probabilities, as transformers does.

    Attributes:
        logprob, rank: of the sampled token; the most likely token has rank 1. A beam samples none: 0.0 and 0.
        top_ids, top_logprobs: the most likely tokens, best first (ties: lower id first).
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class WorkerOutput:
    """What a step gave: `token_ids[i]` continues sequence `seq_ids[i]`.

    A beam samples nothing: it is not in `seq_ids`, only in `logprobs`. `logprobs` has an entry for each sequence that
    sampled in this step and whose row asks for it (`NewSequence.num_logprobs`). `prompt_logprobs` has, for rows that
    ask for it, those of the prompt tokens computed in this step: the position of the first of them, and a list.
    `stuck` names sequences that should have sampled, but whose rules and mask left no token.
    """

    seq_ids: list[int]
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    stuck: list[int] = field(default_factory=list)
