"""From one Triton Server request to a prompt, sampling parameters and response options, or a typed error.

Every request is parsed on its own, so that a bad one harms nobody else. This module knows the interface's rules (which
tensor wins, what is refused with which words); bounds of sampling parameters are `SamplingParams`' business and limits
of the model the engine's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paged_backend.chat import render_chat
from paged_backend.errors import InvalidRequestError, UnsupportedError
from paged_backend.param_checks import json_problem
from paged_backend.sampling_params import SamplingParams
from paged_backend.tokenizer import Tokenizer
from paged_backend.triton_adapter.aliases import RETURN_LOG_PROBS, alias_parameters
from paged_backend.triton_adapter.tensors import LLM_OUTPUTS, RequestTensors

_ALL_OUTPUTS = frozenset(spec.name for spec in LLM_OUTPUTS)
# Output tensors computed only if the BOOL input `return_<name>` says so, as with the vLLM backend, or if the client
# names them and that input is not there.
_FLAGGED = (
    "finish_reason",
    "cumulative_logprob",
    "logprobs",
    "prompt_logprobs",
    "num_input_tokens",
    "num_output_tokens",
)
TEXT_OUTPUTS = frozenset({"text_output", "text_window_ids", "text_window_spans"})
# The server, its HTTP generate endpoint and its clients put these beside the parameters a client means for us.
_RESERVED_PARAMETERS = frozenset(
    {"id", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "binary_data_output"}
)
# The server keeps a request's `priority` to itself, so ours has another name. Read whatever else is sent.
PRIORITY_PARAMETER = "paged_priority"


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """How a request wants to be answered.

    Attributes:
        stream: a response per step rather than one in all.
        cumulative: each response of a stream says everything so far.
        outputs: names of the output tensors to compute.
        prefix: text before a non-streamed output: the prompt, or nothing.
        skip_special_tokens: how the output is decoded.
    """

    stream: bool
    outputs: frozenset[str]
    prefix: str = ""
    skip_special_tokens: bool = True
    cumulative: bool = False


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request ready for the engine.

    `field` is what its interface calls the prompt; `timeout_s` how many seconds it may take from now, None: any.
    """

    prompt: str | list[int]
    field: str
    params: SamplingParams
    options: ResponseOptions
    timeout_s: float | None = None


def is_stop(request: Any) -> bool:
    """True if the request only cancels another one (`stop`); its other tensors then mean nothing."""
    return bool(RequestTensors(request).boolean("stop"))


def parse_request(request: Any, *, has_tokenizer: bool = True, tokenizer: Tokenizer | None = None) -> ParsedRequest:
    """Read one request.

    Args:
        request: the stub's `InferenceRequest`.
        has_tokenizer: whether the engine can turn tokens into text.
        tokenizer: whose chat template turns `messages` into a prompt.

    Raises:
        InvalidRequestError, UnsupportedError: the message names the tensor or parameter at fault.
    """
    tensors = RequestTensors(request)
    prompt, field = _prompt(tensors, tokenizer)
    given = _json_object(request.parameters() or "{}", "parameters")
    params = _sampling_params(tensors, given)
    stream = bool(tensors.boolean("stream"))
    outputs = _outputs(tensors, request.requested_output_names(), params, is_text=field != "input_ids")
    if "cumulative_logprob" in outputs and params.logprobs is None and not params.use_beam_search:
        params = dataclasses.replace(params, logprobs=0)
    if not has_tokenizer and outputs & TEXT_OUTPUTS:
        name = min(outputs & TEXT_OUTPUTS)
        message = f"`{name}`: this engine runs without a tokenizer; request `output_ids` instead"
        raise UnsupportedError(message, field=name)
    if not params.detokenize and outputs & TEXT_OUTPUTS:
        message = "sampling parameter `detokenize` is false, which leaves no text: request `output_ids` instead"
        raise InvalidRequestError(message, field="detokenize")
    text = prompt if isinstance(prompt, str) else tensors.string("prompt_text")
    if text is not None and field == "input_ids":
        # The ids are the ensemble's doing: its client sent the text, and errors are to name that.
        field = "text_input"
    prefix = (text or "") if _prepend(tensors, stream, is_chat=field == "messages") else ""
    options = ResponseOptions(
        stream and params.output_kind != "final_only",
        outputs,
        prefix,
        params.skip_special_tokens,
        cumulative=stream and params.output_kind == "cumulative",
    )
    return ParsedRequest(prompt, field, params, options, _timeout_s(request, given))


def stop_options(request: Any) -> ResponseOptions:
    """How a `stop` request is answered: one response that says nothing."""
    names = request.requested_output_names()
    return ResponseOptions(False, _defaults(names, is_text=True) - set(_FLAGGED))


def _prompt(tensors: RequestTensors, tokenizer: Tokenizer | None) -> tuple[str | list[int], str]:
    has_text, has_ids = "text_input" in tensors, "input_ids" in tensors
    if "messages" in tensors:
        if has_text or has_ids:
            raise InvalidRequestError("give `messages` or another prompt, not both", field="messages")
        return _chat(tensors, tokenizer), "messages"
    if "tools" in tensors:
        raise InvalidRequestError("`tools` needs `messages`", field="tools")
    if has_text and has_ids:
        raise InvalidRequestError("give `text_input` or `input_ids`, not both", field="input_ids")
    if has_ids:
        ids = tensors.integers("input_ids")
        if not ids:
            raise InvalidRequestError("`input_ids` is empty: give at least one token", field="input_ids")
        return ids, "input_ids"
    if not has_text:
        message = "a prompt is missing: give `text_input`, `messages` or `input_ids`"
        raise InvalidRequestError(message, field="text_input")
    text = tensors.string("text_input")
    if not text:
        raise InvalidRequestError("`text_input` is empty: give at least one character", field="text_input")
    return text, "text_input"


