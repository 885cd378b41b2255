"""`LLM`: the engine for a script, offline. The same `Engine` that serves clients, driven by a loop of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from tqdm import tqdm

from paged_backend.chat import render_chat
from paged_backend.config import DEFAULT_MODEL, EngineConfig
from paged_backend.engine.engine import Engine
from paged_backend.engine.outputs import CompletionOutput, RequestOutput, SequenceDelta
from paged_backend.errors import EngineDeadError, InvalidRequestError, UnsupportedError
from paged_backend.param_checks import show
from paged_backend.request import Request
from paged_backend.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A language model to generate with; use it as a context manager, or call `close()`.

    Args:
        model: directory, .gguf file, the demo model's name, or a hub id.
        engine_args: any field of `EngineConfig` (`dtype`, `block_size`, `num_kv_blocks`, `max_num_seqs`, ...).

    Raises:
        ConfigError, ModelLoadError, UnsupportedError: the model cannot be served as configured.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **engine_args: Any) -> None:
        self._engine: Engine | None = Engine(EngineConfig.from_mapping({"model": model, **engine_args}))
        self._ids = itertools.count()

    @property
    def engine(self) -> Engine:
        """The engine itself."""
        if self._engine is None:
            raise EngineDeadError("this LLM is closed")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for each prompt; the outputs come in the order of the prompts.

        Args:
            prompts: a string, a list of token ids, a mapping `{"prompt_token_ids": [...]}` (or `{"prompt": "..."}`),
                or a list of these.
            sampling_params: for all prompts, or one each; None is `SamplingParams()`.
            use_tqdm: show a progress bar.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be served; nothing is generated then.
        """
        engine = self.engine
        prompt_list = _prompt_list(prompts)
        params_list = _params_per_prompt(sampling_params, len(prompt_list))
        requests = [self._make_request(p, s) for p, s in zip(prompt_list, params_list, strict=True)]
        outputs = {request.request_id: _empty_output(request) for request in requests}
        try:
            for request in requests:
                engine.add_request(request)
            with tqdm(total=len(requests), disable=not use_tqdm, desc="Prompts", dynamic_ncols=True) as progress:
                while engine.has_unfinished_requests():
                    progress.update(_extend(outputs, engine.step()))
        finally:
            # Whatever interrupts the loop (Ctrl-C, say) must not leave requests in the engine.
            for request in requests:
                engine.abort_request(request.request_id)
        for request in requests:
            outputs[request.request_id].num_cached_tokens = request.num_cached_tokens
        return list(outputs.values())

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Generate an answer to a conversation, or to each of several, in the model's chat format.

        Args:
            messages: `[{"role": "user", "content": "..."}]`, or a list of such conversations.
            sampling_params, use_tqdm: as for `generate`.
            tools, add_generation_prompt: as for `render_chat`.

        Raises:
            UnsupportedError: the model has no chat template, or the engine no tokenizer.
            InvalidRequestError: the messages or parameters cannot be served; nothing is generated then.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise UnsupportedError("`messages`: this engine runs without a tokenizer", field="messages")
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        prompts = [render_chat(tokenizer, conversation, **options) for conversation in _conversations(messages)]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stats(self) -> dict[str, int]:
        """The engine's counts; see `Engine.stats`."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV contents."""
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Free the model's memory; a second call does nothing."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        return self.engine.make_request(str(next(self._ids)), _prompt_content(prompt), params)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, Sequence) and not isinstance(prompts, (bytes, bytearray)):
        if prompts and all(map(_is_token_id, prompts)):
            return [cast("Sequence[int]", prompts)]
        return list(cast("Sequence[Prompt]", prompts))
    message = f"must be a string, token ids, a mapping or a list of these, got {type(prompts).__name__}"
    raise InvalidRequestError(f"`prompts` {message}", field="prompts")


def _is_token_id(item: object) -> bool:
    """Whether it is an integer, numpy's included; the engine knows the vocabulary's bounds."""
    return isinstance(item, Integral) and not isinstance(item, bool)


def _conversations(messages: Any) -> Sequence[Any]:
    """One conversation, which is a list of mappings, or a list of several; `render_chat` refuses anything else."""
    several = isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], (list, tuple))
    return messages if several else [messages]


def _prompt_content(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping) and len(prompt) == 1:
        token_ids = prompt.get("prompt_token_ids")
        if token_ids is not None and not isinstance(token_ids, (str, bytes)):
            # Also arrays and tensors of ids, one-dimensional.
            return list(token_ids) if isinstance(token_ids, Iterable) else token_ids
        if isinstance(prompt.get("prompt"), str):
            return prompt["prompt"]
    if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray)):
        return list(prompt)  # the engine checks the ids
    message = f'`prompt` must be a string, a list of token ids or {{"prompt_token_ids": [...]}}, got {show(prompt)}'
    raise InvalidRequestError(message, field="prompt")


def _params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, (list, tuple)) or not all(isinstance(each, SamplingParams) for each in params):
        message = f"must be SamplingParams or a list of one per prompt, got {type(params).__name__}"
        raise InvalidRequestError(f"`sampling_params` {message}", field="sampling_params")
    if len(params) != num_prompts:
        message = f"{len(params)} sampling_params for {num_prompts} prompts: give one, or one each"
        raise InvalidRequestError(message, field="sampling_params")
    return params


def _empty_output(request: Request) -> RequestOutput:
    outputs = [CompletionOutput(index) for index in range(request.params.n)]
    return RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, outputs)


def _extend(outputs: dict[str, RequestOutput], deltas: list[SequenceDelta]) -> int:
    """Add a step's deltas to their outputs; returns how many requests finished."""
    for delta in deltas:
        output = outputs[delta.request_id]
        output.outputs[delta.index].extend(delta)
        output.finished |= delta.request_finished
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = delta.prompt_logprobs
    return sum(delta.request_finished for delta in deltas)
