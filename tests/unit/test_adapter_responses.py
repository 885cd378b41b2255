"""Merging of deltas, FINAL exactly once, and the detokenizer's view of it, against a stand-in for the stub's module."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from paged_backend.engine.detokenizer import OutputText
from paged_backend.engine.outputs import Logprob, SequenceDelta, TextSpan
from paged_backend.errors import EngineDeadError, InvalidRequestError, OverloadedError, UnsupportedError
from paged_backend.request import Request
from paged_backend.sampling_params import SamplingParams
from paged_backend.triton_adapter.parse import ResponseOptions
from paged_backend.triton_adapter.pb import triton_error
from paged_backend.triton_adapter.sender import ResponseStream, SenderThread
from paged_backend.triton_adapter.text_models import DetokenizerModel, TokenizerModel

FINAL = 1
TEXT = frozenset({"text_output"})


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class Response:
    def __init__(self, output_tensors=(), error=None):
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class TritonError:
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "INTERNAL", "INVALID_ARG", "UNAVAILABLE", "CANCELLED"

    def __init__(self, message, code=INTERNAL):
        self.message, self.code = message, code


@pytest.fixture(autouse=True)
def stub_module(monkeypatch):
    module = ModuleType("triton_python_backend_utils")
    module.Tensor, module.InferenceResponse, module.TritonError = Tensor, Response, TritonError
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    monkeypatch.setitem(sys.modules, module.__name__, module)


class Sender:
    """Behaves as the server's response sender does: nothing may follow FINAL."""

    def __init__(self, fails=False):
        self.sent, self.finals, self.cancelled, self.fails = [], 0, False, fails

    def send(self, response=None, flags=0):
        assert not self.finals, "sent after FINAL"
        self.finals += flags == FINAL
        if self.fails and response is not None and response.error is None:
            raise RuntimeError("no shared memory left")
        if response is not None:
            self.sent.append(response)

    def is_cancelled(self):
        assert not self.finals, "asked after FINAL: the real server crashes"
        return self.cancelled

    @property
    def texts(self):
        return [r.tensors["text_output"][0].decode() for r in self.sent if r.error is None]


def make_stream(sender, outputs=TEXT, stream=True, prefix="", schedule=lambda stream: None, interval=1, **options):
    closed = []
    result = ResponseStream(
        Request("1:", [1, 2, 3, 4, 5], SamplingParams(), seed=0, max_total_tokens=10),
        "",
        sender,
        ResponseOptions(stream, frozenset(outputs), prefix, **options),
        schedule=schedule,
        on_close=closed.append,
        interval=interval,
    )
    return result, closed


def delta(text="", ids=(1,), index=0, finish=None, last=False, span=None):
    return SequenceDelta("1:", index, list(ids), text, span, finish, None, last)


def test_each_piece_is_sent_and_final_rides_on_the_last():
    sender = Sender()
    stream, closed = make_stream(sender)
    for event in (delta("a"), delta("b"), delta("c", finish="length", last=True)):
        stream.sink(event)
        stream.flush()
    assert sender.texts == ["a", "b", "c"]
    assert sender.finals == 1
    assert closed == [stream]


def test_a_cumulative_stream_says_everything_so_far():
    sender = Sender()
    outputs = TEXT | {"output_ids", "num_output_tokens"}
    stream, _ = make_stream(sender, outputs, cumulative=True)
    events = [delta("a", [1]), delta("b", [2], index=1), delta("c", [3]), delta("d", [4], index=1, finish="stop")]
    for event in [*events, delta("e", [5, 6], finish="stop", last=True)]:
        stream.sink(event)
        stream.flush()
    assert sender.texts == ["a", "b", "ac", "bd", "ace"]
    assert sender.sent[-1].tensors["output_ids"].tolist() == [1, 3, 5, 6]
    assert sender.sent[-1].tensors["num_output_tokens"].tolist() == [4]
    assert sender.finals == 1


def test_prompt_logprobs_are_sent_once():
    entry = {7: Logprob(-0.5, 1, "x")}
    event = dataclasses.replace(delta("a", [1], last=True, finish="stop"), prompt_logprobs=[None, entry])
    sender = Sender()
    stream, _ = make_stream(sender, TEXT | {"prompt_logprobs"}, stream=False)
    stream.sink(event)
    stream.flush()
    (text,) = sender.sent[0].tensors["prompt_logprobs"].tolist()
    assert json.loads(text) == [None, {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}]


def test_pieces_that_pile_up_are_merged():
    sender, scheduled = Sender(), []
    stream, _ = make_stream(sender, {"text_output", "output_ids", "num_output_tokens"}, schedule=scheduled.append)
    for i, letter in enumerate("abc"):
        stream.sink(delta(letter, ids=[i]))
    assert scheduled == [stream], "one flush takes them all"
    stream.flush()
    (response,) = sender.sent
    assert sender.texts == ["abc"]
    assert response.tensors["output_ids"].tolist() == [0, 1, 2]
    assert response.tensors["num_output_tokens"].tolist() == [3]
    stream.sink(delta("d", ids=[3], finish="stop", last=True))
    stream.flush()
    assert sender.texts == ["abc", "d"]
    assert len(scheduled) == 2


