"""What comes out of the engine: `SequenceDelta` per step (streams are made of these) and the whole `RequestOutput`.

Knows no engine and no server; `RequestOutput` has the fields vLLM's users know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True, frozen=True)
class TextSpan:
    """How a stateless detokenizer finds a delta's text: `decode(token_ids)[start:end]` is exactly it.

    `token_ids` is a short window of the output that begins where decoding can begin without losing a space or half a
    character; `start` and `end` count characters of the decoded window.
    """

    token_ids: list[int]
    start: int
    end: int


class Logprob(NamedTuple):
    """Log-probability of a token at one position, from the raw logits; the most likely token has rank 1."""

    logprob: float
    rank: int
    decoded_token: str | None


# Not frozen: a step makes one for each sequence, and a frozen one costs three times as much.
@dataclass(slots=True)
class SequenceDelta:
    """What one step added to one sequence.

    Attributes:
        request_id, index: whose; `index` counts the request's outputs from 0.
        token_ids: new tokens; empty when the request was aborted.
        text: new text; may be empty while a character or a possible stop string is incomplete.
        span: where a stateless detokenizer finds `text`; None when `text` is empty.
        finish_reason: None while it goes on, else `stop`, `length`, `abort`, `timeout` or `error`.
        stop_reason: the stop string or stop token id that ended it, of an error what went wrong, else None.
        request_finished: true on the request's last delta, and only there.
        logprobs: per new token, the sampled and the most likely tokens; None if the request did not ask.
        cumulative_logprob: log-probability of the output so far; None unless log-probabilities were asked for or it is
            a beam search output.
        score: a beam search output's score, else None.
        prompt_logprobs: per token of the prompt (the first has None), with the request's first delta, if asked for.
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    span: TextSpan | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    request_finished: bool = False
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One finished output of a request. `text` leaves out the stop string unless it was asked for.

    `logprobs` and `cumulative_logprob` are None unless asked for; `score` is a beam search output's.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None

    def extend(self, delta: SequenceDelta) -> None:
        """Append one step's delta."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.score = delta.score
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        if delta.cumulative_logprob is not None:
            self.cumulative_logprob = delta.cumulative_logprob


@dataclass(slots=True)
class RequestOutput:
    """A whole request: its prompt and its outputs, in the order of their index.

    `prompt_logprobs` has an entry per token of the prompt, None for the first; it is None unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
