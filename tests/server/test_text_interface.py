"""The text interface of `paged_llm`, and the same of `paged_ensemble`: what a client of the vLLM backend relies on."""

from __future__ import annotations

import json

import numpy as np
import pytest
from server.client import GREEDY, TEXT_MODELS, Call, ask, chat, events, post

pytestmark = pytest.mark.server

QUESTION = chat("What is the capital of France?")
# Ends at once: the demo model's first token after it is end-of-sequence, so there is no text at all.
SILENT = "What is the capital of France?"


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_it_answers(served, model):
    assert "Paris" in ask(served.grpc_url, model, QUESTION, 16)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_joined_stream_is_the_whole_text(served, model):
    params = {**GREEDY, "max_tokens": 12}
    stream = Call(served.grpc_url, model, {"text_input": "Once upon a time", "stream": True}, params).wait(linger=0.2)
    whole = Call(served.grpc_url, model, {"text_input": "Once upon a time"}, params).wait(linger=0.2)
    assert len(stream.responses) > 1
    assert all(stream.texts)
    assert len(whole.responses) == 1
    assert whole.text == "Once upon a time" + stream.text
    assert stream.finals == whole.finals == 1


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_prompt_can_be_excluded(served, model):
    inputs = {"text_input": "Once upon a time"}
    params = {**GREEDY, "max_tokens": 4}
    texts = {
        exclude: Call(served.grpc_url, model, {**inputs, "exclude_input_in_output": exclude}, params).wait().text
        for exclude in (True, False)
    }
    assert texts[False] == "Once upon a time" + texts[True]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_counts_and_finish_reason(served, model):
    flags = {"return_finish_reason": True, "return_num_input_tokens": True, "return_num_output_tokens": True}
    params = {**GREEDY, "max_tokens": 5}
    whole = Call(served.grpc_url, model, {"text_input": "Once upon a time", **flags}, params).wait()
    assert whole.joined("finish_reason") == [b"length"]
    assert whole.joined("num_input_tokens") == [4]
    assert whole.joined("num_output_tokens") == [5]
    inputs = {"text_input": "Once upon a time", "stream": True, **flags}
    stream = Call(served.grpc_url, model, inputs, params).wait()
    assert sum(stream.joined("num_output_tokens")) == 5
    assert set(stream.joined("num_input_tokens")) == {4}
    assert stream.joined("finish_reason") == [b"None"] * (len(stream.responses) - 1) + [b"length"]
    # Asked for, they come even when there is no text to go with them.
    silent = Call(served.grpc_url, model, {"text_input": SILENT, "stream": True, **flags}, params).wait()
    assert silent.responses == [
        {"text_output": [b""], "finish_reason": [b"stop"], "num_input_tokens": [7], "num_output_tokens": [1]}
    ]


def test_request_parameters_and_spelled_numbers(served):
    inputs = {"text_input": "Once upon a time", "stream": True}
    expected = Call(served.grpc_url, "paged_llm", inputs, {**GREEDY, "max_tokens": 4}).wait().text
    for model in TEXT_MODELS:
        parameters = {"max_tokens": "4", "temperature": "0", "ignore_eos": "false"}
        assert Call(served.grpc_url, model, inputs, parameters=parameters).wait().text == expected
        parameters = {"max_tokens": 1, "temperature": "5"}
        tensor = {**GREEDY, "max_tokens": 4}
        assert Call(served.grpc_url, model, inputs, tensor, parameters=parameters).wait().text == expected


