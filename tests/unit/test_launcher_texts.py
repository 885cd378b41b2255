"""What the launcher suggests, how it waits and how it sums up, without a server."""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
import time
from pathlib import Path

import pytest

from paged_backend.server import launcher
from paged_backend.server.ports import Endpoints

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "body"),
    [
        ({"model": "m"}, {"text_input": "What is the capital of France?"}),
        ({"model": "m", "skip_tokenizer_init": True}, {"input_ids": [1, 2, 3]}),
    ],
    ids=["text", "ids"],
)
def test_a_copied_repository_gets_a_generate_command(tmp_path: Path, arguments: dict, body: dict) -> None:
    (tmp_path / "llm" / "1").mkdir(parents=True)
    (tmp_path / "llm" / "1" / "model.json").write_text(json.dumps(arguments))
    words = shlex.split(launcher._example(["detokenizer", "llm"], Endpoints("127.0.0.1", 9000, 9001, 9002), tmp_path))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:9000/v2/models/llm/generate"]
    assert json.loads(words[-1]) == body


def test_the_checkouts_own_repository_gets_the_example_client() -> None:
    endpoints = Endpoints("127.0.0.1", 8000, 8001, 8002)
    assert "stream_text.py" in launcher._example(["paged_llm"], endpoints, ROOT / "model_repository")


@pytest.mark.parametrize(
    ("killed", "lost", "code", "text"),
    [
        ("", 0, 0, "stopped"),
        ("", 1, 1, "stopped, but 1 request in flight was ended before the answer"),
        ("why", 2, 1, "stopped, but 2 requests in flight were ended before the answer (why)"),
        ("why", 0, 0, "stopped (why)"),
    ],
)
def test_the_last_line_and_the_exit_code(
    capsys: pytest.CaptureFixture[str], killed: str, lost: int, code: int, text: str
) -> None:
    assert launcher._farewell(killed, lost) == code
    assert capsys.readouterr().out == f"{text}\n"


def test_a_signal_and_a_file_descriptor_end_a_wait() -> None:
    with launcher.StopRequests() as stop:
        reader, writer = os.pipe()
        assert not stop.wait(0.01, reader)
        os.write(writer, b"x")
        began = time.monotonic()
        assert not stop.wait(20, reader)
        os.read(reader, 1)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert stop.wait(20, reader)
        assert stop.wait(20)
        assert time.monotonic() - began < 10
        assert not stop.hurry()
    os.close(reader)
    os.close(writer)
