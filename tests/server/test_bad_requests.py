"""A bad request is refused with the field's name; the neighbour's stream and the next request go on.

A gRPC stream carries only the message, and HTTP makes 400 of every code: that the code is INVALID_ARG the server's
metrics say, which count refusals by code.
"""

from __future__ import annotations

import dataclasses
import json
import time

import numpy as np
import pytest
from server.client import GREEDY, TEXT_MODELS, Call, ask, post

from paged_backend.monitor.samples import scrape
from paged_backend.sampling_params import SamplingParams

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
# Every JSON type that a value can have, and which of them each sampling parameter takes.
SAMPLES = {
    "null": ["null"],
    "flag": ["true", "false"],
    "integer": ["7", "0"],
    "number": ["0.5"],
    "no number": ["NaN", "Infinity"],
    "text": ['"perhaps"', '""'],
    "empty": ["[]"],
    "ids": ["[1]"],
    "texts": ['["a"]'],
    "nested": ["[[1]]", "[null]"],
    "object": ["{}", '{"a": "b"}'],
}
NUMBER, INTEGER, FLAG = ("integer", "number"), ("integer",), ("flag",)
OPTIONAL = ("null", "integer")
TAKEN = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), NUMBER),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), NUMBER),
    **dict.fromkeys(("top_k", "min_tokens", "n", "priority"), INTEGER),
    **dict.fromkeys(("seed", "max_tokens", "truncate_prompt_tokens", "logprobs", "prompt_logprobs"), OPTIONAL),
    "beam_width": OPTIONAL,
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "use_beam_search"), FLAG),
    **dict.fromkeys(("spaces_between_special_tokens", "detokenize"), FLAG),
    "stop": ("null", "text", "empty", "texts"),
    "bad_words": ("null", "empty", "texts"),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), ("null", "empty", "ids")),
    **dict.fromkeys(("logit_bias", "structured_outputs"), ("null", "object")),
    "output_kind": ("text",),
    "early_stopping": ("flag", "text"),
    "cache_salt": ("null", "text"),
}


@pytest.fixture(scope="module")
def good_text(served):
    return ask(served.grpc_url, "paged_llm", GOOD["text_input"], LONG, ignore_eos=True)


@pytest.fixture(scope="module")
def neighbour(served):
    """The text of a stream that runs while the test's requests are refused."""
    calls = []

    def start(model="paged_llm"):
        calls.append(Call(served.grpc_url, model, GOOD, {**GREEDY, "max_tokens": LONG, "ignore_eos": True}))
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


def test_every_parameter_refuses_every_other_type(served, good_text, neighbour):
    assert set(TAKEN) == {field.name for field in dataclasses.fields(SamplingParams)}
    cases = [
        (name, text)
        for name, kinds in TAKEN.items()
        for kind, texts in SAMPLES.items()
        for text in texts
        if kind not in kinds
    ]
    refused = _refused(served)
    streams = {model: neighbour(model) for model in TEXT_MODELS}
    for i, (name, text) in enumerate(cases):
        inputs = {**GOOD, "sampling_parameters": f'{{"{name}": {text}}}'}
        error = Call(served.grpc_url, TEXT_MODELS[i % 2], inputs).wait().error
        assert error is not None, (name, text)
        assert f"`{name}`" in error.message(), (name, text)
    for stream in streams.values():
        answer = stream.wait()
        assert (answer.finals, answer.text) == (1, good_text)
    for model in TEXT_MODELS:
        assert good_text.startswith(ask(served.grpc_url, model, GOOD["text_input"], 3, ignore_eos=True))
    assert _refused(served) - refused == len(cases) > 300


def _refused(served) -> float:
    """How many requests were refused with INVALID_ARG, once the metrics have caught up."""
    time.sleep(0.3)
    now = scrape(served.metrics_url)
    codes = ("UNAVAILABLE", "UNSUPPORTED", "INTERNAL")
    assert not any(now.value("paged_requests_refused_total", model="paged_llm", code=code) for code in codes)
    return now.value("paged_requests_refused_total", model="paged_llm", code="INVALID_ARG")


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
