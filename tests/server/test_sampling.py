"""Chat messages, forms of outputs, prompt log-probabilities and kinds of streams over a real server."""

from __future__ import annotations

import itertools
import json

import pytest
from server.client import GREEDY, Call, events, post

from paged_backend.chat import render_chat
from paged_backend.model_source import DEMO_MODEL, resolve_model
from paged_backend.tokenizer import Tokenizer

pytestmark = pytest.mark.server

QUESTION = "What is the capital of France?"


def test_messages_are_answered_as_the_same_text_is(served):
    params = {**GREEDY, "max_tokens": 12}
    messages = [{"role": "user", "content": QUESTION}]
    by_messages = Call(served.grpc_url, "paged_llm", {"messages": json.dumps(messages)}, params).wait().text
    # What the model's own template writes, a system message included.
    text = render_chat(Tokenizer.load(resolve_model(DEMO_MODEL)), messages)
    by_text = {"text_input": text, "exclude_input_in_output": True}
    assert by_messages == Call(served.grpc_url, "paged_llm", by_text, params).wait().text
    assert by_messages


def test_messages_over_http(served):
    body = {"messages": json.dumps([{"role": "user", "content": QUESTION}]), "temperature": 0, "max_tokens": 12}
    status, answer = post(served.http_url, "paged_llm", "generate_stream", {**body, "stream": True})
    assert status == 200
    assert "".join(event["text_output"] for event in events(answer))
    status, answer = post(served.http_url, "paged_llm", "generate", {"messages": "[]"})
    assert status == 400
    assert "messages" in answer


def test_forms_and_their_refusal(served):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"json": schema, "disable_any_whitespace": True, "disable_additional_properties": True}
    inputs = {"text_input": "JSON: ", "exclude_input_in_output": True, "return_finish_reason": True}
    good = Call(served.grpc_url, "paged_llm", inputs, {**GREEDY, "max_tokens": 16, "structured_outputs": form})
    bad = Call(served.grpc_url, "paged_llm", inputs, {**GREEDY, "structured_outputs": {"regex": "(a|"}})
    assert "structured_outputs" in str(bad.wait().error)
    answer = good.wait()
    assert json.loads(answer.text).keys() == {"ok"}
    assert answer.joined("finish_reason") == [b"stop"]


@pytest.mark.parametrize("stream", [True, False])
def test_prompt_logprobs(served, stream):
    inputs = {"text_input": "Once upon a time", "stream": stream, "return_prompt_logprobs": True}
    params = {**GREEDY, "max_tokens": 3, "prompt_logprobs": 1}
    answer = Call(served.grpc_url, "paged_llm", inputs, params).wait()
    first, *others = answer.joined("prompt_logprobs")
    positions = json.loads(first)
    assert positions[0] is None
    assert len(positions) == 4
    assert all(1 <= len(position) <= 2 for position in positions[1:])
    assert all(other == b"null" for other in others)


def test_kinds_of_streams(served):
    def texts(kind):
        inputs = {"text_input": "Once upon a time", "stream": True}
        params = {**GREEDY, "max_tokens": 8, "output_kind": kind}
        return Call(served.grpc_url, "paged_llm", inputs, params).wait().texts

    delta, cumulative, final = (texts(kind) for kind in ("delta", "cumulative", "final_only"))
    assert final == ["".join(delta)]
    assert cumulative[-1] == final[0]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(cumulative))
