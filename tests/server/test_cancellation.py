"""Clients that go away, in every phase, on a server so small that requests queue and prefill slowly.

The tight pool also shows what can never fit it.
"""

from __future__ import annotations

import http.client
import json
import time

import pytest
from server.client import GREEDY, Call, ask, wait_for
from server.conftest import Launched, copy_repository

pytestmark = pytest.mark.server

BLOCKS, BLOCK_SIZE = 64, 16
FOREVER = {**GREEDY, "max_tokens": None, "ignore_eos": True}


@pytest.fixture(scope="module")
def tight(tmp_path_factory):
    """Two sequences at a time, eight tokens a step, 1024 KV slots."""
    folder = tmp_path_factory.mktemp("tight")
    repository = copy_repository(
        folder,
        **{"num_kv_blocks": BLOCKS, "block_size": BLOCK_SIZE, "max_num_seqs": 2, "max_num_batched_tokens": 8},
        check_integrity=True,
    )
    server = Launched(folder / "log", f"--model-repository={repository}")
    try:
        server.wait_ready(timeout=240.0)
        wait_for(server.metrics_url, used=0, free=BLOCKS)
        yield server
    finally:
        code = server.stop()
    assert code == 0, server.output
    server.assert_gone()


@pytest.fixture(autouse=True)
def _all_blocks_free_afterwards(tight):
    yield
    time.sleep(0.2)
    wait_for(tight.metrics_url, running=0, waiting=0, used=0, free=BLOCKS)


def _start(server, prompt="Once upon a time", model="paged_llm", stream=True, **options):
    return Call(server.grpc_url, model, {"text_input": prompt, "stream": stream}, FOREVER, **options)


@pytest.mark.parametrize("stream", [True, False])
def test_decoding(tight, stream):
    call = _start(tight, stream=stream)
    if stream:
        call.next()
    # The gauges follow within a tenth of a second; looking at once could still see the idle server of before.
    wait_for(tight.metrics_url, running=1)
    call.cancel()
    assert wait_for(tight.metrics_url, running=0, used=0) < 5


def test_prefilling(tight):
    """900 tokens at eight a step: far from their first token when the client goes."""
    call = _start(tight, "word " * 900)
    wait_for(tight.metrics_url, running=1)
    call.cancel()
    assert wait_for(tight.metrics_url, running=0, used=0) < 5
    assert not call.times


def test_queued(tight):
    running = [_start(tight) for _ in range(2)]
    for call in running:
        call.next()
    queued = _start(tight, "Behind the two")
    wait_for(tight.metrics_url, running=2, waiting=1)
    queued.cancel()
    assert wait_for(tight.metrics_url, waiting=0) < 5
    for call in running:
        call.next()
        call.cancel()


def test_an_http_stream_whose_client_is_gone(tight):
    """The server notices when it writes the next piece; a plain `generate` writes none before the end."""
    connection = http.client.HTTPConnection(tight.http_url, timeout=60)
    body = {"text_input": "Once upon a time", "stream": True, "parameters": {"max_tokens": 500, "ignore_eos": True}}
    connection.request("POST", "/v2/models/paged_llm/generate_stream", json.dumps(body))
    connection.getresponse().read(10)
    wait_for(tight.metrics_url, running=1)
    connection.close()
    assert wait_for(tight.metrics_url, running=0, used=0) < 5


def test_neighbours_go_on(tight):
    alone = ask(tight.grpc_url, "paged_llm", "Hello", 24, ignore_eos=True)
    params = {**GREEDY, "max_tokens": 24, "ignore_eos": True}
    neighbour = Call(tight.grpc_url, "paged_llm", {"text_input": "Hello", "stream": True}, params)
    call = _start(tight)
    call.next()
    call.cancel()
    answer = neighbour.wait(linger=0.2)
    assert answer.text == alone
    assert answer.finals == 1


@pytest.mark.parametrize("model", ["paged_llm", "paged_ensemble"])
def test_stop_ends_the_request_with_the_same_id(tight, model):
    """In an ensemble this is the way: the server does not tell a running step that the ensemble was cancelled."""
    call = _start(tight, model=model, request_id="mine")
    other = _start(tight, "Another", model="paged_llm", request_id="other")
    call.next()
    other.next()
    stop = Call(tight.grpc_url, model, {"text_input": "", "stop": True}, request_id="mine").wait(linger=0.2)
    assert stop.finals == 1
    assert not any(stop.texts)
    answer = call.wait()
    assert "the request was cancelled" in answer.error.message()
    other.next()
    other.cancel()


def test_stop_of_an_unknown_id_is_fine(tight):
    stop = Call(tight.grpc_url, "paged_llm", {"stop": True}, request_id="nobody").wait()
    assert stop.error is None
    assert stop.finals == 1


def test_a_prompt_that_can_never_fit_the_pool_is_refused(tight):
    neighbour = _start(tight)
    neighbour.next()
    for inputs, params, field in (
        ({"input_ids": [5] * (BLOCKS * BLOCK_SIZE + 1)}, {"max_tokens": 1}, "input_ids"),
        ({"text_input": "word " * 1100}, {"max_tokens": 1}, "text_input"),
        ({"text_input": "word"}, {"max_tokens": BLOCKS * BLOCK_SIZE + 1}, "max_tokens"),
    ):
        error = Call(tight.grpc_url, "paged_llm", inputs, params).wait().error
        assert f"`{field}`" in error.message()
        assert "never fit the pool" in error.message()
    neighbour.next()
    neighbour.cancel()