def test_a_stream_interval_gathers_tokens_after_the_first():
    sender = Sender()
    stream, _ = make_stream(sender, interval=3)
    for letter in "abcdefg":
        stream.sink(delta(letter))
        stream.flush()
    assert sender.texts == ["a", "bcd", "efg"]
    stream.sink(delta("h"))
    stream.flush()
    stream.sink(delta("i", finish="length", last=True))
    stream.flush()
    assert sender.texts == ["a", "bcd", "efg", "hi"]
    assert sender.finals == 1


@pytest.mark.parametrize(("events", "reason", "tokens"), [
    ([delta("a"), delta("b", finish="stop", last=True)], "stop", 2),
    ([delta("a"), delta("", ids=(), finish="abort", last=True)], "abort", 1),
    ([delta("", ids=(), finish="timeout", last=True)], "timeout", 0),
    ([delta("a"), EngineDeadError("x")], "error", 1),
])  # fmt: skip
def test_what_became_of_a_request_is_recorded(events, reason, tokens):
    stream, _ = make_stream(Sender())
    for event in events:
        stream.sink(event)
    stream.flush()
    record = stream.record()
    assert (record.finish_reason, record.prompt_tokens, record.generation_tokens) == (reason, 5, tokens)
    assert (record.first_token_s is None) == (tokens == 0)
    assert (record.per_token_s is None) == (tokens < 2)
    assert record.first_token_s is None or 0 <= record.first_token_s <= record.total_s < 5


def test_a_passed_timeout_is_an_error():
    sender = Sender()
    stream, _ = make_stream(sender)
    stream.sink(delta("a"))
    stream.flush()
    stream.sink(delta("", ids=(), finish="timeout", last=True))
    stream.flush()
    assert sender.texts == ["a"]
    assert [r.error.code for r in sender.sent if r.error] == ["UNAVAILABLE"]
    assert sender.finals == 1


def _ended(*events, **options):
    sender = Sender()
    stream, _ = make_stream(sender, prefix="the prompt: ", **{"stream": False, **options})
    for event in events:
        stream.sink(event)
    stream.flush()
    assert sender.finals == 1
    return sender, [(r.error.code, r.error.message) for r in sender.sent if r.error]


def dead_end(index=0, last=True):
    return SequenceDelta("1:", index, [], "", None, "error", "no token is left", last)


@pytest.mark.parametrize("events", [[dead_end()], [delta("a"), dead_end()], [dead_end(1, last=False), dead_end()]])
@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_cannot_be_completed_is_an_error(events, stream):
    _, errors = _ended(*events, stream=stream)
    assert errors == [("INVALID_ARG", "the output could not be completed: no token is left")]


@pytest.mark.parametrize(("events", "outputs"), [
    ([delta("a"), dead_end()], TEXT | {"finish_reason"}),
    ([delta("a", finish="stop"), dead_end(1)], TEXT),
    ([dead_end(1, last=False), delta("a", finish="stop", last=True)], TEXT),
])  # fmt: skip
def test_a_finish_reason_or_another_output_is_answered_and_the_failure_logged(events, outputs, caplog):
    sender, errors = _ended(*events, outputs=outputs)
    assert not errors
    assert sender.texts == ["the prompt: a"]
    assert ("finish_reason" not in outputs) or sender.sent[0].tensors["finish_reason"].tolist() == [b"error"]
    assert "no token is left" in caplog.text


def test_steps_without_text_wait_and_lose_no_tokens():
    sender, scheduled = Sender(), []
    stream, _ = make_stream(sender, {"text_output", "num_output_tokens"}, schedule=scheduled.append)
    stream.sink(delta("", ids=[1]))
    stream.sink(delta("", ids=[2]))
    assert not scheduled
    stream.sink(delta("é", ids=[3]))
    stream.flush()
    assert sender.texts == ["é"]
    assert sender.sent[0].tensors["num_output_tokens"].tolist() == [3]


def test_final_goes_alone_when_the_last_step_has_no_text():
    sender = Sender()
    stream, _ = make_stream(sender)
    stream.sink(delta("a"))
    stream.flush()
    stream.sink(delta("", ids=[2], finish="stop", last=True))
    stream.flush()
    assert sender.texts == ["a"]
    assert sender.finals == 1


@pytest.mark.parametrize("wanted", ["finish_reason", "num_output_tokens", "output_ids"])
def test_what_else_was_asked_for_is_said_without_text(wanted):
    sender = Sender()
    stream, _ = make_stream(sender, {"text_output", wanted})
    stream.sink(delta("", ids=[2], finish="stop", last=True))
    stream.flush()
    assert sender.texts == [""]
    assert wanted in sender.sent[0].tensors
    assert sender.finals == 1


