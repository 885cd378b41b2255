"""Deltas merged into response tensors: what one response says, and whether it is worth saying.

`Chunk` collects what a sequence gained since its last response. This module knows tensors and rules of the interface;
it knows no threads and sends nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from paged_backend.engine.outputs import Logprob, SequenceDelta, TextSpan
from paged_backend.triton_adapter.parse import TEXT_OUTPUTS, ResponseOptions
from paged_backend.triton_adapter.pb import pb_utils
from paged_backend.triton_adapter.tensors import int_tensor, string_tensor

_TOKEN_OUTPUTS = frozenset({"output_ids", "num_output_tokens"})
_SAID_AT_THE_END = frozenset({"finish_reason", "logprobs", "cumulative_logprob", "prompt_logprobs"})


class Chunk:
    """What a sequence gained since its last response: any number of deltas, in order."""

    __slots__ = (
        "_texts",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "logprobs",
        "prompt_logprobs",
        "spans",
        "token_ids",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.spans: list[TextSpan] = []
        self.finish_reason: str | None = None
        self.logprobs: list[dict[int, Logprob]] | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.cumulative_logprob: float | None = None
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(self._texts)

    def add(self, delta: SequenceDelta) -> None:
        """Append a step's delta."""
        self.token_ids += delta.token_ids
        if delta.text:
            self._texts.append(delta.text)
        if delta.span is not None:
            self.spans.append(delta.span)
        self.finish_reason = delta.finish_reason
        self.cumulative_logprob = delta.cumulative_logprob
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs

    def extend(self, later: Chunk) -> None:
        """Append what a later chunk of the same sequence says."""
        self.token_ids += later.token_ids
        self._texts += later._texts
        self.spans += later.spans
        self.finish_reason = later.finish_reason
        self.cumulative_logprob = later.cumulative_logprob
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs

    def is_visible(self, options: ResponseOptions) -> bool:
        """Whether a streaming client would see something new.

        Text decides if text is wanted at all: a chunk with half a character would reach the client as an empty text,
        which some clients take for an error, and its tokens can wait for the step that completes the character.
        """
        if options.outputs & TEXT_OUTPUTS:
            return bool(self._texts)
        return bool(self.token_ids and options.outputs & _TOKEN_OUTPUTS)

    def must_be_said(self, options: ResponseOptions) -> bool:
        """Whether the last chunk of a stream needs a response although `is_visible` says no: it then has no text, but
        the client asked for something else that it holds."""
        if options.outputs & _SAID_AT_THE_END:
            return True
        return bool(self.token_ids and options.outputs & _TOKEN_OUTPUTS)


def build_response(chunks: Sequence[Chunk], options: ResponseOptions, num_input_tokens: int) -> Any:
    """An `InferenceResponse` with the wanted tensors: one chunk in a stream, one per sequence otherwise.

    Args:
        chunks: in order of their index.
        options: which tensors, and the text before a non-streamed output.
        num_input_tokens: length of the prompt.
    """
    builders = {
        "text_output": lambda name: string_tensor(name, [options.prefix + chunk.text for chunk in chunks]),
        # "None" while it goes on, as the vLLM backend says it.
        "finish_reason": lambda name: string_tensor(name, [str(chunk.finish_reason) for chunk in chunks]),
        "cumulative_logprob": lambda name: pb_utils().Tensor(
            name, np.array([chunk.cumulative_logprob or 0.0 for chunk in chunks], dtype=np.float32)
        ),
        "logprobs": lambda name: string_tensor(name, [_logprobs_json(chunk.logprobs) for chunk in chunks]),
        "prompt_logprobs": lambda name: string_tensor(
            name, [_logprobs_json(next((chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs), None))]
        ),
        "num_input_tokens": lambda name: int_tensor(name, [num_input_tokens], np.uint32),
        "num_output_tokens": lambda name: int_tensor(name, [len(chunk.token_ids) for chunk in chunks], np.uint32),
        "output_ids": lambda name: int_tensor(name, [i for chunk in chunks for i in chunk.token_ids]),
        "sequence_index": lambda name: int_tensor(name, [chunk.index for chunk in chunks]),
        "text_window_ids": lambda name: int_tensor(name, [i for span in _spans(chunks) for i in span.token_ids]),
        "text_window_spans": lambda name: _span_rows(name, chunks, options.skip_special_tokens),
        "text_prefix": lambda name: string_tensor(name, [options.prefix]),
    }
    names = [name for name in builders if name in options.outputs and (options.prefix or name != "text_prefix")]
    return pb_utils().InferenceResponse([builders[name](name) for name in names])


def _logprobs_json(positions: Sequence[dict[int, Logprob] | None] | None) -> str:
    """The vLLM backend's form: a list of {token id: {logprob, rank, decoded_token}}, "null" if not asked for."""
    if positions is None:
        return "null"
    # The first token of a prompt has none.
    return json.dumps([position and {i: p._asdict() for i, p in position.items()} for position in positions])


def _spans(chunks: Sequence[Chunk]) -> list[TextSpan]:
    return [span for chunk in chunks for span in chunk.spans]


def _span_rows(name: str, chunks: Sequence[Chunk], skip_special_tokens: bool) -> Any:
    skip = int(skip_special_tokens)
    rows = [(len(span.token_ids), span.start, span.end, skip) for span in _spans(chunks)]
    return int_tensor(name, np.array(rows, dtype=np.int32).reshape(len(rows), 4))
