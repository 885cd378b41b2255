"""What the HTTP example says of an answer that breaks off, from a socket that speaks like the server, then dies."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "client_examples" / "http_generate.py"
BROKEN = "error: the connection ended before the answer was complete\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
END = b"0\r\n\r\n"


def event(text: str, reason: str | None) -> bytes:
    line = f"data: {json.dumps({'text_output': text, 'finish_reason': reason})}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(line), line)


def ask(answer: bytes, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the example against a server that sends `answer` and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                asked = connection.recv(65536)
                while b"return_finish_reason" not in asked:
                    asked += connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, str(EXAMPLE), "--url", url, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        thread.join()
    return done


def test_a_complete_stream() -> None:
    done = ask(CHUNKED + event("Par", "None") + event("is", "stop") + END, "--stream")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Paris\n", "")


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + event("Par", "None"),
        CHUNKED + event("Par", "None") + END,
        CHUNKED + event("Par", "None")[:-9],
        CHUNKED,
        b"",
    ],
    ids=["no end", "an end without a reason", "half an event", "nothing but headers", "nothing"],
)
def test_a_stream_that_breaks_off(answer: bytes) -> None:
    done = ask(answer, "--stream")
    assert done.returncode == 1
    assert done.stderr == BROKEN


def test_a_whole_answer_that_breaks_off() -> None:
    done = ask(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"text_output": "Pa')
    assert (done.returncode, done.stderr) == (1, BROKEN)


def test_cancel_looks_for_the_metrics_beside_the_url_and_says_so() -> None:
    with socket.socket() as reserved:
        # Bound but not listening: connections are refused, and nobody else gets the port.
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        command = [sys.executable, str(EXAMPLE.with_name("cancel.py")), "--url", f"127.0.0.1:{port - 1}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert f"cannot read the metrics at 127.0.0.1:{port}: " in done.stderr
    assert "--metrics-url" in done.stderr
