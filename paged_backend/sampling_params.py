"""`SamplingParams`: how the tokens of one request are chosen and when it stops. Names and bounds follow vLLM's.

It validates itself on construction and knows nothing of the model and of the server's limits: checks against a
vocabulary, a context length or a configured limit happen where the request meets the engine. The reference for users is
docs/sampling_parameters.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from paged_backend.param_checks import (
    bad,
    check_biases,
    check_flag,
    check_int,
    check_number,
    check_text,
    check_texts,
    check_token_ids,
    show,
    unknown,
)
from paged_backend.structured_params import StructuredOutputs

# Below this temperature sampling is greedy. Only logits within some hundredths of the largest would have a chance, and
# those are ties to the half-precision model that made them.
GREEDY_TEMPERATURE = 1e-3
MAX_SEED = 2**64 - 1
OUTPUT_KINDS = ("cumulative", "delta", "final_only")
# vLLM's older names for the same.
_ALIASES = {"guided_decoding": "structured_outputs"}
_FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "use_beam_search",
)
# What a beam search, which samples nothing, has no use for.
_NOT_IN_BEAM_SEARCH = (
    "stop",
    "logprobs",
    "prompt_logprobs",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    The order in which they work: form of the output (`structured_outputs`) and `allowed_token_ids`, `bad_words`,
    `min_tokens`, `logit_bias`, penalties, `temperature`, `min_p`, `top_k`, `top_p`. Log-probabilities are those of the
    raw logits, before any of it.

    Args:
        temperature: >= 0; below 0.001 the most likely token is taken (greedy). Default 1.0.
        top_p: in (0, 1]; smallest set of tokens whose probability reaches it. 1 is off.
        top_k: keep the k most likely tokens; 0 or -1 is off.
        min_p: in [0, 1]; drop tokens less likely than `min_p` times the most likely one. 0 is off.
        seed: integer that makes sampling reproducible, or None for a fresh one.
        max_tokens: >= 1, how many tokens to generate at most; None means up to the context length. Default 16.
        min_tokens: >= 0; so many tokens come before a token or a stop string may end the output.
        stop: string or strings that end the output; the text is cut before the match.
        stop_token_ids: token ids that end the output.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        include_stop_str_in_output: keep the matched stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: keep the space that some tokenizers put between special tokens.
        detokenize: turn tokens into text; without it there are only token ids.
        truncate_prompt_tokens: keep only so many tokens of the prompt, the last ones; -1: as many as the context
            length leaves.
        n: outputs to sample side by side, with seeds derived from `seed`; in a beam search, outputs to return.
        presence_penalty: in [-2, 2]; subtracted from the logits of tokens that were generated already.
        frequency_penalty: in [-2, 2]; subtracted once for each time that a token was generated.
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens in the prompt or the output.
        logit_bias: token ids with what to add to their logits.
        allowed_token_ids: the only token ids that may be generated.
        bad_words: strings that are not generated, neither as they stand nor after a space.
        logprobs: return the sampled token's log-probability and those of so many most likely tokens.
        prompt_logprobs: the same for each token of the prompt but the first.
        structured_outputs: the form that the output must have; `guided_decoding` is another name for it.
        output_kind: what a stream's responses hold: `delta` (what is new), `cumulative` (all so far) or `final_only`
            (one response at the end).
        use_beam_search: search for the most likely outputs instead of sampling; needs temperature 0.
        beam_width: beams of a beam search; None: `n`.
        length_penalty: an output's score is its log-probability divided by its length to this power.
        early_stopping: stop a beam search once `beam_width` outputs are complete (true), when a better one is unlikely
            (false), or only when none is possible (`"never"`), as transformers does.
        priority: the lower, the more urgent, under the scheduling policy `priority`.
        cache_salt: share cached KV blocks only with requests of the same salt.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of bounds; `field` names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    output_kind: str = "delta"
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        if self.output_kind not in OUTPUT_KINDS:
            raise bad("output_kind", f"must be one of {', '.join(OUTPUT_KINDS)}; got {show(self.output_kind)}")
        if self.cache_salt is not None:
            check_text("cache_salt", self.cache_salt)
        self._normalise()
        if self.min_tokens > (math.inf if self.max_tokens is None else self.max_tokens):
            raise bad("min_tokens", f"({self.min_tokens}) must not exceed `max_tokens` ({self.max_tokens})")
        if self.stop and not self.detokenize:
            raise bad("stop", "is matched against text: it needs `detokenize`")
        _check_beam_search(self)

    def _normalise(self) -> None:
        """Give lists and objects their one inner form."""
        values: dict[str, object] = {
            "stop": check_texts("stop", () if self.stop is None else self.stop, single=True),
            "bad_words": check_texts("bad_words", () if self.bad_words is None else self.bad_words),
            "stop_token_ids": check_token_ids(
                "stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids
            ),
        }
        if self.allowed_token_ids is not None:
            values["allowed_token_ids"] = check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise bad("allowed_token_ids", "must hold at least one token id")
        if self.logit_bias is not None:
            values["logit_bias"] = dict(check_biases("logit_bias", self.logit_bias)) or None
        if self.structured_outputs is not None:
            values["structured_outputs"] = StructuredOutputs.from_value(self.structured_outputs)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def num_rows(self) -> int:
        """Sequences computed side by side."""
        return self.beam_width if self.use_beam_search and self.beam_width is not None else self.n

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids`, always as a tuple."""
        return cast("tuple[int, ...]", self.stop_token_ids)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of token id and bias, lower ids first."""
        return tuple(cast("Mapping[int, float]", self.logit_bias or {}).items())

    @property
    def structure(self) -> StructuredOutputs | None:
        """`structured_outputs`, never as a mapping."""
        return cast("StructuredOutputs | None", self.structured_outputs)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a JSON-like mapping; an unknown key is refused by name, with the nearest valid one."""
        known = [f.name for f in fields(cls)]
        arguments: dict[str, Any] = {}
        for key, value in values.items():
            name = _ALIASES.get(key, key)
            if name not in known:
                raise unknown(key, [*known, *_ALIASES])
            if name in arguments:
                raise bad(name, f"is given twice (as `{key}` too)")
            arguments[name] = value
        return cls(**arguments)


