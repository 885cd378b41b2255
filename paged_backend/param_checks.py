"""Checks that parameter classes share: a value's type and bounds, with an error that names the parameter.

An error message repeats at most a few dozen characters of what a client sent, whatever its size. Knows no parameter.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from paged_backend.errors import InvalidRequestError

_SHOWN_CHARACTERS = 80


def show(value: object) -> str:
    """`repr` cut to a length that fits an error message; what is cut off is not even made."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    short = reprlib.Repr()
    short.maxstring = short.maxother = _SHOWN_CHARACTERS
    try:
        text = short.repr(value)
    except ValueError:  # somewhere inside is an integer that Python refuses to write out
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def json_problem(error: Exception) -> str:
    """What is wrong with a text that `json` could not read, without advice on Python's own settings."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if "integer string conversion" in str(error):
        return "a number in it is too long"
    return str(error)


def bad(name: str, what: str) -> InvalidRequestError:
    """The error of a sampling parameter."""
    return InvalidRequestError(f"sampling parameter `{name}` {what}", field=name)


def unknown(key: object, known: Iterable[str], prefix: str = "") -> InvalidRequestError:
    """The error of a key that is no parameter, with the nearest one that is."""
    names, text = list(known), str(key)[:_SHOWN_CHARACTERS]
    near = get_close_matches(text, names, n=1)
    hint = f"; did you mean `{prefix}{near[0]}`?" if near else f"; known: {', '.join(names)}"
    return InvalidRequestError(f"sampling parameter `{prefix}{text}` is not known{hint}", field=prefix + text)


def check_number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    """A finite number within bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise bad(name, f"must be a number, got {show(value)}")
    bounds = f"{'(' if low_open or low == -math.inf else '['}{low:g}, {high:g}{']' if math.isfinite(high) else ')'}"
    # Written so that NaN fails it; the float maximum stands for infinity, and refuses integers beyond floats too.
    if not (max(low, -sys.float_info.max) <= value <= min(high, sys.float_info.max)) or (low_open and value == low):
        raise bad(name, f"must be a finite number in {bounds}, got {show(value)}")
    return float(value)


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """An integer within bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad(name, f"must be an integer, got {show(value)}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise bad(name, f"must be {limit}, got {show(value)}")
    return value


def check_flag(name: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise bad(name, f"must be true or false, got {show(value)}")
    return value


def check_text(name: str, value: object) -> str:
    """A string with something in it."""
    if not isinstance(value, str) or not value:
        raise bad(name, f"must be a non-empty string, got {show(value)}")
    return value


def check_texts(name: str, value: object, *, single: bool = False) -> tuple[str, ...]:
    """A list of strings, none empty; with `single` also one string alone."""
    texts = (value,) if single and isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise bad(name, f"must be {'a string or ' if single else ''}a list of strings, got {show(value)}")
    if not all(texts):
        raise bad(name, "must hold strings of at least one character")
    return tuple(texts)


def check_token_ids(name: str, value: object) -> tuple[int, ...]:
    """A list of token ids; their upper bound is the vocabulary's, which only the engine knows."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise bad(name, f"must be a list of integers, got {show(value)}")
    if value and min(value) < 0:
        raise bad(name, f"must hold token ids of at least 0, got {show(min(value))}")
    return tuple(value)


def check_biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """Token ids (as integers, or as strings that spell them: JSON has no other keys) with a finite number each."""
    if not isinstance(value, Mapping):
        raise bad(name, f"must be an object of token ids and numbers, got {show(value)}")
    found: dict[int, float] = {}
    for key, bias in value.items():
        token_id = _spelled_id(key)
        if token_id is None:
            raise bad(name, f"has the key {show(key)}, which is no token id")
        if token_id in found:
            raise bad(name, f"holds token id {show(token_id)} twice")
        # Written so that NaN fails it.
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not (is_number and abs(bias) <= sys.float_info.max):
            raise bad(name, f"must hold finite numbers, got {show(bias)} for token id {show(token_id)}")
        found[token_id] = float(bias)
    return tuple(sorted(found.items()))


def _spelled_id(key: Any) -> int | None:
    if isinstance(key, str) and len(key) <= 20 and key.isascii() and key.isdigit():
        return int(key)
    is_id = isinstance(key, int) and not isinstance(key, bool) and key >= 0
    return key if is_id else None
