"""Chat messages to prompt text, by the model's own Jinja chat template.

The template comes with the model, so it runs in Jinja's immutable sandbox; the helpers it may call are the ones that
published templates expect of transformers (`raise_exception`, `strftime_now`, `tojson`). Knows no tokens and no server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paged_backend.errors import InvalidRequestError, UnsupportedError
from paged_backend.param_checks import show
from paged_backend.tokenizer import Tokenizer


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt text of a conversation.

    Args:
        tokenizer: of the model whose chat template is used.
        messages: at least one mapping with a string `role` and, as a rule, a `content`: a string, or a list of parts
            `{"type": "text", "text": "..."}`, which are joined by line ends. None stands for an empty string.
        tools: tool descriptions, handed to the template as they are.
        add_generation_prompt: end with what begins an answer of the assistant.

    Raises:
        UnsupportedError: the model has no chat template, or a message has a part that is not text.
        InvalidRequestError: the messages are malformed, or the template refuses them; `field` is `messages`.
    """
    if tokenizer.chat_template is None:
        raise UnsupportedError("`messages`: this model has no chat template; send the prompt as text", field="messages")
    _check_messages(messages)
    if tools is not None and not (isinstance(tools, (list, tuple)) and all(isinstance(t, Mapping) for t in tools)):
        raise InvalidRequestError("`tools` must be a list of objects", field="tools")
    plain = [_with_plain_text(message, position) for position, message in enumerate(messages)]
    try:
        return _compile(tokenizer.chat_template).render(
            messages=plain,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            bos_token=tokenizer.bos_token or "",
            eos_token=tokenizer.eos_token or "",
        )
    except jinja2.TemplateSyntaxError as error:
        raise UnsupportedError(f"`messages`: the model's chat template is broken: {error}", field="messages") from error
    except Exception as error:  # whatever the template's code raises on these messages
        raise InvalidRequestError(
            f"`messages`: the model's chat template refuses them: {error}", field="messages"
        ) from error


def _check_messages(messages: object) -> None:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequestError("`messages` must be a list of at least one message", field="messages")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            problem = f'`messages`[{position}] must be an object with a string "role" (and a "content")'
            raise InvalidRequestError(problem, field="messages")


def _with_plain_text(message: Mapping[str, Any], position: int) -> Mapping[str, Any]:
    """The message with its content as one string: most templates take nothing else.

    No content is what OpenAI's clients send beside `tool_calls`; templates ask whether there is some, or append it.
    """
    parts = message.get("content")
    if parts is None and ("content" in message or message.get("tool_calls")):
        return {**message, "content": ""}
    if parts is None or isinstance(parts, str):
        return message
    if not isinstance(parts, (list, tuple)):
        problem = f'`messages`[{position}]: the "content" must be a string, null or a list of parts, got {show(parts)}'
        raise InvalidRequestError(problem, field="messages")
    texts = []
    for part in parts:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            problem = (
                f'`messages`[{position}]: a part of a content must be {{"type": "text", "text": "..."}}: this model '
                "reads text only"
            )
            raise UnsupportedError(problem, field="messages")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not have.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
