"""The ensemble's tokenizer and detokenizer, against a stand-in for the stub's module."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from stub_stand_in import Sender, Tensor, delta, install, make_stream

from paged_backend.engine.detokenizer import OutputText
from paged_backend.engine.outputs import TextSpan
from paged_backend.request import Request
from paged_backend.sampling_params import SamplingParams
from paged_backend.triton_adapter.parse import ResponseOptions
from paged_backend.triton_adapter.sender import ResponseStream
from paged_backend.triton_adapter.text_models import DetokenizerModel, TokenizerModel


@pytest.fixture(autouse=True)
def stub_module(monkeypatch):
    install(monkeypatch)


class Letters:
    """A tokenizer of one letter per id; id 0 is special."""

    def encode_prompt(self, text, max_model_len, field):
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join("" if i == 0 and skip_special_tokens else chr(i) if i else "<s>" for i in ids)


def run_model(model, **tensors):
    if isinstance(model, type):
        model = model()
        model._tokenizer, model._max_model_len = Letters(), 100
    (response,) = model.execute([SimpleNamespace(inputs=lambda: [Tensor(n, a) for n, a in tensors.items()])])
    return response


def strings(*values):
    return np.array([value.encode() for value in values], dtype=object)


@pytest.mark.parametrize("skip", [True, False])
def test_merged_windows_decode_to_the_merged_text(skip):
    outputs = {"text_window_ids", "text_window_spans", "text_prefix"}
    sender = Sender()
    options = ResponseOptions(False, frozenset(outputs), "Q: ", skip)
    request = Request("1:", [1], SamplingParams(), seed=0, max_total_tokens=10)
    stream = ResponseStream(request, "", sender, options, schedule=lambda s: None, on_close=lambda s: None)
    stream.sink(delta("ab", span=TextSpan([ord("a"), ord("b")], 0, 2)))
    stream.sink(delta(""))
    stream.sink(delta("c", span=TextSpan([ord("b"), ord("c"), ord("d")], 1, 2)))
    stream.sink(delta("e", span=TextSpan([0, ord("e")], 0 if skip else 3, 1 if skip else 4), finish="stop", last=True))
    stream.flush()
    response = run_model(DetokenizerModel, **sender.sent[0].tensors)
    assert response.tensors["text_output"].tolist() == [b"Q: abce"]


class Bytes:
    """A token per byte, so that most characters are split over tokens."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("interval", [1, 2, 3, 8])
@pytest.mark.parametrize("text", ["🌶读ส한", "Café 123 😊", "naïve 読む สวัสดี 한국어", "plain"])
def test_however_many_tokens_a_response_holds_the_text_is_the_same(text, interval):
    """As text, and as windows through the stateless detokenizer."""
    outputs = {"text_output", "text_window_ids", "text_window_spans", "output_ids"}
    sender = Sender()
    stream, _ = make_stream(sender, outputs, interval=interval)
    state = OutputText(Bytes(), SamplingParams())
    ids = list(text.encode())
    for position, token_id in enumerate(ids):
        said, _ = state.append(token_id)
        stream.sink(delta(said, ids=[token_id], span=state.span(len(said))))
        stream.flush()
        if position == 0:
            assert len(sender.sent) == bool(said)
    said, _ = state.finish()
    stream.sink(delta(said, ids=[], finish="stop", last=True, span=state.span(len(said))))
    stream.flush()
    assert sender.finals == 1
    assert "".join(sender.texts) == text
    assert all(sender.texts[:-1])
    assert [i for r in sender.sent for i in r.tensors["output_ids"]] == ids
    windows = [
        _decode_windows(Bytes(), r.tensors["text_window_ids"], r.tensors["text_window_spans"]) for r in sender.sent
    ]
    assert windows == sender.texts


def _decode_windows(tokenizer, ids, rows):
    model = DetokenizerModel()
    model._tokenizer = tokenizer
    tensors = [Tensor("text_window_ids", ids), Tensor("text_window_spans", rows)]
    (response,) = model.execute([SimpleNamespace(inputs=lambda: tensors)])
    return response.tensors["text_output"][0].decode()


def test_a_response_without_text_has_empty_windows():
    sender = Sender()
    stream, _ = make_stream(sender, {"text_window_ids", "text_window_spans", "text_prefix", "finish_reason"})
    stream.sink(delta("", finish="stop", last=True))
    stream.flush()
    tensors = sender.sent[0].tensors
    assert tensors["text_window_spans"].shape == (0, 4)
    assert "text_prefix" not in tensors
    del tensors["finish_reason"]
    assert run_model(DetokenizerModel, **tensors).tensors["text_output"].tolist() == [b""]


@pytest.mark.parametrize("row", [[3, 0, 1, 1], [-1, 0, 1, 1], [2, 2, 1, 1], [2, -1, 1, 1]])
def test_spans_that_do_not_fit_are_refused(row):
    ids, rows = np.array([97, 98], dtype=np.int32), np.array([row], dtype=np.int32)
    response = run_model(DetokenizerModel, text_window_ids=ids, text_window_spans=rows)
    assert response.error.code == "INVALID_ARG"
    assert "text_window_spans" in response.error.message


def test_the_tokenizer_refuses_an_empty_prompt_unless_it_only_cancels():
    assert run_model(TokenizerModel, text_input=strings("ab")).tensors["input_ids"].tolist() == [97, 98]
    error = run_model(TokenizerModel, text_input=strings("")).error
    assert (error.code, "text_input" in error.message) == ("INVALID_ARG", True)
    stop = run_model(TokenizerModel, text_input=strings(""), stop=np.array([True]))
    assert stop.tensors["input_ids"].shape == (0,)
    assert stop.tensors["input_ids"].dtype == np.int32


@pytest.mark.parametrize("inputs", [{}, {"text_input": "ab"}], ids=str)
def test_the_tokenizer_refuses_messages_and_names_them(inputs):
    given = {name: strings(value) for name, value in {**inputs, "messages": "[]"}.items()}
    error = run_model(TokenizerModel, **given).error
    assert error.message == "`messages` is not taken by the ensemble: use the engine model"


def test_the_tokenizer_refuses_by_characters_what_can_never_fit(text_model, tmp_path):
    """It knows the context from the model's files, or from the engine arguments."""
    (tmp_path / "llm" / "1").mkdir(parents=True)
    config = json.dumps({"parameters": {"engine_model": {"string_value": "llm"}}})
    for extra in ({}, {"max_model_len": 10}):
        (tmp_path / "llm" / "1" / "model.json").write_text(json.dumps({"model": str(text_model), **extra}))
        model = TokenizerModel()
        model.initialize(
            {"model_repository": str(tmp_path / "tokenizer"), "model_version": "1", "model_config": config}
        )
        length = extra.get("max_model_len", 256)
        limit = length * model._tokenizer.max_token_length
        assert len(run_model(model, text_input=strings("z" * limit)).tensors["input_ids"]) == limit + 1
        error = run_model(model, text_input=strings("z" * (limit + 1))).error
        assert error.code == "INVALID_ARG"
        assert f"`text_input` has {limit + 1} characters; a context of {length} tokens" in error.message
