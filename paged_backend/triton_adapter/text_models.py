"""`TokenizerModel` and `DetokenizerModel`: the ensemble's first and last step.

Neither imports torch or the engine, so they load in seconds. The detokenizer keeps no state: the engine model sends,
with each response, the window of ids that its text is found in (see tensors.py). Both have one instance and no dynamic
batching, which is what keeps the responses of a stream in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paged_backend.errors import InvalidRequestError, PagedBackendError, UnsupportedError
from paged_backend.tokenizer import Tokenizer
from paged_backend.triton_adapter.pb import pb_utils, printable, triton_error
from paged_backend.triton_adapter.settings import context_length, engine_config, load_tokenizer
from paged_backend.triton_adapter.tensors import (
    DETOKENIZER_INPUTS,
    DETOKENIZER_OUTPUTS,
    TOKENIZER_INPUTS,
    TOKENIZER_OUTPUTS,
    RequestTensors,
    declare,
    int_tensor,
    string_tensor,
)


class _TextModel:
    """What both share: the tokenizer, and answering each request by itself."""

    _tokenizer: Tokenizer
    _max_model_len: int

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer.

        Raises:
            TritonModelException: one line that says what to change.
        """
        try:
            config = engine_config(args)
            self._tokenizer = load_tokenizer(config)
            self._max_model_len = context_length(config)
        except PagedBackendError as error:
            raise pb_utils().TritonModelException(printable(str(error))) from None

    def _answer_all(self, requests: list[Any], answer: Callable[[RequestTensors], Any]) -> list[Any]:
        return [self._answer_one(request, answer) for request in requests]

    def _answer_one(self, request: Any, answer: Callable[[RequestTensors], Any]) -> Any:
        try:
            return pb_utils().InferenceResponse([answer(RequestTensors(request))])
        except PagedBackendError as error:
            return pb_utils().InferenceResponse(output_tensors=[], error=triton_error(error))
        except Exception as error:
            # One request's trouble must not fail the others of this call.
            failure = triton_error(PagedBackendError(f"the request failed: {error!r}"))
            return pb_utils().InferenceResponse(output_tensors=[], error=failure)


class TokenizerModel(_TextModel):
    """`text_input` to `input_ids`, exactly as the engine model tokenizes text itself."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Declare the tensors."""
        declare(config, TOKENIZER_INPUTS, TOKENIZER_OUTPUTS)
        config.set_max_batch_size(0)
        return config

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order."""
        return self._answer_all(requests, self._encode)

    def _encode(self, tensors: RequestTensors) -> Any:
        if "messages" in tensors:
            message = "`messages` is not taken by the ensemble: use the engine model"
            raise UnsupportedError(message, field="messages")
        text = tensors.string("text_input")
        # A request that only cancels another has no prompt of its own.
        if text is None and not tensors.boolean("stop"):
            raise InvalidRequestError("`text_input` is missing: give the prompt", field="text_input")
        if not text and not tensors.boolean("stop"):
            raise InvalidRequestError("`text_input` is empty: give at least one character", field="text_input")
        return int_tensor("input_ids", self._ids(text) if text else [])

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode_prompt(text, self._max_model_len, "text_input")


class DetokenizerModel(_TextModel):
    """Windows of ids to the text of one response."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Declare the tensors."""
        declare(config, DETOKENIZER_INPUTS, DETOKENIZER_OUTPUTS)
        config.set_max_batch_size(0)
        return config

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order."""
        return self._answer_all(requests, self._decode)

    def _decode(self, tensors: RequestTensors) -> Any:
        ids = tensors.integers("text_window_ids") or []
        rows = tensors.array("text_window_spans", np.int32, "INT32")
        pieces = [tensors.string("text_prefix") or ""]
        at = 0
        for count, start, end, skip in [] if rows is None else rows.tolist():
            if not 0 <= count <= len(ids) - at or not 0 <= start <= end:
                raise InvalidRequestError(
                    f"`text_window_spans` row {[count, start, end, skip]} does not fit `text_window_ids` of {len(ids)}",
                    field="text_window_spans",
                )
            window = self._tokenizer.decode(ids[at : at + count], skip_special_tokens=bool(skip))
            pieces.append(window[start:end])
            at += count
        return string_tensor("text_output", ["".join(pieces)])
