"""A bad request is refused with the field's name; the neighbour's stream and the next request go on.

That the code is INVALID_ARG is tested with the adapter's unit tests: a gRPC stream carries only the message, and HTTP
makes 400 of every code.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from server.client import GREEDY, Call, ask, post

pytestmark = pytest.mark.server

GOOD = {"text_input": "Once upon a time", "stream": True}
LONG = 60

# What is sent besides a good request's tensors (None: left out), the sampling parameters' JSON, and the field named.
CASES = {
    "empty prompt": ({"text_input": ""}, None, "text_input"),
    "zero tokens": ({"text_input": None, "input_ids": []}, None, "input_ids"),
    "both prompts": ({"input_ids": [5]}, None, "input_ids"),
    "neither prompt": ({"text_input": None}, None, "text_input"),
    "longer than the context": ({"text_input": "word " * 9000}, None, "text_input"),
    "ids longer than the context": ({"text_input": None, "input_ids": [5] * 9000}, None, "input_ids"),
    "id too large": ({"text_input": None, "input_ids": [5, 49152]}, None, "input_ids"),
    "id negative": ({"text_input": None, "input_ids": [-1]}, None, "input_ids"),
    "not UTF-8": ({"text_input": b"\xff\xfe"}, None, "text_input"),
    "prompt and stream": ({"exclude_input_in_output": False}, None, "exclude_input_in_output"),
    "malformed JSON": ({}, '{"max_tokens": ', "sampling_parameters"),
    "no JSON": ({}, "", "sampling_parameters"),
    "not an object": ({}, "[1]", "sampling_parameters"),
    "max_tokens 0": ({}, '{"max_tokens": 0}', "max_tokens"),
    "max_tokens negative": ({}, '{"max_tokens": -3}', "max_tokens"),
    "max_tokens text": ({}, '{"max_tokens": "many"}', "max_tokens"),
    "max_tokens NaN": ({}, '{"max_tokens": NaN}', "max_tokens"),
    "temperature negative": ({}, '{"temperature": -1}', "temperature"),
    "temperature NaN": ({}, '{"temperature": NaN}', "temperature"),
    "temperature list": ({}, '{"temperature": [1]}', "temperature"),
    "temperature infinite": ({}, '{"temperature": 1e999}', "temperature"),
    "top_p 0": ({}, '{"top_p": 0}', "top_p"),
    "top_p above 1": ({}, '{"top_p": 1.1}', "top_p"),
    "top_p NaN": ({}, '{"top_p": NaN}', "top_p"),
    "top_k": ({}, '{"top_k": -5}', "top_k"),
    "min_p": ({}, '{"min_p": 2}', "min_p"),
    "seed": ({}, '{"seed": 1.5}', "seed"),
    "stop": ({}, '{"stop": [1]}', "stop"),
    "stop_token_ids": ({}, '{"stop_token_ids": ["a"]}', "stop_token_ids"),
    "ignore_eos": ({}, '{"ignore_eos": "perhaps"}', "ignore_eos"),
    "unknown parameter": ({}, '{"max_token": 5}', "max_token"),
    "no outputs": ({}, '{"n": 0}', "n"),
    "stop without an id": ({"stop": True}, None, "stop"),
}


@pytest.fixture(scope="module")
def good_text(served):
    return ask(served.grpc_url, "paged_llm", GOOD["text_input"], LONG, ignore_eos=True)


@pytest.fixture(scope="module")
def neighbour(served):
    """The text of a stream that runs while the test's requests are refused."""
    calls = []

    def start():
        calls.append(Call(served.grpc_url, "paged_llm", GOOD, {**GREEDY, "max_tokens": LONG, "ignore_eos": True}))
        calls[-1].next()
        return calls[-1]

    yield start
    for call in calls:
        call.wait()


def test_every_case_is_refused_and_harms_nobody(served, good_text, neighbour):
    stream = neighbour()
    for name, (tensors, parameters, field) in CASES.items():
        inputs = {key: value for key, value in {**GOOD, **tensors}.items() if value is not None}
        if parameters is not None:
            inputs["sampling_parameters"] = parameters
        error = Call(served.grpc_url, "paged_llm", inputs).wait().error
        assert error is not None, name
        assert f"`{field}`" in error.message(), name
    answer = stream.wait()
    assert answer.finals == 1
    assert answer.text == good_text
    assert good_text.startswith(ask(served.grpc_url, "paged_llm", GOOD["text_input"], 3, ignore_eos=True))


def test_an_error_is_the_only_response(served):
    answer = Call(served.grpc_url, "paged_llm", GOOD, {"top_p": 0}).wait()
    assert answer.error is not None
    assert not answer.responses


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", np.array([1], dtype=np.int32)),
        ("text_input", np.array([1], dtype=np.int32)),
        ("input_ids", np.array([1], dtype=np.int64)),
        ("stream", np.array([True, False])),
        ("text_input", np.array([b"a", b"b"], dtype=object)),
        ("no_such_tensor", np.array([True])),
    ],
)
def test_wrong_tensor_types_and_shapes(served, name, value):
    """The server itself refuses these by the declared tensors."""
    error = Call(served.grpc_url, "paged_llm", {**GOOD, name: value}).wait().error
    assert name in error.message()


@pytest.mark.parametrize("model", ["paged_llm", "paged_ensemble"])
def test_request_parameters_are_checked_too(served, model):
    for parameters, field in (({"max_tokens": 0}, "max_tokens"), ({"temperature": "-1"}, "temperature")):
        error = Call(served.grpc_url, model, GOOD, parameters=parameters).wait().error
        assert f"`{field}`" in error.message()
    for endpoint in ("generate", "generate_stream"):
        status, body = post(served.http_url, model, endpoint, {**GOOD, "top_p": 7})
        assert status == 400
        assert "`top_p`" in json.loads(body.removeprefix("data: "))["error"]
