"""However a request ends, it ends once: one final response or one error, then the server ends the stream.

Over gRPC with and without `triton_enable_empty_final_response`, and over HTTP. That a stopping server ends its requests
once is in test_lifecycle.py.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from server.client import GREEDY, TEXT_MODELS, Answer, Call, chat, events, post, wait_for

pytestmark = pytest.mark.server

STORY = "Once upon a time"
# Its first token ends the output, so that there is no text at all.
SILENT = "What is the capital of France?"
FOREVER = {"max_tokens": 4000, "ignore_eos": True}
_numbers = itertools.count()

# How it ends: prompt, parameters, options of the call, and the error's text (None: it ends well).
ENDINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str | None]] = {
    "length": (STORY, {"max_tokens": 4}, {}, None),
    "one token": (STORY, {"max_tokens": 1}, {}, None),
    "end of sequence": (chat("Say yes."), {"max_tokens": 60}, {}, None),
    "no text": (SILENT, {"max_tokens": 4}, {}, None),
    "stop string": (STORY, {"max_tokens": 8, "stop": " "}, {}, None),
    "bad parameter": (STORY, {"top_p": 0}, {}, "`top_p`"),
    "too long": ("word " * 9000, {}, {}, "`text_input`"),
    "no token is left": (STORY, {"allowed_token_ids": [17], "bad_words": ["!"]}, {}, "could not be completed"),
    "deadline": (STORY, FOREVER, {"timeout": 300_000}, "timeout passed before it finished"),
    "stop request": (STORY, FOREVER, {}, "the request was cancelled"),
}


def _start(served: Any, model: str, ending: str, stream: bool, empty_final: bool) -> Call:
    prompt, params, options, _ = ENDINGS[ending]
    inputs = {"text_input": prompt, "stream": stream}
    if ending == "stop request":
        options = {"request_id": f"ending-{next(_numbers)}"}
    call = Call(served.grpc_url, model, inputs, {**GREEDY, **params}, empty_final=empty_final, **options)
    if ending == "stop request":
        wait_for(served.metrics_url, running=1)
        stop = {"text_input": "", "stop": True}
        ended = Call(served.grpc_url, model, stop, empty_final=empty_final, **options).drain()
        assert (ended.finals, ended.errors, ended.texts) == (1, 0, [""])
    return call


def _check(answer: Answer, stream: bool, empty_final: bool, message: str | None) -> None:
    if message is not None:
        assert message in answer.error.message()
        assert (answer.finals, answer.errors) == (0, 1)
        return
    assert answer.errors == 0, answer.error
    # A client that did not ask for empty final responses does not see one that goes alone.
    assert answer.finals == 1 or (stream and not empty_final and answer.finals == 0)
    if stream:
        assert all(answer.texts)
    else:
        assert len(answer.responses) == 1


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ending", ENDINGS)
def test_exactly_one_end(served: Any, model: str, stream: bool, ending: str) -> None:
    for empty_final in (True, False):
        answer = _start(served, model, ending, stream, empty_final).drain()
        _check(answer, stream, empty_final, ENDINGS[ending][3])
    # After a final response the stub refuses another, and the adapter would say so here.
    assert "sending a response failed" not in served.output
    assert "could not be sent" not in served.output


@pytest.mark.parametrize("empty_final", [True, False])
@pytest.mark.parametrize("extra", [
    {"n": 3, "temperature": 1.0, "seed": 1}, {"n": 2, "use_beam_search": True, "beam_width": 3}
], ids=["n", "beams"])  # fmt: skip
def test_several_outputs_end_once_and_stream_by_index(served: Any, extra: dict[str, Any], empty_final: bool) -> None:
    params = {**GREEDY, "max_tokens": 6, "ignore_eos": True, **extra}
    inputs = {"text_input": STORY, "return_finish_reason": True, "return_num_output_tokens": True}

    def call(**more: Any) -> Answer:
        answer = Call(served.grpc_url, "paged_llm", {**inputs, **more}, params, empty_final=empty_final).drain()
        assert (answer.finals, answer.errors) == (1, 0)
        return answer

    whole = call(exclude_input_in_output=True)
    assert len(whole.responses) == 1
    assert whole.joined("sequence_index") == list(range(params["n"]))
    assert whole.joined("num_output_tokens") == [6] * params["n"]
    stream = call(stream=True)
    texts, counts, reasons = ([""] * params["n"], [0] * params["n"], [[] for _ in range(params["n"])])
    for response in stream.responses:
        (index,) = response["sequence_index"]
        texts[index] += response["text_output"][0].decode()
        counts[index] += response["num_output_tokens"][0]
        reasons[index].append(response["finish_reason"][0])
    assert texts == [text.decode() for text in whole.joined("text_output")]
    assert len(set(texts)) == params["n"]
    assert counts == [6] * params["n"]
    assert all(of_one[-1] == b"length" and set(of_one[:-1]) <= {b"None"} for of_one in reasons)


def test_one_beam_streams_through_the_ensemble(served: Any) -> None:
    given = {"beam_width": 3, "num_return_sequences": 1, "max_tokens": 6}
    tensors = {name: np.array([value], np.int32) for name, value in given.items()}
    inputs = {"text_input": STORY, "stream": True, **tensors}
    engine, ensemble = (Call(served.grpc_url, model, inputs).drain() for model in TEXT_MODELS)
    assert engine.text == ensemble.text != ""
    assert engine.finals == ensemble.finals == 1


def test_several_outputs_over_http(served: Any) -> None:
    body = {"text_input": STORY, "max_tokens": 4, "n": 3, "seed": 1, "ignore_eos": True}
    status, text = post(served.http_url, "paged_llm", "generate", {**body, "exclude_input_in_output": True})
    assert status == 200
    answer = json.loads(text)
    assert answer["sequence_index"] == [0, 1, 2]
    status, text = post(served.http_url, "paged_llm", "generate_stream", {**body, "stream": True})
    assert status == 200
    texts = ["", "", ""]
    for event in events(text):
        assert event["text_output"]
        texts[event["sequence_index"]] += event["text_output"]
    assert texts == answer["text_output"]


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
@pytest.mark.parametrize("model", TEXT_MODELS)
def test_exactly_one_end_over_http(served: Any, model: str, endpoint: str) -> None:
    """What has no response of its own over HTTP: an error, and one that comes after a stream has begun."""
    stream = {"stream": True} if endpoint == "generate_stream" else {}
    status, text = post(served.http_url, model, endpoint, {"text_input": STORY, "top_p": 7, **stream})
    assert status == 400
    assert text.count("error") == 1
    late = {"text_input": STORY, "timeout": 300_000, **FOREVER, **stream}
    status, text = post(served.http_url, model, endpoint, late)
    if not stream:
        assert (status, text.count("timeout passed")) == (400, 1)
        return
    *pieces, last = events(text)
    assert pieces
    assert all(piece["text_output"] for piece in pieces)
    assert "timeout passed" in last["error"]
