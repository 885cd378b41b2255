"""From `StructuredOutputs` to the grammar text that llguidance compiles. Knows forms and syntax; compiles nothing."""

from __future__ import annotations

import json
from typing import Any

from paged_backend.errors import PagedBackendError
from paged_backend.param_checks import bad
from paged_backend.structured_params import StructuredOutputs

_ANY_OBJECT = '{"type": "object"}'
# Longest part of the compiler's own words that goes into an error message.
_SHOWN_CHARACTERS = 300
# The time to convert an EBNF grammar grows with the square of its rules.
_MOST_RULES = 1000


def grammar_text(wanted: StructuredOutputs) -> str:
    """The grammar of a form, in the notation of llguidance; equal forms give equal texts.

    Raises:
        InvalidRequestError: the form is malformed.
        ImportError: llguidance is missing.
    """
    try:
        return _written(wanted)
    except RecursionError as error:
        raise refused("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise refused("it is not valid Unicode") from error
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(error, PagedBackendError):
            raise
        raise refused(str(error)) from error


def _written(wanted: StructuredOutputs) -> str:
    from llguidance import LLMatcher, regex_to_lark

    if wanted.regex is not None:
        # `\d` and `\w` mean ASCII, as in JSON Schema: who asks for digits rarely expects those of all scripts.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(wanted.regex, 'dw')}/")
    if wanted.choice is not None:
        # Strings of this notation are JSON's.
        strings = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        return LLMatcher.grammar_from_lark(f"start: {strings}")
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(_lark(wanted.grammar))
    schema = json.loads(_ANY_OBJECT if wanted.json is None else str(wanted.json))
    if wanted.disable_additional_properties:
        schema = _closed(schema)
    options: dict[str, Any] = {}
    if wanted.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if wanted.whitespace_pattern is not None:
        options["whitespace_pattern"] = wanted.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), overrides=options)  # type: ignore[arg-type]


def refused(message: str) -> Exception:
    """The error of a form that does not compile; the compiler's words say where it went wrong."""
    text = " ".join(message.split())
    text = text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
    return bad("structured_outputs", f"cannot be compiled: {text}")


def _lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    if grammar.count("::=") > _MOST_RULES:
        raise refused(f"an EBNF grammar may have at most {_MOST_RULES} rules")
    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter raises bare ones
        raise refused(str(error)) from error


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in every object that lists properties and does not say; not inside
    `allOf`, whose parts would rule out each other's properties."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: value if key == "allOf" else _closed(value) for key, value in schema.items()}
    if isinstance(inner.get("properties"), dict):
        inner.setdefault("additionalProperties", False)
    return inner