def _check_numbers(params: SamplingParams) -> None:
    for name, low, high in (
        ("temperature", 0.0, math.inf),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("length_penalty", -math.inf, math.inf),
    ):
        object.__setattr__(params, name, check_number(name, getattr(params, name), low, high))
    for name, most in (("top_p", 1.0), ("repetition_penalty", math.inf)):
        object.__setattr__(params, name, check_number(name, getattr(params, name), 0.0, most, low_open=True))
    check_int("top_k", params.top_k, -1)
    check_int("min_tokens", params.min_tokens, 0)
    check_int("n", params.n, 1)
    check_int("priority", params.priority, -(2**31), 2**31 - 1)
    optional: tuple[tuple[str, int, int | None], ...] = (
        ("seed", -(2**63), MAX_SEED),
        ("max_tokens", 1, None),
        ("logprobs", 0, None),
        ("prompt_logprobs", 0, None),
        ("truncate_prompt_tokens", -1, None),
        ("beam_width", 1, None),
    )
    for name, least, greatest in optional:
        if getattr(params, name) is not None:
            check_int(name, getattr(params, name), least, greatest)
    if params.truncate_prompt_tokens == 0:
        raise bad("truncate_prompt_tokens", "must be at least 1, or -1 for what the context length leaves; got 0")


def _check_beam_search(params: SamplingParams) -> None:
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        raise bad("early_stopping", f'must be true, false or "never", got {show(params.early_stopping)}')
    if not params.use_beam_search:
        if params.beam_width is not None:
            raise bad("beam_width", "needs `use_beam_search`")
        return
    width = params.n if params.beam_width is None else params.beam_width
    object.__setattr__(params, "beam_width", width)
    if width < params.n:
        raise bad("beam_width", f"({width}) must be at least `n` ({params.n})")
    if params.temperature >= GREEDY_TEMPERATURE:
        raise bad("temperature", "must be 0 in a beam search: it does not sample")
    for name in _NOT_IN_BEAM_SEARCH:
        # An explicit 0 of `prompt_logprobs` asks for something too.
        if getattr(params, name) or (name == "prompt_logprobs" and params.prompt_logprobs is not None):
            raise bad(name, "is not supported in a beam search")
