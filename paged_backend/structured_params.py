"""`StructuredOutputs`: what form a request's output must have. Names follow vLLM's `structured_outputs`.

It checks itself; whether the schema, pattern or grammar in it means anything is for the compiler in `structured/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paged_backend.errors import UnsupportedError
from paged_backend.param_checks import bad, check_flag, check_text, check_texts, json_problem, show, unknown

_NAME = "structured_outputs"
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_FOR_JSON = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
# Keys of vLLM's that change nothing here: there is one compiler, and nothing to fall back to.
_IGNORED = frozenset({"backend", "disable_fallback", "_backend", "_backend_was_auto"})


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form of an output; exactly one of the first five is given.

    Args:
        json: a JSON schema, as an object or as its text; `true` is any JSON value.
        json_object: any JSON object.
        regex: a regular expression that the whole output matches.
        choice: the output is one of these strings.
        grammar: an EBNF grammar with the rule `root` (GBNF), or a Lark grammar with the rule `start`.
        disable_any_whitespace: JSON without optional whitespace.
        disable_additional_properties: objects of a schema that does not say so have no properties beyond it.
        whitespace_pattern: regular expression of the whitespace between the parts of JSON.

    Raises:
        InvalidRequestError: a value has the wrong type, or not exactly one form is given.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is not None and not check_flag(f"{_NAME}.json_object", self.json_object):
            object.__setattr__(self, "json_object", None)
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise bad(_NAME, f"needs exactly one of {', '.join(_KINDS)}; got {', '.join(given) or 'none'}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                check_text(f"{_NAME}.{name}", getattr(self, name))
        if self.choice is not None:
            choice = check_texts(f"{_NAME}.choice", self.choice)
            if not choice:
                raise bad(f"{_NAME}.choice", "must hold at least one string")
            object.__setattr__(self, "choice", choice)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            check_flag(f"{_NAME}.{name}", getattr(self, name))
        self._check_json_options()

    def _check_json_options(self) -> None:
        used = [name for name in _FOR_JSON if getattr(self, name)]
        if used and self.json is None and self.json_object is None:
            raise bad(f"{_NAME}.{used[0]}", "is about JSON: it needs `json` or `json_object`")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise bad(f"{_NAME}.whitespace_pattern", "contradicts `disable_any_whitespace`")

    @property
    def size(self) -> int:
        """Characters of what is to be compiled."""
        texts = [self.json, self.regex, self.grammar, self.whitespace_pattern, *(self.choice or ())]
        return sum(len(text) for text in texts if isinstance(text, str))

    @classmethod
    def from_value(cls, value: object) -> StructuredOutputs:
        """Build from an object of that class or a JSON-like mapping; an unknown key is refused by name."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise bad(_NAME, f"must be an object, got {show(value)}")
        known = [f.name for f in fields(cls)]
        values = {key: item for key, item in value.items() if key not in _IGNORED}
        if values.pop("structural_tag", None) is not None:
            raise UnsupportedError(
                f"sampling parameter `{_NAME}.structural_tag` is not supported: use `grammar`", field=_NAME
            )
        for key in values:
            if key not in known:
                raise unknown(key, known, prefix=f"{_NAME}.")
        return cls(**{key: item for key, item in values.items() if item is not None})


def _schema_text(schema: object) -> str:
    """A schema as canonical text, so that equal schemas are compiled once."""
    name = f"{_NAME}.json"
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise bad(name, f"is not valid JSON: {show(json_problem(error))}") from error
    if not isinstance(value, (dict, bool)):
        raise bad(name, f"must be a JSON schema (an object), got {show(value)}")
    if value is False:
        raise bad(name, "is the schema `false`, which no output can have")
    # The schema `true` is another word for the empty one.
    return "{}" if value is True else text
