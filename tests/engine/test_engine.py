"""The engine's life with a tiny random model: joining and leaving, aborting, refusing, stopping, shutting down."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time

import numpy as np
import pytest
import torch
from slow_steps import slow_down

from paged_backend import LLM, SamplingParams
from paged_backend.config import EngineConfig
from paged_backend.engine.engine import Engine
from paged_backend.engine.engine_thread import EngineThread
from paged_backend.engine.outputs import SequenceDelta
from paged_backend.errors import EngineDeadError, InvalidRequestError, OverloadedError, UnsupportedError
from paged_backend.model_source import DEMO_MODEL

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture
def config(tiny_llama) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_llama),
        skip_tokenizer_init=True,
        dtype="float32",
        num_kv_blocks=64,
        num_threads=1,
        check_integrity=True,
    )


@pytest.fixture
def engine(config):
    made = Engine(config)
    yield made
    made.close()


@pytest.fixture
def small_pool(config):
    made = Engine(dataclasses.replace(config, num_kv_blocks=8))
    yield made
    made.close()


def _run(engine: Engine) -> dict[str, list[SequenceDelta]]:
    deltas: dict[str, list[SequenceDelta]] = {}
    while engine.has_unfinished_requests():
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    return deltas


def test_requests_join_and_leave_between_steps(engine):
    engine.add_request(engine.make_request("long", [1, 2, 3], LONG))
    for _ in range(10):
        engine.step()
    engine.add_request(engine.make_request("short", [4, 5], GREEDY))
    for _ in range(8):
        deltas = engine.step()
    assert [(d.request_id, d.request_finished) for d in deltas] == [("long", False), ("short", True)]
    assert engine.live_request_ids() == ["long"]


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["queued", "prefilling", "decoding"])
def test_abort_frees_the_blocks_at_once(config, steps):
    engine = Engine(dataclasses.replace(config, max_num_seqs=8, max_num_batched_tokens=16))
    engine.add_request(engine.make_request("a", list(range(1, 31)), LONG))
    for _ in range(steps):
        engine.step()
    assert (engine.stats()["blocks_used"] > 0) == (steps > 0)
    (delta,) = engine.abort_request("a")
    assert (delta.finish_reason, delta.request_finished) == ("abort", True)
    assert engine.stats()["blocks_used"] == 0
    assert engine.abort_request("a") == []
    engine.check_integrity()
    # The worker forgets the row too, and the next request is unharmed.
    engine.add_request(engine.make_request("b", [7], GREEDY))
    assert len(_run(engine)["b"]) == 8
    engine.close()


@pytest.mark.parametrize(
    ("prompt", "params", "field", "message"),
    [
        ([], {}, "input_ids", "is empty"),
        ([1, -1], {}, "input_ids", r"`input_ids`\[1\] = -1 is outside the vocabulary"),
        ([10**9], {}, "input_ids", "outside the vocabulary"),
        ([1.5], {}, "input_ids", "not an integer"),
        ([True], {}, "input_ids", "not an integer"),
        ([np.float32(1)], {}, "input_ids", "not an integer"),
        (np.array([[1, 2]]).tolist(), {}, "input_ids", r"\[0\] is not an integer"),
        ([10**500], {}, "input_ids", r"= 1000{20,40} is outside the vocabulary"),
        ({"a": 1}, {}, "input_ids", "must be a string or a list"),
        ([1] * 256, {}, "input_ids", r"max_model_len"),
        ([1] * 90, {"max_tokens": 50}, "max_tokens", "8 blocks x 16 tokens = 128 KV slots"),
        ([1] * 130, {}, "input_ids", "can never fit the pool"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(small_pool, prompt, params, field, message):
    engine = small_pool
    with pytest.raises(InvalidRequestError, match=message) as caught:
        engine.make_request("x", prompt, SamplingParams(**params), field="input_ids")
    assert caught.value.field == field


def test_a_text_that_can_never_fit_is_refused_without_tokenizing_it(config, monkeypatch):
    engine = Engine(dataclasses.replace(config, model=DEMO_MODEL, skip_tokenizer_init=False, max_model_len=64))
    longest = 64 * engine.tokenizer.max_token_length
    with pytest.raises(InvalidRequestError, match=r"`text_input` has \d+ tokens"):
        engine.make_request("x", "word " * (longest // 5), GREEDY, field="text_input")
    monkeypatch.setattr(engine.tokenizer, "encode", None)
    with pytest.raises(InvalidRequestError, match=f"has {longest + 1} characters.*never hold more than {longest}"):
        engine.make_request("x", "x" * (longest + 1), GREEDY, field="text_input")
    engine.close()


def test_text_needs_a_tokenizer(engine):
    with pytest.raises(UnsupportedError, match="without a tokenizer"):
        engine.make_request("x", "hello", GREEDY)
    with pytest.raises(UnsupportedError, match="`stop`"):
        engine.make_request("x", [1], SamplingParams(stop="a"))


def test_a_request_that_just_fits_the_pool_is_served(small_pool):
    # 128 slots: 104 prompt tokens and 25 new ones, the last of which needs no slot.
    small_pool.add_request(small_pool.make_request("x", [1] * 104, SamplingParams(max_tokens=25, ignore_eos=True)))
    assert len(_run(small_pool)["x"]) == 25


def test_without_max_tokens_the_context_is_the_limit(config):
    engine = Engine(dataclasses.replace(config, max_model_len=40))
    engine.add_request(engine.make_request("x", [1] * 10, SamplingParams(max_tokens=None, ignore_eos=True)))
    deltas = _run(engine)["x"]
    assert (len(deltas), deltas[-1].finish_reason) == (30, "length")
    engine.close()


def test_a_live_request_id_is_not_taken_twice(engine):
    engine.add_request(engine.make_request("a", [1], GREEDY))
    with pytest.raises(InvalidRequestError, match="request id 'a'"):
        engine.add_request(engine.make_request("a", [2], GREEDY))
    _run(engine)
    engine.add_request(engine.make_request("a", [2], GREEDY))


def test_stop_token_ends_and_names_itself(engine):
    engine.add_request(engine.make_request("a", [1, 2, 3], GREEDY))
    token_ids = [delta.token_ids[0] for delta in _run(engine)["a"]]
    wanted = token_ids[4]
    first = token_ids.index(wanted)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[wanted])
    engine.add_request(engine.make_request("b", [1, 2, 3], params))
    deltas = _run(engine)["b"]
    assert [delta.token_ids[0] for delta in deltas] == token_ids[: first + 1]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", wanted)


# --- the engine thread ---


class Client:
    """Collects what a sink is given."""

    def __init__(self) -> None:
        self.items: queue.Queue = queue.Queue()

    def result(self, timeout: float = 30) -> tuple[list[int], object]:
        """All tokens, and the last item (a delta or an error)."""
        token_ids: list[int] = []
        while True:
            item = self.items.get(timeout=timeout)
            if not isinstance(item, SequenceDelta):
                return token_ids, item
            token_ids += item.token_ids
            if item.request_finished:
                return token_ids, item


@pytest.fixture
def thread(config):
    made = EngineThread(Engine(config))
    made.start()
    yield made
    made.shutdown(0)


def _submit(thread: EngineThread, request_id: str, params: SamplingParams = GREEDY) -> Client:
    client = Client()
    thread.submit(thread.engine.make_request(request_id, [1, 2], params), client.items.put)
    return client


def test_many_threads_submit_and_each_gets_its_own(thread):
    wanted, _ = _submit(thread, "solo").result()
    clients: dict[int, Client] = {}

    def work(index: int) -> None:
        clients[index] = _submit(thread, f"r{index}")

    workers = [threading.Thread(target=work, args=(i,)) for i in range(20)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for client in clients.values():
        token_ids, last = client.result()
        assert token_ids == wanted
        assert last.finish_reason == "length"
        assert client.items.empty()
    assert thread.num_live == 0


def test_abort_answers_and_an_unknown_id_is_fine(thread):
    slow_down(thread.engine)
    client = _submit(thread, "a", LONG)
    thread.abort("nobody")
    thread.abort("a")
    _, last = client.result()
    assert last.finish_reason == "abort"
    assert thread.num_live == 0


def test_shutdown_lets_live_requests_finish(config):
    thread = EngineThread(Engine(config))
    thread.start()
    client = _submit(thread, "a")
    thread.shutdown(30)
    assert client.result()[1].finish_reason == "length"
    with pytest.raises(OverloadedError, match="shutting down"):
        _submit(thread, "b")


def test_shutdown_without_time_answers_with_an_error(config):
    thread = EngineThread(Engine(config))
    slow_down(thread.engine)
    thread.start()
    clients = [_submit(thread, str(i), LONG) for i in range(4)]
    thread.shutdown(0)
    assert all(isinstance(client.result()[1], OverloadedError) for client in clients)


def test_a_failing_engine_answers_everybody_and_takes_nobody(config, monkeypatch):
    engine = Engine(config)
    thread = EngineThread(engine)

    def fail(plan):
        raise RuntimeError("out of cheese")

    monkeypatch.setattr(engine.worker, "execute", fail)
    # Before the start: the first step fails, and what comes after it is refused at once.
    clients = [_submit(thread, str(i)) for i in range(2)]
    thread.start()
    for client in clients:
        error = client.result()[1]
        assert isinstance(error, EngineDeadError)
        assert "out of cheese" in str(error)
    with pytest.raises(EngineDeadError):
        _submit(thread, "late")
    thread.shutdown(0)


def test_a_full_waiting_list_is_overload(config):
    engine = Engine(dataclasses.replace(config, max_num_seqs=1, max_waiting_requests=2))
    thread = EngineThread(engine)
    clients = [_submit(thread, str(i)) for i in range(3)]
    wanted = r"3 requests are .*; the limit is 3 \(max_num_seqs 1 and max_waiting_requests 2\)"
    with pytest.raises(OverloadedError, match=wanted):
        _submit(thread, "one too many")
    thread.start()
    assert [client.result()[1].finish_reason for client in clients] == ["length"] * 3
    thread.shutdown(0)


@pytest.mark.parametrize("end", ["room", "drain"])
def test_a_submitter_may_wait_for_room(config, end):
    engine = Engine(dataclasses.replace(config, max_num_seqs=1, max_waiting_requests=1))
    thread = EngineThread(engine)
    clients = [_submit(thread, str(i), LONG) for i in range(2)]
    outcome: queue.Queue = queue.Queue()

    def submit() -> None:
        client = Client()
        try:
            thread.submit(engine.make_request("third", [1, 2], GREEDY), client.items.put, wait=True)
            outcome.put(client)
        except OverloadedError as error:
            outcome.put(error)

    waiter = threading.Thread(target=submit)
    waiter.start()
    with pytest.raises(queue.Empty):
        outcome.get(timeout=0.1)
    # Drained before it starts: otherwise a fast engine might make room first.
    if end == "drain":
        thread.drain(0)
    thread.start()
    waiter.join(30)
    answer = outcome.get(timeout=5)
    if end == "drain":
        assert isinstance(answer, OverloadedError)
    else:
        assert answer.result()[1].finish_reason == "length"
        assert clients[0].result()[1].finish_reason == "length"
    thread.shutdown(0)


def test_an_idle_engine_uses_no_cpu(thread):
    _submit(thread, "a").result()
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


# --- offline ---


def test_llm_text_stop_strings_and_eos():
    with LLM(DEMO_MODEL, dtype="float32", num_kv_blocks=64, num_threads=1) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=32)
        (output,) = llm.generate("The capital of France is", greedy, use_tqdm=False)
        text = output.outputs[0].text
        assert "Paris" in text
        assert output.prompt == "The capital of France is"
        assert llm.engine.tokenizer.decode(output.outputs[0].token_ids) == text
        (answer,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], greedy, use_tqdm=False)
        assert answer.outputs[0].text == "The capital of France is Paris."
        assert answer.outputs[0].finish_reason == "stop"
        for start in range(0, len(text) - 8, 3):
            stop = text[start : start + 8]
            cut = text.index(stop)
            for include in (False, True):
                params = SamplingParams(temperature=0, max_tokens=32, stop=stop, include_stop_str_in_output=include)
                completion = llm.generate(output.prompt, params, use_tqdm=False)[0].outputs[0]
                assert completion.text == text[: cut + (8 if include else 0)]
                assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        with pytest.raises(InvalidRequestError, match="`prompt` is empty"):
            llm.generate(["fine", ""], greedy)
        assert llm.stats()["requests_waiting"] == 0
        with pytest.raises(InvalidRequestError, match="2 sampling_params for 1"):
            llm.generate("x", [greedy, greedy])
        with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
            llm.generate([{"prompt_tokens": [1]}])
        for prompts in (None, 5, b"x", [None], {"prompt_token_ids": "ab"}, {"prompt_token_ids": 5}):
            with pytest.raises(InvalidRequestError, match="prompt"):
                llm.generate(prompts, greedy, use_tqdm=False)
        for params in (5, {"temperature": 0}, [{"temperature": 0}], "x"):
            with pytest.raises(InvalidRequestError, match="`sampling_params` must be"):
                llm.generate("x", params, use_tqdm=False)
        for messages in (None, 5, "hello", [], [5], {"role": "user"}, [[5]]):
            with pytest.raises(InvalidRequestError, match="`messages`"):
                llm.chat(messages, greedy, use_tqdm=False)
        # Arrays of ids are ids too.
        for ids in (np.array(output.prompt_token_ids), torch.tensor(output.prompt_token_ids)):
            (same,) = llm.generate({"prompt_token_ids": ids}, greedy, use_tqdm=False)
            assert same.outputs[0].token_ids == output.outputs[0].token_ids
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("x")
    llm.close()


def test_interrupted_generate_leaves_nothing_behind(monkeypatch):
    with LLM(DEMO_MODEL, dtype="float32", num_kv_blocks=64, num_threads=1) as llm:
        step = llm.engine.step
        calls = iter(range(100))

        def interrupted():
            if next(calls) == 3:
                raise KeyboardInterrupt
            return step()

        monkeypatch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a b c", "d e f"], GREEDY, use_tqdm=False)
        assert llm.stats()["blocks_used"] == 0
        assert not llm.engine.has_unfinished_requests()
