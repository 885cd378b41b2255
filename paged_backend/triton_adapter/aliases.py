"""The names that clients of the TensorRT-LLM backend use for sampling parameters, as optional input tensors.

What each means is said once, in `_NAMES`. Precedence, per parameter: the JSON of `sampling_parameters`, then these
tensors, then the request's own parameters, which are read only if `sampling_parameters` was not sent. Knows tensors
and names; bounds are `SamplingParams`' business.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from paged_backend.errors import InvalidRequestError
from paged_backend.triton_adapter.tensors import RequestTensors, TensorSpec


class _Alias(NamedTuple):
    """A tensor and the sampling parameter it stands for; of several for one parameter a request may send one."""

    tensor: str
    data_type: str
    parameter: str


_NAMES = (
    _Alias("max_tokens", "INT32", "max_tokens"),
    _Alias("request_output_len", "INT32", "max_tokens"),
    _Alias("min_tokens", "INT32", "min_tokens"),
    _Alias("min_length", "INT32", "min_tokens"),
    _Alias("stop_words", "STRING", "stop"),
    _Alias("bad_words", "STRING", "bad_words"),
    _Alias("temperature", "FP32", "temperature"),
    _Alias("top_k", "INT32", "top_k"),
    _Alias("runtime_top_k", "INT32", "top_k"),
    _Alias("top_p", "FP32", "top_p"),
    _Alias("runtime_top_p", "FP32", "top_p"),
    _Alias("seed", "UINT64", "seed"),
    _Alias("random_seed", "UINT64", "seed"),
    _Alias("repetition_penalty", "FP32", "repetition_penalty"),
    _Alias("presence_penalty", "FP32", "presence_penalty"),
    _Alias("frequency_penalty", "FP32", "frequency_penalty"),
    _Alias("length_penalty", "FP32", "length_penalty"),
    _Alias("beam_width", "INT32", "beam_width"),
    _Alias("num_return_sequences", "INT32", "n"),
)
_DTYPES: dict[str, Any] = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}

# Asks for `logprobs` and `cumulative_logprob`, whatever `return_logprobs` says.
RETURN_LOG_PROBS = "return_log_probs"
ALIAS_INPUTS = (
    *(
        TensorSpec(alias.tensor, f"TYPE_{alias.data_type}", [-1] if alias.data_type == "STRING" else [1], optional=True)
        for alias in _NAMES
    ),
    TensorSpec(RETURN_LOG_PROBS, "TYPE_BOOL", [1], optional=True),
)


def alias_parameters(tensors: RequestTensors) -> dict[str, Any]:
    """The sampling parameters that a request gives as tensors.

    Raises:
        InvalidRequestError: a tensor has the wrong type, or two of them say the same thing.
    """
    values: dict[str, Any] = {}
    said_by: dict[str, str] = {}
    for alias in _NAMES:
        if alias.tensor not in tensors:
            continue
        if alias.parameter in said_by:
            message = f"give `{said_by[alias.parameter]}` or `{alias.tensor}`, not both"
            raise InvalidRequestError(message, field=alias.tensor)
        said_by[alias.parameter] = alias.tensor
        value = _read(tensors, alias)
        if value is not None:
            values[alias.parameter] = value
    return _beam_search(values)


def _read(tensors: RequestTensors, alias: _Alias) -> Any:
    """The tensor's value; None if it says "none", as these clients do with an empty word or a `top_p` of 0."""
    if alias.data_type == "STRING":
        return [word for word in tensors.strings(alias.tensor) if word] or None
    value = tensors.number(alias.tensor, _DTYPES[alias.data_type], alias.data_type)
    if alias.parameter == "top_p" and value == 0.0:
        return None
    return value


def _beam_search(values: dict[str, Any]) -> dict[str, Any]:
    """A `beam_width` asks for a beam search by itself, and for all its beams unless told how many."""
    width = values.get("beam_width")
    if width is None:
        return values
    if width <= 1:
        # 1 means sampling; less is refused under this name.
        return {key: value for key, value in values.items() if key != "beam_width" or width < 1}
    return {"n": width, "temperature": 0.0, **values, "use_beam_search": True}
