"""The token interface: ids in, ids out, and what a stateless detokenizer needs."""

from __future__ import annotations

import pytest
from server.client import GREEDY, TEXT_MODELS, Call, chat, events, post

from paged_backend.model_source import resolve_model
from paged_backend.tokenizer import Tokenizer

pytestmark = pytest.mark.server

QUESTION = chat("Say hello with an emoji 😊")
PARAMS = {**GREEDY, "max_tokens": 10}


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    return Tokenizer.load(resolve_model(str(demo_model)))


def test_ids_equal_the_text_interfaces(served, tokenizer):
    ids = tokenizer.encode(QUESTION)
    outputs = ("text_output", "output_ids")
    text = Call(served.grpc_url, "paged_llm", {"text_input": QUESTION, "stream": True}, PARAMS, outputs=outputs).wait()
    stream = Call(served.grpc_url, "paged_llm", {"input_ids": ids, "stream": True}, PARAMS).wait(linger=0.2)
    whole = Call(served.grpc_url, "paged_llm", {"input_ids": ids}, PARAMS).wait(linger=0.2)
    assert text.joined("output_ids") == stream.joined("output_ids") == whole.joined("output_ids")
    assert len(stream.responses) > 1
    assert len(whole.responses) == 1
    assert stream.finals == whole.finals == 1
    assert tokenizer.decode(stream.joined("output_ids")) == text.text
    # A client that names no outputs gets this interface's only.
    assert all(set(response) == {"output_ids", "sequence_index"} for response in stream.responses)
    assert set(stream.joined("sequence_index")) == {0}


def test_new_tokens_only(served, tokenizer):
    whole = Call(served.grpc_url, "paged_llm", {"input_ids": tokenizer.encode(QUESTION)}, {**PARAMS, "max_tokens": 1})
    assert len(whole.wait().joined("output_ids")) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stop", [None, "ll"])
def test_windows_decode_to_the_text(served, tokenizer, stream, stop):
    """Also when a stop string cuts the text short of its tokens, and when steps are merged."""
    inputs = {"input_ids": tokenizer.encode(QUESTION), "stream": stream}
    outputs = ("text_output", "text_window_ids", "text_window_spans")
    params = {**PARAMS, **({"stop": stop} if stop else {})}
    answer = Call(served.grpc_url, "paged_llm", inputs, params, outputs=outputs).wait()
    for response in answer.responses:
        text, at = "", 0
        for count, start, end, skip in response["text_window_spans"]:
            window = response["text_window_ids"][at : at + count]
            text += tokenizer.decode(window, skip_special_tokens=bool(skip))[start:end]
            at += count
        assert text == response["text_output"][0].decode()
        assert at == len(response["text_window_ids"])


def test_over_http(served, tokenizer):
    body = {"input_ids": tokenizer.encode(QUESTION), "max_tokens": 3, "temperature": 0}
    status, text = post(served.http_url, "paged_llm", "generate_stream", {**body, "stream": True})
    assert status == 200
    pieces = [e["output_ids"] for e in events(text)]
    ids = [i for piece in pieces for i in (piece if isinstance(piece, list) else [piece])]
    assert len(ids) == 3


@pytest.mark.parametrize("token_id", [-1, 49152, 2**31 - 1])
def test_ids_out_of_range_are_refused(served, token_id):
    answer = Call(served.grpc_url, "paged_llm", {"input_ids": [5, token_id]}, PARAMS).wait()
    assert "`input_ids`[1]" in answer.error.message()


def test_the_ensemble_tokenizes_as_the_engine_does(served, tokenizer):
    counts = {
        model: Call(
            served.grpc_url,
            model,
            {"text_input": QUESTION, "return_num_input_tokens": True},
            {**PARAMS, "max_tokens": 1},
        )
        .wait()
        .joined("num_input_tokens")
        for model in TEXT_MODELS
    }
    assert counts["paged_llm"] == counts["paged_ensemble"] == [len(tokenizer.encode(QUESTION))]
