"""The tensors of the served models: their names and shapes, and reading a request's.

Names are those of the vLLM backend (text interface) and of the TensorRT-LLM backend (token interface). Ours are these;
the first and the last let a detokenizer model work without state:

- `text_window_ids` INT32[-1] and `text_window_spans` INT32[-1, 4]. Each row (count, start, end, skip) takes the next
  `count` ids of `text_window_ids`; `decode(ids, skip_special_tokens=skip)[start:end]`, joined over the rows, is
  exactly the response's text. Rows rather than one window, because a response may carry many steps merged.
- `messages` STRING[1] is a prompt too: a JSON list of chat messages, with `tools` STRING[1] beside it if there are any.
- `prompt_logprobs` STRING[1] is to the prompt what `logprobs` is to the output; "null" in responses after the first.
- `prompt_text` goes in and `text_prefix` comes out: the ensemble's way of putting the prompt before a non-streamed
  output. It travels through the engine model because an ensemble hands a client's tensor to a step only once.

This module knows shapes and types, not what the values mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from paged_backend.errors import InvalidRequestError
from paged_backend.triton_adapter.pb import pb_utils


class TensorSpec(NamedTuple):
    """A tensor as the server's model configuration declares it."""

    name: str
    data_type: str
    dims: list[int]
    optional: bool = False


def _flag(name: str) -> TensorSpec:
    return TensorSpec(name, "TYPE_BOOL", [1], optional=True)


LLM_INPUTS = (
    TensorSpec("text_input", "TYPE_STRING", [1], optional=True),
    TensorSpec("input_ids", "TYPE_INT32", [-1], optional=True),
    TensorSpec("messages", "TYPE_STRING", [1], optional=True),
    TensorSpec("tools", "TYPE_STRING", [1], optional=True),
    _flag("stream"),
    TensorSpec("sampling_parameters", "TYPE_STRING", [1], optional=True),
    _flag("exclude_input_in_output"),
    _flag("return_finish_reason"),
    _flag("return_cumulative_logprob"),
    _flag("return_logprobs"),
    _flag("return_prompt_logprobs"),
    _flag("return_num_input_tokens"),
    _flag("return_num_output_tokens"),
    _flag("stop"),
    TensorSpec("prompt_text", "TYPE_STRING", [1], optional=True),
)
LLM_OUTPUTS = (
    TensorSpec("text_output", "TYPE_STRING", [-1]),
    TensorSpec("finish_reason", "TYPE_STRING", [-1]),
    TensorSpec("cumulative_logprob", "TYPE_FP32", [-1]),
    TensorSpec("logprobs", "TYPE_STRING", [-1]),
    TensorSpec("prompt_logprobs", "TYPE_STRING", [1]),
    TensorSpec("num_input_tokens", "TYPE_UINT32", [1]),
    TensorSpec("num_output_tokens", "TYPE_UINT32", [-1]),
    TensorSpec("output_ids", "TYPE_INT32", [-1]),
    TensorSpec("sequence_index", "TYPE_INT32", [-1]),
    TensorSpec("text_window_ids", "TYPE_INT32", [-1]),
    TensorSpec("text_window_spans", "TYPE_INT32", [-1, 4]),
    TensorSpec("text_prefix", "TYPE_STRING", [1]),
)
# Optional, so that the step runs, and refuses, a request without a prompt: else the ensemble ends without a word.
# `messages` only to be refused by name.
TOKENIZER_INPUTS = (
    TensorSpec("text_input", "TYPE_STRING", [1], optional=True),
    TensorSpec("messages", "TYPE_STRING", [1], optional=True),
    _flag("stop"),
)
TOKENIZER_OUTPUTS = (TensorSpec("input_ids", "TYPE_INT32", [-1]),)
DETOKENIZER_INPUTS = (
    TensorSpec("text_window_ids", "TYPE_INT32", [-1]),
    TensorSpec("text_window_spans", "TYPE_INT32", [-1, 4]),
    TensorSpec("text_prefix", "TYPE_STRING", [1], optional=True),
)
DETOKENIZER_OUTPUTS = (TensorSpec("text_output", "TYPE_STRING", [-1]),)


def declare(config: Any, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> None:
    """Complete a model configuration with the tensors it does not declare itself.

    Raises:
        ValueError: it declares one of them with another type.
    """
    declared = {(kind, t["name"]): t["data_type"] for kind in ("input", "output") for t in config.as_dict()[kind]}
    for spec in inputs:
        if declared.get(("input", spec.name)) != spec.data_type:
            config.add_input(spec._asdict())
    for spec in outputs:
        if declared.get(("output", spec.name)) != spec.data_type:
            config.add_output({"name": spec.name, "data_type": spec.data_type, "dims": spec.dims})


class RequestTensors:
    """The input tensors of one request; each read checks type and shape and names the tensor if they are wrong.

    Values are copied: the server's memory behind a tensor goes when the request is released.
    """

    def __init__(self, request: Any) -> None:
        self._tensors = {tensor.name(): tensor for tensor in request.inputs()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def string(self, name: str) -> str | None:
        """The text of a STRING[1] tensor, None if it was not sent."""
        value = self._single(name, np.object_, "STRING")
        return None if value is None else _text(name, value)

    def boolean(self, name: str) -> bool | None:
        """The value of a BOOL[1] tensor, None if it was not sent."""
        value = self._single(name, np.bool_, "BOOL")
        return None if value is None else bool(value)

    def integers(self, name: str) -> list[int] | None:
        """The values of a one-dimensional INT32 tensor, None if it was not sent."""
        array = self.array(name, np.int32, "INT32")
        if array is None:
            return None
        if array.ndim != 1:
            raise InvalidRequestError(f"`{name}` must have one dimension, got shape {list(array.shape)}", field=name)
        return array.tolist()

    def strings(self, name: str) -> list[str]:
        """The texts of a STRING tensor of any shape; empty if it was not sent."""
        array = self.array(name, np.object_, "STRING")
        return [] if array is None else [_text(name, value) for value in array.reshape(-1)]

    def number(self, name: str, dtype: Any, type_name: str) -> int | float | None:
        """The value of a tensor of one number, None if it was not sent."""
        value = self._single(name, dtype, type_name)
        if value is None:
            return None
        # The shortest decimal that is this float32: 0.7 rather than 0.699999988.
        return float(str(value)) if np.issubdtype(dtype, np.floating) else int(value)

    def array(self, name: str, dtype: Any, type_name: str) -> np.ndarray | None:
        """A tensor as an array, None if it was not sent. It is a view: copy what must outlive the request."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        array = tensor.as_numpy()
        if array.dtype != dtype:
            raise InvalidRequestError(f"`{name}` must be of type {type_name}, got {array.dtype}", field=name)
        return array

    def _single(self, name: str, dtype: Any, type_name: str) -> Any:
        array = self.array(name, dtype, type_name)
        if array is None:
            return None
        if array.size != 1:
            raise InvalidRequestError(f"`{name}` must hold one value, got shape {list(array.shape)}", field=name)
        return array.reshape(-1)[0]


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise InvalidRequestError(f"`{name}` must be of type STRING", field=name)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"`{name}` is not valid UTF-8: {error}", field=name) from error


def string_tensor(name: str, values: list[str]) -> Any:
    """A STRING tensor of one dimension."""
    return pb_utils().Tensor(name, np.array([value.encode("utf-8") for value in values], dtype=np.object_))


def int_tensor(name: str, values: Any, dtype: Any = np.int32) -> Any:
    """A tensor of integers with the shape of `values`."""
    return pb_utils().Tensor(name, np.asarray(values, dtype=dtype))