def test_token_streams_send_every_token_at_once():
    sender = Sender()
    stream, _ = make_stream(sender, {"output_ids", "sequence_index"})
    stream.sink(delta("", ids=[7]))
    stream.flush()
    stream.sink(delta("x", ids=[8], finish="length", last=True))
    stream.flush()
    assert [r.tensors["output_ids"].tolist() for r in sender.sent] == [[7], [8]]
    assert [r.tensors["sequence_index"].tolist() for r in sender.sent] == [[0], [0]]
    assert sender.finals == 1


def test_without_streaming_there_is_exactly_one_response():
    sender, scheduled = Sender(), []
    outputs = {"text_output", "finish_reason", "num_input_tokens", "num_output_tokens"}
    stream, _ = make_stream(sender, outputs, stream=False, prefix="Q: ", schedule=scheduled.append)
    stream.sink(delta("a"))
    stream.sink(delta("b"))
    assert not scheduled
    stream.sink(delta("", finish="stop", last=True))
    assert scheduled == [stream]
    stream.flush()
    (response,) = sender.sent
    assert sender.texts == ["Q: ab"]
    assert response.tensors["finish_reason"].tolist() == [b"stop"]
    assert response.tensors["num_input_tokens"].tolist() == [5]
    assert response.tensors["num_output_tokens"].tolist() == [3]
    assert sender.finals == 1


def test_sequences_of_one_request_answer_by_index():
    sender = Sender()
    stream, _ = make_stream(sender, {"text_output", "sequence_index"}, stream=False)
    stream.sink(delta("b", index=1, finish="length"))
    stream.sink(delta("a", index=0, finish="length", last=True))
    stream.flush()
    assert sender.sent[0].tensors["text_output"].tolist() == [b"a", b"b"]
    assert sender.sent[0].tensors["sequence_index"].tolist() == [0, 1]
    sender = Sender()
    stream, _ = make_stream(sender, {"text_output", "sequence_index"})
    stream.sink(delta("b", index=1, finish="length"))
    stream.sink(delta("a", index=0, finish="length", last=True))
    stream.flush()
    assert [r.tensors["sequence_index"].tolist() for r in sender.sent] == [[0], [1]]
    assert sender.finals == 1


@pytest.mark.parametrize("is_stream", [True, False])
def test_cancelled_requests_end_with_an_error(is_stream):
    sender = Sender()
    stream, closed = make_stream(sender, stream=is_stream)
    stream.sink(delta("a"))
    sender.cancelled = True
    assert stream.poll_cancelled()
    stream.flush()
    assert not sender.sent
    stream.sink(delta("b", ids=(), finish="abort", last=True))
    stream.flush()
    assert [r.error.code for r in sender.sent] == ["CANCELLED"]
    assert sender.finals == 1
    assert closed == [stream]
    assert not stream.poll_cancelled(), "must not be asked after FINAL"


@pytest.mark.parametrize(("error", "code"), [(EngineDeadError("x"), "INTERNAL"), (OverloadedError("x"), "UNAVAILABLE")])
def test_engine_errors_end_the_request(error, code):
    sender = Sender()
    stream, closed = make_stream(sender)
    stream.sink(error)
    stream.flush()
    assert [r.error.code for r in sender.sent] == [code]
    assert sender.finals == 1
    assert closed == [stream]


def test_errors_carry_their_code():
    assert triton_error(InvalidRequestError("`x` is bad")).code == "INVALID_ARG"
    assert triton_error(InvalidRequestError("`x` is bad")).message == "`x` is bad"
    # A code that a server's module does not have.
    assert triton_error(UnsupportedError("no")).code == "INTERNAL"


@pytest.mark.parametrize("last", [True, False])
def test_a_response_that_cannot_be_sent_ends_the_request(last):
    sender = Sender(fails=True)
    stream, closed = make_stream(sender)
    stream.sink(delta("a", finish="length" if last else None, last=last))
    stream.flush()
    assert sender.finals == 1
    assert closed == [stream]
    assert stream.ended is last
    stream.sink(delta("b", finish="length", last=True))
    stream.flush()


def test_the_sender_thread_sends_what_was_scheduled_before_it_stopped():
    thread = SenderThread()
    senders = [Sender() for _ in range(20)]
    streams = [make_stream(sender, schedule=thread.schedule)[0] for sender in senders]
    thread.start()

    def produce():
        for i in range(30):
            for stream in streams:
                stream.sink(delta(f"{i} ", finish="length" if i == 29 else None, last=i == 29))

    producer = threading.Thread(target=produce)
    producer.start()
    producer.join()
    thread.stop()
    expected = "".join(f"{i} " for i in range(30))
    assert all("".join(sender.texts) == expected and sender.finals == 1 for sender in senders)


# ---- The ensemble's text models ----------------------------------------------------------------------------------


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
@pytest.mark.parametrize("text", ["🌶읽ส한", "Café 123 😊", "naïve 読む สวัสดี 한국어", "plain"])
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
