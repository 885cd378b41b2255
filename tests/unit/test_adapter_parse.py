"""Parsing of requests: which tensor wins, what is refused and with which field. Runs without a server."""

from __future__ import annotations

import json

import numpy as np
import pytest
from stub_stand_in import ALL_OUTPUTS, Request

from paged_backend.errors import InvalidRequestError, UnsupportedError
from paged_backend.model_source import resolve_model
from paged_backend.sampling_params import SamplingParams
from paged_backend.tokenizer import Tokenizer
from paged_backend.triton_adapter.aliases import ALIAS_INPUTS
from paged_backend.triton_adapter.parse import is_stop, parse_request, stop_options
from paged_backend.triton_adapter.pb import printable


def refused(request, error=InvalidRequestError, **options):
    with pytest.raises(error) as info:
        parse_request(request, **options)
    assert info.value.field is not None
    assert f"`{info.value.field}`" in str(info.value)
    return info.value


def test_text_request_with_defaults():
    parsed = parse_request(Request(text_input="Hi"))
    assert (parsed.prompt, parsed.field, parsed.params) == ("Hi", "text_input", SamplingParams())
    assert not parsed.options.stream
    assert parsed.options.prefix == "Hi"
    assert parsed.options.outputs == {"text_output"}


def test_token_request_with_defaults():
    parsed = parse_request(Request(input_ids=[3, 4]))
    assert (parsed.prompt, parsed.field) == ([3, 4], "input_ids")
    assert parsed.options.prefix == ""
    assert parsed.options.outputs == {"output_ids", "sequence_index"}


def test_prompt_text_goes_before_the_output_of_token_requests():
    outputs = {"text_window_ids", "text_window_spans", "text_prefix", "finish_reason"}
    parsed = parse_request(Request(input_ids=[3], prompt_text="Hi", outputs=outputs))
    assert parsed.options.prefix == "Hi"
    assert parsed.options.outputs == outputs - {"finish_reason"}
    # What the client of the ensemble sent, for errors to name.
    assert parsed.field == "text_input"


@pytest.mark.parametrize(
    ("tensors", "prefix"),
    [
        ({}, "Hi"),
        ({"exclude_input_in_output": False}, "Hi"),
        ({"exclude_input_in_output": True}, ""),
        ({"stream": False}, "Hi"),
        ({"stream": True}, ""),
        ({"stream": True, "exclude_input_in_output": True}, ""),
    ],
)
def test_prompt_is_prepended_unless_streaming_or_excluded(tensors, prefix):
    assert parse_request(Request(text_input="Hi", **tensors)).options.prefix == prefix


def test_streaming_with_the_prompt_is_refused_in_the_vllm_backends_words():
    error = refused(Request(text_input="Hi", stream=True, exclude_input_in_output=False))
    assert str(error) == "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."


def test_only_requested_and_flagged_outputs_are_computed():
    flags = {"return_finish_reason": True, "return_num_input_tokens": False, "return_num_output_tokens": True}
    parsed = parse_request(Request(text_input="Hi", **flags))
    assert parsed.options.outputs == {"text_output", "finish_reason", "num_output_tokens"}
    parsed = parse_request(Request(text_input="Hi", outputs={"text_output", "output_ids"}, **flags))
    assert parsed.options.outputs == {"text_output", "output_ids"}


def test_cumulative_log_probability_is_computed_when_asked_for():
    assert parse_request(Request(text_input="Hi", return_cumulative_logprob=True)).params.logprobs == 0
    both = Request(text_input="Hi", return_cumulative_logprob=True, sampling_parameters='{"logprobs": 4}')
    assert parse_request(both).params.logprobs == 4
    assert parse_request(Request(text_input="Hi", return_logprobs=True)).params.logprobs is None


def test_several_outputs_carry_their_index_and_not_through_the_ensemble():
    parameters = '{"n": 2}'
    assert "sequence_index" in parse_request(Request(text_input="Hi", sampling_parameters=parameters)).options.outputs
    windows = Request(input_ids=[1], sampling_parameters=parameters, outputs={"text_window_ids", "text_window_spans"})
    assert refused(windows, UnsupportedError).field == "n"


