"""Chat templates: the demo model's as transformers renders it, and what goes wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paged_backend.chat import render_chat
from paged_backend.errors import InvalidRequestError, UnsupportedError
from paged_backend.model_source import DEMO_MODEL, resolve_model
from paged_backend.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "What is <b>2 & 3</b>?"}]


def _with(template: str | None) -> SimpleNamespace:
    return SimpleNamespace(chat_template=template, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model(DEMO_MODEL))


def test_demo_template(tokenizer):
    text = render_chat(tokenizer, MESSAGES)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is <b>2 & 3</b>?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "messages",
    [
        MESSAGES,
        [{"role": "system", "content": "Be brief."}, *MESSAGES, {"role": "assistant", "content": "5"}, *MESSAGES],
    ],
)
def test_as_transformers_renders_it(tokenizer, messages):
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        [messages], chat_template=tokenizer.chat_template, add_generation_prompt=True
    )
    assert render_chat(tokenizer, messages) == expected


CALLS = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize("message", [{**CALLS, "content": None}, CALLS, {"role": "assistant", "content": None}])
def test_no_content_is_an_empty_one(tokenizer, message):
    expected = render_chat(tokenizer, [*MESSAGES, {**message, "content": ""}])
    assert render_chat(tokenizer, [*MESSAGES, message]) == expected


@pytest.mark.parametrize("content", [5, False, {"type": "text", "text": "x"}])
def test_a_content_of_the_wrong_type_is_named(tokenizer, content):
    with pytest.raises(InvalidRequestError, match=r'`messages`\[1\]: the "content" must be a string'):
        render_chat(tokenizer, [*MESSAGES, {"role": "user", "content": content}])


def test_a_part_that_is_not_text_is_named(tokenizer):
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(UnsupportedError, match=r"`messages`\[1\]: a part .*text only"):
        render_chat(tokenizer, [*MESSAGES, image])


def test_template_helpers():
    template = (
        "{{ bos_token }}{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% break %}{% endfor %}"
    )
    assert render_chat(_with(template), MESSAGES, tools=[{"name": "é<"}]) == '<s>{"name": "é<"}'


@pytest.mark.parametrize("messages", [[], {}, "hi", [1], [{"content": "x"}], [{"role": 1}]])
def test_malformed_messages_are_refused(tokenizer, messages):
    with pytest.raises(InvalidRequestError, match="`messages`"):
        render_chat(tokenizer, messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content + 1 }}",
        "{{ ''.__class__.__mro__ }}{{ x.y.z }}",
    ],
)
def test_a_template_that_refuses_is_the_requests_error(template):
    with pytest.raises(InvalidRequestError, match="refuses"):
        render_chat(_with(template), MESSAGES)


def test_the_sandbox_holds():
    with pytest.raises(InvalidRequestError):
        render_chat(_with("{{ messages.append(1) }}"), MESSAGES)
    with pytest.raises(InvalidRequestError):
        render_chat(_with("{{ ''.__class__.__mro__[1].__subclasses__() }}"), MESSAGES)


def test_models_without_a_usable_template():
    with pytest.raises(UnsupportedError, match="no chat template"):
        render_chat(_with(None), MESSAGES)
    with pytest.raises(UnsupportedError, match="broken"):
        render_chat(_with("{% if %}"), MESSAGES)
