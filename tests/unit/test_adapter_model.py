"""The engine model's life without a server: requests of one call, readiness, and what ends live requests."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest
from slow_steps import slow_down
from stub_stand_in import Request, Sender, install

from paged_backend.triton_adapter import backend

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def model(monkeypatch, tmp_path, text_model):
    """A loaded model with a tiny engine; unloaded with the test if not by it."""
    install(monkeypatch)
    monkeypatch.setenv("PAGED_BACKEND_DRAIN_SECONDS", "0")
    monkeypatch.setenv("GOMP_SPINCOUNT", "300000")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    (tmp_path / "1").mkdir()
    arguments = {"model": str(text_model), "num_kv_blocks": 64, "block_size": 16, "num_threads": 1, "device": "cpu"}
    (tmp_path / "1" / "model.json").write_text(json.dumps(arguments))
    loaded = backend.LLMModel()
    loaded.initialize(
        {
            **{"model_repository": str(tmp_path), "model_version": "1", "model_name": "llm", "model_config": "{}"},
            "model_instance_kind": "MODEL",
        }
    )
    yield loaded
    if loaded._termination._installed:
        loaded.finalize()


def ask(text, sender=None, *, tokens=8, **params):
    sender = sender or Sender()
    values = {**GREEDY, "max_tokens": tokens, **params}
    return sender, Request(values, text_input=text, sender=sender, exclude_input_in_output=True)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def answers(model, *requests):
    """Hand the requests over in one call, and wait for all their ends."""
    assert model.execute([request for _, request in requests]) is None
    wait_for(lambda: all(sender.finals for sender, _ in requests))
    return [sender for sender, _ in requests]


def test_idle_compute_threads_sleep_soon(model):
    assert int(os.environ["GOMP_SPINCOUNT"]) < 100_000


def test_a_bad_request_of_a_call_fails_alone(model):
    (alone,) = answers(model, ask("the cat"))
    bad = [ask("the cat", top_p=0), ask(""), ask("x" * 2000), ask("the cat", max_token=3), ask("the cat", logprobs=99)]
    first, *refused, last = answers(model, ask("the cat"), *bad, ask("the cat"))
    for sender, field in zip(refused, ("top_p", "text_input", "text_input", "max_token", "logprobs"), strict=True):
        (response,) = sender.sent
        assert response.error.code == "INVALID_ARG"
        assert f"`{field}`" in response.error.message
    assert first.texts == last.texts == alone.texts
    assert answers(model, ask("the cat"))[0].texts == alone.texts


def test_a_request_that_breaks_the_taking_in_fails_alone(model):
    class Broken(Request):
        def timeout(self):
            raise RuntimeError("no such request")

    sender = Sender()
    broken, good = answers(model, (sender, Broken(text_input="the cat", sender=sender)), ask("the cat"))
    assert [response.error.code for response in broken.sent] == ["INTERNAL"]
    assert good.texts


def test_unloading_answers_every_live_request_once(model):
    assert model.is_ready()
    slow_down(model._engine)
    live = [ask("the cat", tokens=200) for _ in range(3)]
    model.execute([request for _, request in live])
    wait_for(lambda: model._engine_thread.stats()["requests_running"] == 3)
    model.finalize()
    assert not model.is_ready()
    for sender, _ in live:
        assert sender.finals == 1
        assert [response.error.code for response in sender.sent] == ["UNAVAILABLE"]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("paged-")]


def test_a_failing_engine_answers_every_live_request_and_ends_the_process(model, monkeypatch):
    exits = []
    monkeypatch.setattr(backend.os, "_exit", exits.append)
    slow_down(model._engine)
    live = [ask("the cat", tokens=200) for _ in range(3)]
    model.execute([request for _, request in live])
    wait_for(lambda: model._engine_thread.stats()["requests_running"] == 3)

    def fail(plan):
        raise RuntimeError("out of cheese")

    monkeypatch.setattr(model._engine.worker, "execute", fail)
    wait_for(lambda: exits)
    assert exits == [1]
    assert not model.is_ready()
    for sender, _ in live:
        assert sender.finals == 1
        assert [response.error.code for response in sender.sent] == ["INTERNAL"]
        assert "out of cheese" in sender.sent[0].error.message
    late, request = ask("the cat")
    model.execute([request])
    assert "the engine failed" in late.sent[0].error.message