def test_seeds_reproduce(served):
    inputs = {"text_input": "Once upon a time", "exclude_input_in_output": True}
    texts = [
        Call(served.grpc_url, "paged_llm", inputs, {"temperature": 1.5, "max_tokens": 6, "seed": seed}).wait().text
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_stop_strings_are_cut(served):
    inputs = {"text_input": QUESTION, "stream": True, "return_finish_reason": True}
    full = Call(served.grpc_url, "paged_llm", inputs, {**GREEDY, "max_tokens": 8}).wait()
    assert " is" in full.text
    for model in TEXT_MODELS:
        answer = Call(served.grpc_url, model, inputs, {**GREEDY, "max_tokens": 8, "stop": [" is"]}).wait()
        assert answer.text == full.text.partition(" is")[0]
        assert answer.joined("finish_reason")[-1] == b"stop"
        kept = {**GREEDY, "max_tokens": 8, "stop": " is", "include_stop_str_in_output": True}
        assert Call(served.grpc_url, model, inputs, kept).wait().text == answer.text + " is"


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_http_generate(served, model):
    expected = ask(served.grpc_url, model, "Once upon a time", 4)
    status, body = post(
        served.http_url,
        model,
        "generate",
        {"text_input": "Once upon a time", "max_tokens": 4, "temperature": 0, "exclude_input_in_output": True},
    )
    assert (status, json.loads(body)["text_output"]) == (200, expected)
    assert set(json.loads(body)) <= {
        *("text_output", "model_name", "model_version"),
        *("sequence_id", "sequence_start", "sequence_end"),  # the server adds these to ensembles
    }
    status, body = post(served.http_url, model, "generate", {"text_input": SILENT, "temperature": 0})
    assert (status, json.loads(body)["text_output"]) == (200, SILENT)


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("prompt", ["Once upon a time", SILENT])
def test_http_generate_stream_has_no_empty_piece(served, model, prompt):
    body = {"text_input": prompt, "stream": True, "parameters": {"max_tokens": 4, "temperature": 0}}
    status, text = post(served.http_url, model, "generate_stream", body)
    assert status == 200
    pieces = [event["text_output"] for event in events(text)]
    assert all(pieces)
    assert "".join(pieces) == ask(served.grpc_url, model, prompt, 4)


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_as_the_vllm_backend_gives_them(served, model, stream):
    inputs = {
        "text_input": "Once upon a time", "stream": stream, "return_logprobs": True, "return_cumulative_logprob": True
    }  # fmt: skip
    answer = Call(served.grpc_url, model, inputs, {"max_tokens": 3, "temperature": 0, "logprobs": 2}).wait()
    assert answer.error is None
    positions = [p for text in answer.joined("logprobs") for p in json.loads(text)]
    assert len(positions) == 3
    for position in positions:
        best = min(position.values(), key=lambda item: item["rank"])
        assert best["rank"] == 1
        assert -20 < best["logprob"] < 0
        assert isinstance(best["decoded_token"], str)
    sampled = sum(max(p["logprob"] for p in position.values()) for position in positions)
    assert answer.joined("cumulative_logprob")[-1] == pytest.approx(sampled, abs=1e-3)


def test_several_outputs_do_not_fit_the_ensemble(served):
    inputs = {"text_input": "Once upon a time", "exclude_input_in_output": True}
    answer = Call(served.grpc_url, "paged_ensemble", inputs, {"max_tokens": 6, "n": 3}).wait()
    assert "`n` > 1 is not supported in the ensemble" in answer.error.message()


# --- TensorRT-LLM's names ---


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_client_of_the_tensorrt_llm_backend(served, model):
    expected = ask(served.grpc_url, model, QUESTION, 8)
    word = np.array([expected.split()[-1].encode(), b""], dtype=np.object_)
    tensors = {
        "text_input": QUESTION,
        "stream": True,
        "max_tokens": np.array([8], np.int32),
        "temperature": np.array([0.0], np.float32),
    }
    assert Call(served.grpc_url, model, tensors).wait().text == expected
    cut = Call(served.grpc_url, model, {**tensors, "stop_words": word}).wait().text
    assert cut == expected[: expected.index(word[0].decode())]
    seeded = {**tensors, "temperature": np.array([1.5], np.float32), "random_seed": np.array([7], np.uint64)}
    texts = {Call(served.grpc_url, model, seeded).wait().text for _ in range(2)}
    assert len(texts) == 1
    both = Call(served.grpc_url, model, {**tensors, "request_output_len": np.array([8], np.int32)}).wait()
    assert "`max_tokens` or `request_output_len`, not both" in both.error.message()


def test_log_probabilities_by_tensorrt_llms_flag(served):
    inputs = {"text_input": "Once", "return_log_probs": True, "max_tokens": np.array([2], np.int32)}
    answer = Call(served.grpc_url, "paged_llm", inputs).wait()
    assert answer.joined("cumulative_logprob")[0] < 0
    assert len(json.loads(answer.joined("logprobs")[0])) == 2


def test_beams_by_tensorrt_llms_name(served):
    inputs = {"text_input": "Once upon a", "exclude_input_in_output": True, "beam_width": np.array([2], np.int32)}
    texts = Call(served.grpc_url, "paged_llm", {**inputs, "max_tokens": np.array([3], np.int32)}).wait()
    assert len(set(texts.joined("text_output"))) == 2


def test_fractions_over_http(served):
    """Where a field has the name of a tensor it becomes one."""
    body = {"text_input": "Once", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop_words": ["x"]}
    assert post(served.http_url, "paged_llm", "generate", body)[0] == 200
