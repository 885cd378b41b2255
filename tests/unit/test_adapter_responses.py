"""Merging of deltas, and FINAL exactly once, against a stand-in for the stub's module."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest
from stub_stand_in import TEXT, Sender, delta, install, make_stream

from paged_backend.engine.outputs import Logprob, SequenceDelta
from paged_backend.errors import EngineDeadError, InvalidRequestError, OverloadedError, UnsupportedError
from paged_backend.triton_adapter.pb import triton_error
from paged_backend.triton_adapter.sender import SenderThread


@pytest.fixture(autouse=True)
def stub_module(monkeypatch):
    install(monkeypatch)


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
