"""`SamplingParams`: how the tokens of one request are chosen and when it stops. Names and bounds follow vLLM's.

It validates itself on construction and knows nothing of the model: checks against a vocabulary or a context length
happen where the request meets the engine.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from paged_backend.errors import InvalidRequestError

# Below this temperature the distribution is a point mass in float32; it is treated as greedy.
GREEDY_TEMPERATURE = 1e-5
MAX_SEED = 2**64 - 1
# Bounds that keep one request from exhausting the server: every emitted token is matched against every stop string.
MAX_N = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    Args:
        temperature: >= 0; 0 is greedy. Default 1.0.
        top_p: in (0, 1]; smallest set of tokens whose probability reaches it. 1 is off.
        top_k: keep the k most likely tokens; 0 or -1 is off.
        min_p: in [0, 1]; drop tokens less likely than `min_p` times the most likely one. 0 is off.
        seed: integer that makes sampling reproducible, or None for a fresh one.
        max_tokens: >= 1, how many tokens to generate at most; None means up to the context length. Default 16.
        stop: string or strings that end the output; the text is cut before the match.
        stop_token_ids: token ids that end the output.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        include_stop_str_in_output: keep the matched stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        n: outputs to sample side by side, with seeds derived from `seed`; in a beam search, outputs to return.
        presence_penalty: in [-2, 2]; subtracted from the logits of tokens that were generated already.
        frequency_penalty: in [-2, 2]; subtracted once for each time that a token was generated.
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens in the prompt or the output.
        logprobs: return the sampled token's log-probability and those of so many most likely tokens (0 to 20).
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
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        _check_number(self, "temperature", 0.0, math.inf)
        _check_number(self, "top_p", 0.0, 1.0, low_open=True)
        _check_number(self, "min_p", 0.0, 1.0)
        _check_int(self, "top_k", -1, None)
        if self.seed is not None:
            _check_int(self, "seed", -(2**63), MAX_SEED)
        if self.max_tokens is not None:
            _check_int(self, "max_tokens", 1, None)
        _check_int(self, "n", 1, MAX_N)
        _check_number(self, "presence_penalty", -2.0, 2.0)
        _check_number(self, "frequency_penalty", -2.0, 2.0)
        _check_number(self, "repetition_penalty", 0.0, math.inf, low_open=True)
        _check_int(self, "priority", -(2**31), 2**31 - 1)
        if self.logprobs is not None:
            _check_int(self, "logprobs", 0, MAX_LOGPROBS)
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and self.cache_salt):
            raise _bad("cache_salt", f"must be a non-empty string, got {_show(self.cache_salt)}")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "use_beam_search"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, f"must be true or false, got {_show(getattr(self, name))}")
        object.__setattr__(self, "stop", _normalise_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _normalise_stop_ids(self.stop_token_ids))
        _check_beam_search(self)

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

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a JSON-like mapping; an unknown key is refused by name, with the nearest valid one."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"; did you mean `{near[0]}`?" if near else f"; known: {', '.join(known)}"
                raise InvalidRequestError(f"sampling parameter `{key}` is not known{hint}", field=str(key))
        return cls(**values)


def _show(value: object) -> str:
    """`repr` cut to a length that fits an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _bad(name: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"sampling parameter `{name}` {what}", field=name)


def _check_number(params: SamplingParams, name: str, low: float, high: float, *, low_open: bool = False) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _bad(name, f"must be a number, got {_show(value)}")
    bounds = f"{'(' if low_open or low == -math.inf else '['}{low:g}, {high:g}{']' if math.isfinite(high) else ')'}"
    # Written so that NaN fails it; the float maximum stands for infinity, and refuses integers beyond floats too.
    if not (max(low, -sys.float_info.max) <= value <= min(high, sys.float_info.max)) or (low_open and value == low):
        raise _bad(name, f"must be a finite number in {bounds}, got {_show(value)}")
    object.__setattr__(params, name, float(value))


def _check_int(params: SamplingParams, name: str, low: int, high: int | None) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(name, f"must be an integer, got {_show(value)}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise _bad(name, f"must be {limit}, got {value}")


def _check_beam_search(params: SamplingParams) -> None:
    if params.beam_width is not None:
        _check_int(params, "beam_width", 1, MAX_N)
    _check_number(params, "length_penalty", -math.inf, math.inf)
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        raise _bad("early_stopping", f'must be true, false or "never", got {_show(params.early_stopping)}')
    if not params.use_beam_search:
        if params.beam_width is not None:
            raise _bad("beam_width", "needs `use_beam_search`")
        return
    width = params.n if params.beam_width is None else params.beam_width
    object.__setattr__(params, "beam_width", width)
    if width < params.n:
        raise _bad("beam_width", f"({width}) must be at least `n` ({params.n})")
    if params.temperature >= GREEDY_TEMPERATURE:
        raise _bad("temperature", "must be 0 in a beam search: it does not sample")
    for name in ("stop", "logprobs"):
        if getattr(params, name):
            raise _bad(name, "is not supported in a beam search")


def _normalise_stop(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
        raise _bad("stop", f"must be a string or a list of strings, got {_show(stop)}")
    if len(strings) > MAX_STOP_STRINGS:
        raise _bad("stop", f"may hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    if any(not s or len(s) > MAX_STOP_LENGTH for s in strings):
        raise _bad("stop", f"must hold strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(strings)


def _normalise_stop_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, (list, tuple)) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise _bad("stop_token_ids", f"must be a list of integers, got {_show(ids)}")
    return tuple(ids)
