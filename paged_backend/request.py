"""`Request` (one client request) and its `Sequence`s, with the one table of status transitions.

One idea carries the engine: a sequence's `num_computed_tokens` chases its `num_tokens`. Prefill, chunked prefill,
decode and recomputation after preemption are all "compute the next tokens". This module knows no blocks, no torch
and no text.
"""

from __future__ import annotations

import enum
import itertools
import time
from typing import Any, NamedTuple

from paged_backend.sampling_params import SamplingParams
from paged_backend.token_rules import TokenRules

_MASK64 = 2**64 - 1
_next_seq_id = itertools.count(1)
_next_arrival = itertools.count()


def sibling_seed(seed: int, index: int) -> int:
    """64-bit seed of a request's sequence `index`: the request's own for the first, else mixed as SplitMix64 does."""
    if index == 0:
        return seed
    value = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


_TRANSITIONS = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED, RequestStatus.SWAPPED, RequestStatus.FINISHED},
    RequestStatus.PREEMPTED: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.SWAPPED: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set(),
}


class FinishReason(NamedTuple):
    """Why a sequence ended: `kind` is `stop`, `length`, `abort`, `timeout` or `error`; `stop_reason` is the stop string
    or stop token id that did it, of an error what went wrong, None for the end-of-sequence token and for the other
    kinds (vLLM's convention)."""

    kind: str
    stop_reason: str | int | None = None


class Sequence:
    """The tokens of one output of a request: prompt, what was generated, and how far the KV cache has come.

    Of a request's sequences one computes the shared prompt; the others `fork` from it, that is, begin with its blocks.
    Until then (`is_attached` false) a sequence has no blocks of its own and is not scheduled.

    `num_pending_tokens` counts tokens that planned steps sample and that are not known yet; the next one can be planned
    all the same.
    """

    __slots__ = (
        "finish",
        "index",
        "is_attached",
        "num_computed_tokens",
        "num_pending_tokens",
        "num_prompt_tokens",
        "request",
        "seed",
        "seq_id",
        "token_ids",
    )

    def __init__(self, request: Request, index: int, seed: int) -> None:
        self.request = request
        self.index = index
        self.seed = seed
        self.seq_id = next(_next_seq_id)
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.is_attached = index == 0
        self.finish: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens, known or pending, that the KV cache does not hold yet; a last token never needs to be in it."""
        pending = self.num_pending_tokens
        if pending and len(self.token_ids) + pending >= self.request.max_total_tokens:
            return 0
        return len(self.token_ids) + pending - self.num_computed_tokens

    def append(self, token_id: int) -> None:
        """A token has become known, a pending one if there is one."""
        self.token_ids.append(token_id)
        self.num_pending_tokens -= self.num_pending_tokens > 0

    @property
    def output_token_ids(self) -> list[int]:
        """Generated tokens, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]


class Request:
    """One client request and its `num_sequences` sequences.

    Args:
        request_id: unique among the engine's live requests.
        prompt_token_ids: at least one token.
        params: how to sample and when to stop.
        seed: 64-bit seed (the client's, or a fresh one); each sequence's seed derives from it.
        max_total_tokens: prompt plus output tokens at which a sequence ends with reason `length`.
        prompt: the prompt's text, None if it came as token ids.
        num_sequences: outputs computed side by side.
        priority: the lower, the more urgent (policy `priority` only).
        deadline: `time.monotonic()` second at which the request is given up, None for never.
        cache_salt: requests share cached blocks only with others of the same salt.
        num_logprobs: how many top log-probabilities the worker returns per sampled token; None: none at all.
        num_prompt_logprobs: the same per token of the prompt.
        rules: rules about single tokens, None if there are none.
        grammar: the compiled form of the output, which only the engine looks into; None for any form.

    `num_known_prompt_logprobs` counts the prompt positions whose log-probabilities have been returned.

    Times are `time.monotonic()` seconds, stamped on the transition: `arrival_time`, `first_scheduled_time`,
    `first_token_time`, `finish_time`.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        max_total_tokens: int,
        prompt: str | None = None,
        num_sequences: int = 1,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        rules: TokenRules | None = None,
        grammar: Any = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        # A set: looked into for each token.
        self.stop_ids = frozenset(params.stop_ids)
        self.max_total_tokens = max_total_tokens
        self.priority = priority
        self.deadline = deadline
        self.cache_salt = cache_salt
        self.num_logprobs = num_logprobs
        self.num_prompt_logprobs = num_prompt_logprobs
        self.num_known_prompt_logprobs = 0
        self.rules = rules
        self.grammar = grammar
        self.arrival_index = next(_next_arrival)
        self.status = RequestStatus.WAITING
        self.num_preemptions = 0
        self.num_recomputations = 0
        self.num_cached_tokens = 0
        self.arrival_time = time.monotonic()
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self.sequences = [Sequence(self, index, sibling_seed(seed, index)) for index in range(num_sequences)]

    @property
    def num_rows(self) -> int:
        """Sequences that may run at the same time from now on."""
        return self.params.num_rows if self.params.use_beam_search else len(self.live_sequences())

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, which all sequences share."""
        return len(self.prompt_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are asked for and not all known; the first token has none."""
        return self.num_prompt_logprobs is not None and self.num_known_prompt_logprobs < self.num_prompt_tokens - 1

    def live_sequences(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.finish is None]

    def fork_sequence(self, parent: Sequence) -> Sequence:
        """A new sequence with the parent's tokens, for a beam search; the caller adds it to `sequences`."""
        child = Sequence(self, parent.index, parent.seed)
        child.token_ids = list(parent.token_ids)
        return child

    def transition(self, status: RequestStatus) -> None:
        """Move to `status` and stamp the time; a move the table does not allow is a fault of ours."""
        if status not in _TRANSITIONS[self.status]:
            raise AssertionError(f"request {self.request_id}: {self.status.name} -> {status.name} is not allowed")
        self.status = status
        if status is RequestStatus.RUNNING and self.first_scheduled_time is None:
            self.first_scheduled_time = time.monotonic()
        elif status in (RequestStatus.PREEMPTED, RequestStatus.SWAPPED):
            self.num_preemptions += 1
            self.num_recomputations += status is RequestStatus.PREEMPTED
        elif status is RequestStatus.FINISHED:
            self.finish_time = time.monotonic()