def test_text_outputs_need_a_tokenizer():
    request = Request(input_ids=[1], outputs={"output_ids", "text_output"})
    assert refused(request, UnsupportedError, has_tokenizer=False).field == "text_output"
    assert parse_request(Request(input_ids=[1]), has_tokenizer=False).prompt == [1]


@pytest.mark.parametrize(
    ("tensors", "field"),
    [
        ({}, "text_input"),
        ({"stream": True}, "text_input"),
        ({"text_input": ""}, "text_input"),
        ({"text_input": "a", "input_ids": [1]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1, 2]]}, "input_ids"),
        ({"input_ids": np.array([1], dtype=np.int64)}, "input_ids"),
        ({"text_input": b"\xff\xfe"}, "text_input"),
        ({"text_input": np.array([1], dtype=np.int32)}, "text_input"),
        ({"text_input": np.array([b"a", b"b"], dtype=object)}, "text_input"),
        ({"text_input": np.array([], dtype=object)}, "text_input"),
        ({"text_input": "a", "stream": np.array([1], dtype=np.int32)}, "stream"),
        ({"text_input": "a", "stream": np.array([], dtype=bool)}, "stream"),
        ({"text_input": "a", "exclude_input_in_output": np.array([True, False])}, "exclude_input_in_output"),
        ({"text_input": "a", "sampling_parameters": b"\xff"}, "sampling_parameters"),
    ],
)
def test_bad_tensors_are_refused_by_name(tensors, field):
    assert refused(Request(**tensors)).field == field


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", '"x"', "null", "{'a': 1}", '{"a": }', "[" * 100_000])
def test_malformed_json_names_the_tensor(text):
    assert refused(Request(text_input="a", sampling_parameters=text)).field == "sampling_parameters"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"temperature": NaN}', "temperature"),
        ('{"temperature": Infinity}', "temperature"),
        ('{"temperature": 1e999}', "temperature"),
        ('{"temperature": "nan"}', "temperature"),
        ('{"temperature": "NaN"}', "temperature"),
        ('{"temperature": -0.1}', "temperature"),
        ('{"temperature": true}', "temperature"),
        ('{"temperature": null}', "temperature"),
        ('{"temperature": [1]}', "temperature"),
        ('{"top_p": NaN}', "top_p"),
        ('{"top_p": 0}', "top_p"),
        ('{"top_p": 1.5}', "top_p"),
        ('{"min_p": NaN}', "min_p"),
        ('{"top_k": NaN}', "top_k"),
        ('{"top_k": -2}', "top_k"),
        ('{"seed": NaN}', "seed"),
        ('{"seed": 1.5}', "seed"),
        ('{"max_tokens": NaN}', "max_tokens"),
        ('{"max_tokens": 0}', "max_tokens"),
        ('{"max_tokens": "many"}', "max_tokens"),
        ('{"max_tokens": 2.5}', "max_tokens"),
        ('{"ignore_eos": 1}', "ignore_eos"),
        ('{"stop": [NaN]}', "stop"),
        ('{"stop": ""}', "stop"),
        ('{"stop": 3}', "stop"),
        ('{"stop_token_ids": "x"}', "stop_token_ids"),
        ('{"stop_token_ids": [1.5]}', "stop_token_ids"),
        ('{"n": 0}', "n"),
        ('{"max_token": 5}', "max_token"),
    ],
)
def test_bad_parameters_are_refused_by_name(text, field):
    assert refused(Request(text_input="a", sampling_parameters=text)).field == field
    values = json.loads(text)
    assert refused(Request(text_input="a", parameters=values)).field == field


def test_the_tensor_wins_over_request_parameters():
    request = Request(
        {"max_tokens": 5, "temperature": 0.5}, text_input="a", sampling_parameters='{"max_tokens": 7, "top_k": 3}'
    )
    assert parse_request(request).params == SamplingParams(max_tokens=7, top_k=3)