def _chat(tensors: RequestTensors, tokenizer: Tokenizer | None) -> str:
    """The prompt text of a conversation."""
    if tokenizer is None:
        raise UnsupportedError("`messages`: this engine runs without a tokenizer; give `input_ids`", field="messages")
    messages, tools = (_json(tensors.string(name), name) for name in ("messages", "tools"))
    return render_chat(tokenizer, messages, tools=tools)


def _prepend(tensors: RequestTensors, stream: bool, *, is_chat: bool) -> bool:
    """Whether the prompt goes before the output; unless told, not in a stream and not before an answer in a chat."""
    exclude = tensors.boolean("exclude_input_in_output")
    if not stream and is_chat:
        return exclude is False
    if not stream:
        return not exclude
    if exclude is False:
        # The vLLM backend's words: clients match them.
        raise InvalidRequestError(
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed.",
            field="exclude_input_in_output",
        )
    return False


def _outputs(
    tensors: RequestTensors, requested: Iterable[str], params: SamplingParams, *, is_text: bool
) -> frozenset[str]:
    names = frozenset(requested)
    flags = {name: tensors.boolean(f"return_{name}") for name in _FLAGGED}
    # An ensemble names all that any of its clients may want.
    if names < _ALL_OUTPUTS and "text_window_ids" not in names:
        flags = {name: name in names if flag is None else flag for name, flag in flags.items()}
    wanted = {name for name, flag in flags.items() if flag}
    if tensors.boolean(RETURN_LOG_PROBS):
        wanted |= {"logprobs", "cumulative_logprob"}
    outputs = _defaults(names, is_text=is_text) - (set(_FLAGGED) - wanted)
    if "text_window_ids" in outputs and not (params.spaces_between_special_tokens or params.skip_special_tokens):
        message = "`spaces_between_special_tokens` false is not supported in the ensemble: use the engine model"
        raise UnsupportedError(message, field="spaces_between_special_tokens")
    if params.n > 1:
        if "text_window_ids" in outputs:
            # The stateless detokenizer makes one text of each response.
            raise UnsupportedError("`n` > 1 is not supported in the ensemble: use the engine model", field="n")
        outputs |= {"sequence_index"}
    return outputs


def _defaults(requested: Iterable[str], *, is_text: bool) -> frozenset[str]:
    """The requested outputs. A client that names none (the server then asks for all) gets its own interface's."""
    names = frozenset(requested)
    if names < _ALL_OUTPUTS:
        return names
    own = {"text_output"} if is_text else {"output_ids", "sequence_index"}
    return frozenset({*own, *_FLAGGED})


def _sampling_params(tensors: RequestTensors, given: dict[str, Any]) -> SamplingParams:
    """From the tensor `sampling_parameters` if sent, else from the request's own parameters (never a mixture); tensors
    with TensorRT-LLM's names add to the former and win over the latter.

    Args:
        given: the request's own parameters.
    """
    text = tensors.string("sampling_parameters")
    aliased = alias_parameters(tensors)
    if text is not None:
        values = {**aliased, **_json_object(text, "sampling_parameters")}
    else:
        values = {**{key: value for key, value in given.items() if not _is_reserved(key)}, **aliased}
    if PRIORITY_PARAMETER in given:
        values.setdefault("priority", given[PRIORITY_PARAMETER])
    # NaN and Infinity pass as floats here; SamplingParams refuses them by name.
    return SamplingParams.from_mapping({key: _typed(key, value) for key, value in values.items()})


def _is_reserved(name: str) -> bool:
    # A name with a dash is an HTTP header that the server was told to forward.
    return name in _RESERVED_PARAMETERS or name == PRIORITY_PARAMETER or "-" in name or name.startswith("triton_")


def _timeout_s(request: Any, given: dict[str, Any]) -> float | None:
    """The request's own timeout, in microseconds. HTTP's generate endpoints pass theirs on as a parameter."""
    timeout = request.timeout() or _typed("timeout", given.get("timeout", 0))
    if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 0:
        message = f"`timeout` must be an integer of at least 0 (microseconds), got {timeout!r}"
        raise InvalidRequestError(message, field="timeout")
    return timeout / 1e6 if timeout else None


def _json_object(text: str, field: str) -> dict[str, Any]:
    values = _json(text, field)
    if not isinstance(values, dict):
        raise InvalidRequestError(f"`{field}` must be a JSON object, got {type(values).__name__}", field=field)
    return values


def _json(text: str | None, field: str) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"`{field}` is not valid JSON: {json_problem(error)}", field=field) from error


def _typed(name: str, value: Any) -> Any:
    """`value`, or what it spells if it is a string ("100", "0.5", "False"): clients of older servers send those."""
    if not isinstance(value, str) or name in ("stop", "cache_salt"):
        return value
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(value.strip(), value))
    except (ValueError, RecursionError):
        return value
