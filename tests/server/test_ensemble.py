"""`paged_ensemble` says exactly what `paged_llm` says, whatever the script, and its text models stay light."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from server.client import GREEDY, Call, ask, chat, post

pytestmark = pytest.mark.server

PROMPTS = {
    "mixed scripts": "🌶读ส한",
    "accents": "Café 123 😊",
    "repeat": chat("Repeat exactly: 🌶 naïve 読む สวัสดี 한국어"),
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
@pytest.mark.parametrize("params", [{}, {"stop": ["a", "한"]}, {"skip_special_tokens": False}], ids=str)
def test_same_text_as_the_engine_model(served, prompt, params):
    inputs = {"text_input": prompt, "stream": True}
    params = {**GREEDY, "max_tokens": 9, **params}
    engine = Call(served.grpc_url, "paged_llm", inputs, params).wait()
    ensemble = Call(served.grpc_url, "paged_ensemble", inputs, params).wait()
    assert ensemble.text == engine.text
    assert all(ensemble.texts)
    # A replacement character would be half a character that was sent too early.
    assert not any(text.startswith("\ufffd") for text in engine.texts[:-1])
    whole = Call(served.grpc_url, "paged_ensemble", {"text_input": prompt}, params).wait(linger=0.2)
    assert whole.text == prompt + engine.text
    assert len(whole.responses) == whole.finals == 1


def test_special_tokens_in_the_prompt_come_back_as_written(served):
    """The prompt is put before the output as the client wrote it, not as its ids decode."""
    prompt = chat("Hi")
    answer = Call(served.grpc_url, "paged_ensemble", {"text_input": prompt}, {**GREEDY, "max_tokens": 2}).wait()
    assert answer.text.startswith(prompt)


def test_an_empty_prompt_reaches_only_its_own_client(served):
    neighbour = Call(
        served.grpc_url, "paged_ensemble", {"text_input": "Once", "stream": True}, {**GREEDY, "max_tokens": 8}
    )
    bad = Call(served.grpc_url, "paged_ensemble", {"text_input": ""}).wait()
    assert "`text_input` is empty" in bad.error.message()
    assert neighbour.wait().text == ask(served.grpc_url, "paged_llm", "Once", 8)


@pytest.mark.parametrize("inputs", [{}, {"stream": True}, {"sampling_parameters": "{}"}], ids=str)
def test_a_missing_prompt_is_refused(served, inputs):
    for endpoint in ("generate", "generate_stream"):
        status, body = post(served.http_url, "paged_ensemble", endpoint, inputs)
        assert status == 400
        assert "`text_input` is missing" in body
    if inputs:
        error = Call(served.grpc_url, "paged_ensemble", inputs).wait().error
        assert "`text_input` is missing" in error.message()


def test_a_conversation_and_a_prompt_that_can_never_fit_are_refused_by_name(served):
    for inputs in ({"messages": "[]"}, {"messages": "[]", "text_input": "Hi"}):
        refusal = "`messages` is not taken by the ensemble: use the engine model"
        assert refusal in Call(served.grpc_url, "paged_ensemble", inputs).wait().error.message()
        status, body = post(served.http_url, "paged_ensemble", "generate", inputs)
        assert (status, refusal in body) == (400, True)
    began = time.monotonic()
    error = Call(served.grpc_url, "paged_ensemble", {"text_input": "word " * 1_100_000}).wait().error
    assert "`text_input` has 5500000 characters" in error.message()
    assert time.monotonic() - began < 1


def test_text_models_do_not_load_torch(served):
    """Torch in a process shows as its libraries mapped into it."""
    stubs = {}
    for process in Path("/proc").iterdir():
        try:
            arguments = (process / "cmdline").read_bytes().decode().split("\0")
            mapped = (process / "maps").read_text()
        except OSError:
            continue
        if "triton_python_backend_stub" not in arguments[0] or str(served.pid) not in _ancestors(process.name):
            continue
        stubs[Path(arguments[1]).parts[-3]] = "libtorch" in mapped
    assert stubs == {"paged_llm": True, "tokenizer": False, "detokenizer": False}


def _ancestors(pid: str) -> set[str]:
    found = set()
    while pid not in ("0", "1"):
        found.add(pid)
        status = Path(f"/proc/{pid}/status").read_text()
        pid = next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:"))
    return found | {str(os.getpid())} & {pid}