def test_values_may_be_spelled_as_strings():
    values = {
        "max_tokens": "100",
        "temperature": "0.5",
        "top_p": "1",
        "seed": "None",
        "ignore_eos": "false",
        "skip_special_tokens": "False",
        "include_stop_str_in_output": "true",
        "stop": "3",
        "stop_token_ids": "[1, 2]",
    }
    expected = SamplingParams(
        max_tokens=100,
        temperature=0.5,
        top_p=1.0,
        ignore_eos=False,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        stop="3",
        stop_token_ids=[1, 2],
    )
    parsed = parse_request(Request(values, text_input="a"))
    assert parsed.params == expected
    assert not parsed.options.skip_special_tokens
    assert parse_request(Request(text_input="a", sampling_parameters=json.dumps(values))).params == expected


def test_parameters_meant_for_the_server_are_not_ours():
    values = {"id": "r1", "priority": 3, "triton_enable_empty_final_response": True, "X-Tenant": "a", "top_k": 4}
    assert parse_request(Request(values, text_input="a")).params == SamplingParams(top_k=4)


def test_stop_is_recognised_whatever_else_is_sent():
    assert is_stop(Request(stop=True, text_input=""))
    assert not is_stop(Request(stop=False, text_input="a"))
    assert not is_stop(Request(text_input="a"))
    assert stop_options(Request(stop=True)).outputs == {"text_output"}
    assert stop_options(Request(stop=True, outputs={"text_window_ids"})).outputs == {"text_window_ids"}


def test_messages_can_always_cross_to_the_server():
    error = refused(Request(text_input="a", sampling_parameters='{"\\ud800": 1}'))
    assert printable(str(error)).encode("utf-8")
    assert len(printable("x" * 10_000)) <= 2000


# --- chat ---


@pytest.fixture(scope="module")
def tokenizer(text_model):
    """Llama-style: encoding adds `<s>`, and the chat template writes one too."""
    return Tokenizer.load(resolve_model(str(text_model)))


MESSAGES = json.dumps([{"role": "user", "content": "the cat"}])


def test_messages_are_a_prompt(tokenizer):
    parsed = parse_request(Request(messages=MESSAGES), tokenizer=tokenizer)
    assert (parsed.prompt, parsed.field) == ("<s>[user] the cat\nnull", "messages")
    assert parsed.options.outputs == {"text_output"}
    # An answer is not preceded by the conversation, unless that is asked for.
    assert parsed.options.prefix == ""
    asked = parse_request(Request(messages=MESSAGES, exclude_input_in_output=False), tokenizer=tokenizer)
    assert asked.options.prefix == parsed.prompt


def test_the_begin_token_is_neither_doubled_nor_missing(tokenizer):
    parsed = parse_request(Request(messages=MESSAGES), tokenizer=tokenizer)
    ids = tokenizer.encode(parsed.prompt)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.encode("the cat")[0] == tokenizer.bos_token_id


