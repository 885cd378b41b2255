"""Every client example against the real server and demo model, run as a person would run it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.server

EXAMPLES = Path(__file__).resolve().parents[2] / "client_examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "common")
QUESTION = "What is the capital of France?"
# "The capital of France is Paris." in the demo model's vocabulary.
ANSWER_IDS = [504, 3575, 282, 4649, 314, 7042, 30]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def succeed(name: str, *arguments: str) -> str:
    done = run(name, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def fail(name: str, *arguments: str) -> str:
    """A failure is one line on standard error and a non-zero exit code."""
    done = run(name, *arguments)
    assert done.returncode != 0
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_all_scripts_are_tested_here() -> None:
    assert SCRIPTS == [
        "cancel",
        "ensemble",
        "http_generate",
        "many_streams",
        "stream_text",
        "stream_token_ids",
    ]


@pytest.mark.parametrize("name", ["stream_text", "ensemble"])
def test_streamed_text(served: Any, name: str) -> None:
    assert "Paris" in succeed(name, QUESTION, "--url", served.grpc_url)


def test_text_arrives_piece_by_piece(served: Any) -> None:
    """The first piece is printed while the server still works on the rest."""
    command = [sys.executable, "-u", str(EXAMPLES / "stream_text.py"), "Tell me a long story."]
    options = ["--url", served.grpc_url, "--max-tokens", "64"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        first = client.stdout.read(1)
        assert client.poll() is None
        rest = client.stdout.read()
    assert first
    assert len(rest) > 100
    assert client.returncode == 0


def test_raw_prompts_get_no_chat_markup(served: Any) -> None:
    text = succeed("stream_text", "1, 2, 3, 4, 5,", "--raw", "--max-tokens", "8", "--url", served.grpc_url)
    assert "6, 7" in text


def test_token_ids(served: Any) -> None:
    printed = succeed("stream_token_ids", "--url", served.grpc_url).split()
    assert [int(word) for word in printed][: len(ANSWER_IDS)] == ANSWER_IDS


def test_http(served: Any) -> None:
    whole = succeed("http_generate", QUESTION, "--url", served.http_url)
    assert "Paris" in whole
    assert QUESTION not in whole
    assert succeed("http_generate", QUESTION, "--stream", "--url", served.http_url) == whole


def test_the_curl_lines_of_the_http_example(served: Any) -> None:
    documentation = succeed("http_generate", "--help").replace("\\\n", " ")
    lines = re.findall(r"^ *(curl .*)$", documentation, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        command = line.replace("127.0.0.1:8000", served.http_url)
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, check=True)
        answers = [json.loads(one.removeprefix("data: ")) for one in done.stdout.splitlines() if one]
        assert answers
        assert all(answer["text_output"] for answer in answers)


def test_cancel(served: Any) -> None:
    printed = succeed("cancel", "--url", served.grpc_url, "--metrics-url", served.metrics_url)
    assert "cancelled by the client" in printed
    assert "the server runs 0 requests, as before" in printed


def test_cancel_in_the_ensemble(served: Any) -> None:
    arguments = ["--model", "paged_ensemble", "--url", served.grpc_url, "--metrics-url", served.metrics_url]
    printed = succeed("cancel", *arguments)
    assert "ended by a `stop` with the same request id" in printed
    assert "cancelled by the client" not in printed
    assert "the server runs 0 requests, as before" in printed


def test_many_streams(served: Any) -> None:
    printed = succeed("many_streams", "--streams", "6", "--max-tokens", "12", "--url", served.grpc_url)
    assert re.search(r"^streams +6$", printed, re.MULTILINE)
    assert re.search(r"^TTFT p50 +\d+ ms$", printed, re.MULTILINE)
    assert re.search(r"^TTFT p95 +\d+ ms$", printed, re.MULTILINE)
    tokens = re.search(r"^tokens +(\d+) in [\d.]+ s: [\d.]+ tokens/s$", printed, re.MULTILINE)
    assert tokens
    assert 6 <= int(tokens[1]) <= 72


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str) -> None:
    assert "--url" in succeed(name, "--help")


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_server(name: str) -> None:
    with socket.socket() as reserved:
        # Bound but not listening: connections are refused, and nobody else gets the port.
        reserved.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{reserved.getsockname()[1]}"
        extra = ["--metrics-url", url] if name == "cancel" else []
        assert "refused" in fail(name, "--url", url, *extra)


@pytest.mark.parametrize("name", ["stream_text", "stream_token_ids", "ensemble", "many_streams"])
def test_a_refused_request(served: Any, name: str) -> None:
    assert "max_tokens" in fail(name, "--url", served.grpc_url, "--max-tokens", "0")


@pytest.mark.parametrize("mode", [[], ["--stream"]])
def test_a_refused_http_request(served: Any, mode: list[str]) -> None:
    message = fail("http_generate", "--url", served.http_url, "--max-tokens", "0", *mode)
    assert "max_tokens" in message
    assert "{" not in message