def test_tools_and_parts_reach_the_template(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = Request(messages=json.dumps([{"role": "user", "content": parts}]), tools='[{"name": "f"}]')
    assert parse_request(request, tokenizer=tokenizer).prompt == '<s>[user] a\nb\n[{"name": "f"}]'


@pytest.mark.parametrize(
    "tensors",
    [
        {"messages": MESSAGES, "text_input": "x"},
        {"messages": MESSAGES, "input_ids": [1]},
        {"messages": "{"},
        {"messages": "[]"},
        {"messages": '"hi"'},
        {"messages": '[{"content": "no role"}]'},
        {"messages": MESSAGES, "tools": "{}"},
        {"messages": MESSAGES, "tools": "[1]"},
        {"tools": "[]"},
    ],
    ids=str,
)
def test_malformed_chats_are_refused(tokenizer, tensors):
    refused(Request(**tensors), tokenizer=tokenizer)


def test_chats_that_this_model_cannot_have_are_refused(tokenizer):
    refused(Request(messages=MESSAGES), UnsupportedError)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    refused(Request(messages=json.dumps(image)), UnsupportedError, tokenizer=tokenizer)


# --- kinds of output ---


@pytest.mark.parametrize(
    ("kind", "stream", "expected"),
    [
        ("delta", True, (True, False)),
        ("cumulative", True, (True, True)),
        ("final_only", True, (False, False)),
        ("cumulative", False, (False, False)),
    ],
)
def test_output_kinds(kind, stream, expected):
    parsed = parse_request(
        Request(text_input="x", stream=stream, sampling_parameters=json.dumps({"output_kind": kind}))
    )
    assert (parsed.options.stream, parsed.options.cumulative) == expected
    # Whatever the kind, a stream does not repeat the prompt.
    assert parsed.options.prefix == ("" if stream else "x")


def test_no_text_can_be_asked_for_without_detokenizing():
    text = json.dumps({"detokenize": False})
    refused(Request(text_input="x", sampling_parameters=text))
    parse_request(Request(text_input="x", sampling_parameters=text, outputs={"output_ids"}))


def test_a_salt_of_digits_stays_a_string():
    parsed = parse_request(Request(text_input="x", parameters={"cache_salt": "123", "max_tokens": "7"}))
    assert (parsed.params.cache_salt, parsed.params.max_tokens) == ("123", 7)


def test_what_a_stateless_detokenizer_cannot_do_is_refused():
    text = json.dumps({"spaces_between_special_tokens": False, "skip_special_tokens": False})
    refused(Request(input_ids=[1], sampling_parameters=text, outputs={"text_window_ids"}), UnsupportedError)
    parse_request(Request(input_ids=[1], sampling_parameters=text, outputs={"output_ids"}))


# --- deadlines and priority ---


@pytest.mark.parametrize(
    ("timeout_us", "parameters", "seconds"),
    [(0, {}, None), (250_000, {}, 0.25), (0, {"timeout": 1_500_000}, 1.5), (250_000, {"timeout": 1}, 0.25)],
)
def test_timeouts_are_microseconds(timeout_us, parameters, seconds):
    request = Request(parameters, timeout_us=timeout_us, text_input="Hi", sampling_parameters="{}")
    assert parse_request(request).timeout_s == seconds


@pytest.mark.parametrize("timeout", ["soon", -1, 1.5, True])
def test_bad_timeouts(timeout):
    assert refused(Request({"timeout": timeout}, text_input="Hi")).field == "timeout"


def test_priority_has_a_name_of_its_own():
    sent = {"paged_priority": 3, "priority": 7}
    assert parse_request(Request(sent, text_input="Hi")).params.priority == 3
    assert parse_request(Request(sent, text_input="Hi", sampling_parameters="{}")).params.priority == 3
    spoken = '{"priority": 5}'
    assert parse_request(Request(sent, text_input="Hi", sampling_parameters=spoken)).params.priority == 5
    assert refused(Request({"paged_priority": "high"}, text_input="Hi")).field == "priority"


# --- TensorRT-LLM's names ---

FP32 = np.float32
ALIASES = [
    ({"max_tokens": [7]}, {"max_tokens": 7}),
    ({"request_output_len": [7]}, {"max_tokens": 7}),
    ({"temperature": np.array([0.7], FP32)}, {"temperature": 0.7}),
    ({"top_k": [4], "top_p": np.array([0.9], FP32)}, {"top_k": 4, "top_p": 0.9}),
    ({"runtime_top_k": [4], "runtime_top_p": np.array([0.0], FP32)}, {"top_k": 4}),
    ({"random_seed": np.array([2**63], np.uint64)}, {"seed": 2**63}),
    ({"seed": np.array([5], np.uint64)}, {"seed": 5}),
    ({"stop_words": np.array([b"a", b"", b"b"], object)}, {"stop": ["a", "b"]}),
    ({"stop_words": np.array([b""], object)}, {}),
    ({"bad_words": np.array([b""], object)}, {}),
    ({"repetition_penalty": np.array([1.1], FP32)}, {"repetition_penalty": 1.1}),
    ({"presence_penalty": np.array([0.5], FP32)}, {"presence_penalty": 0.5}),
    ({"frequency_penalty": np.array([0.5], FP32)}, {"frequency_penalty": 0.5}),
    ({"num_return_sequences": [2]}, {"n": 2}),
    ({"beam_width": [1]}, {}),
    ({"beam_width": [3]}, {"use_beam_search": True, "beam_width": 3, "n": 3, "temperature": 0.0}),
    (
        {"beam_width": [3], "num_return_sequences": [2], "length_penalty": np.array([2.0], FP32)},
        {"use_beam_search": True, "beam_width": 3, "n": 2, "temperature": 0.0, "length_penalty": 2.0},
    ),
]


@pytest.mark.parametrize(("tensors", "meant"), ALIASES, ids=str)
def test_tensors_with_tensorrt_llms_names(tensors, meant):
    assert parse_request(Request(text_input="Hi", **tensors)).params == SamplingParams.from_mapping(meant)


def test_every_alias_is_declared_and_tested():
    tested = {name for tensors, _ in ALIASES for name in tensors}
    # Parameters of their own: see the sampling parameters' tests.
    assert tested | {"min_tokens", "min_length", "return_log_probs"} == {spec.name for spec in ALIAS_INPUTS}


def test_precedence_of_aliases():
    tensor = {"max_tokens": [7], "top_k": [4]}
    params = parse_request(Request({"max_tokens": 3, "seed": 1}, text_input="Hi", **tensor)).params
    assert (params.max_tokens, params.top_k, params.seed) == (7, 4, 1)
    spoken = '{"max_tokens": 9}'
    params = parse_request(Request({"seed": 1}, text_input="Hi", sampling_parameters=spoken, **tensor)).params
    assert (params.max_tokens, params.top_k, params.seed) == (9, 4, None)


@pytest.mark.parametrize(
    ("tensors", "field"),
    [
        ({"max_tokens": [7], "request_output_len": [7]}, "request_output_len"),
        ({"max_tokens": [0]}, "max_tokens"),
        ({"max_tokens": [1, 2]}, "max_tokens"),
        ({"max_tokens": np.array([1.0], FP32)}, "max_tokens"),
        ({"beam_width": [0]}, "beam_width"),
        ({"temperature": np.array([np.nan], FP32)}, "temperature"),
        ({"stop_words": np.array([b"\xff"], object)}, "stop_words"),
    ],
    ids=str,
)
def test_bad_aliases_are_named(tensors, field):
    assert refused(Request(text_input="Hi", **tensors)).field == field


def test_return_log_probs_asks_for_both():
    options = parse_request(Request(text_input="Hi", return_log_probs=True)).options
    assert options.outputs == {"text_output", "logprobs", "cumulative_logprob"}


@pytest.mark.parametrize(("text", "problem"), [
    ('{"seed": ' + "1" * 5000 + "}", "a number in it is too long"),
    ('{"stop": ' + "[" * 100_000 + "]" * 100_000 + "}", "it is nested too deeply"),
])  # fmt: skip
def test_json_beyond_the_parsers_limits_is_refused_in_plain_words(text, problem):
    error = refused(Request(text_input="Hi", sampling_parameters=text))
    assert str(error) == f"`sampling_parameters` is not valid JSON: {problem}"


def test_an_output_asked_for_by_name_needs_no_flag():
    names = {"text_output", "finish_reason", "logprobs"}
    assert parse_request(Request(text_input="Hi", outputs=names)).options.outputs == names
    parsed = parse_request(Request(text_input="Hi", outputs=names, return_logprobs=False))
    assert parsed.options.outputs == names - {"logprobs"}
    # The ensemble names them whatever its client wants; a client that names none is asked for all by the server.
    for outputs in ({"text_window_ids", "text_window_spans", *names} - {"text_output"}, ALL_OUTPUTS):
        assert not parse_request(Request(text_input="Hi", outputs=outputs)).options.outputs & {"finish_reason"}
