r"""Asks over HTTP: the whole answer at once, or piece by piece with --stream. Needs nothing but Python.

The same with curl:

  curl -s http://127.0.0.1:8000/v2/models/paged_llm/generate \
    -d '{"text_input": "The capital of France is"}'
  curl -sN http://127.0.0.1:8000/v2/models/paged_llm/generate_stream \
    -d '{"text_input": "The capital of France is", "stream": true}'
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Iterator
from typing import Any

# How the demo model, like many, is told that a user speaks and that it is its turn to answer.
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

_BROKEN = "the connection ended before the answer was complete"


class ExampleError(Exception):
    """The server could not be reached or refused the request."""


def main() -> None:
    arguments = _parser().parse_args()
    pieces = list(_show(_answers(arguments)))
    if not any(pieces):
        raise ExampleError("the answer was empty")


def _show(answers: Iterator[dict[str, Any]]) -> Iterator[str]:
    for answer in answers:
        print(answer["text_output"], end="", flush=True)
        yield answer["text_output"]
    print()


def _answers(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The server's JSON answers; exactly one unless streamed."""
    sampling = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    body: dict[str, Any] = {
        "text_input": arguments.prompt if arguments.raw else CHAT.format(arguments.prompt),
        "stream": arguments.stream,
        # Comes with the end of the answer: how a stream that broke off is told from one that is complete.
        "return_finish_reason": True,
        "sampling_parameters": json.dumps(sampling),
    }
    if not arguments.stream:
        body["exclude_input_in_output"] = True
    path = f"/v2/models/{arguments.model}/generate{'_stream' if arguments.stream else ''}"
    connection = http.client.HTTPConnection(arguments.url, timeout=arguments.timeout)
    try:
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        except OSError as error:
            raise ExampleError(f"cannot connect to {arguments.url}: {error.strerror or error}") from error
        response = connection.getresponse()
        if response.status != 200:
            raise ExampleError(_reason(response))
        if not arguments.stream:
            yield json.loads(response.read())
            return
        finished = False
        # Server-sent events: each is a line "data: {...}" followed by an empty one.
        for line in response:
            if line.startswith(b"data:"):
                answer = _checked(json.loads(line.removeprefix(b"data:")))
                finished = finished or answer.get("finish_reason") in ("stop", "length")
                yield answer
        if not finished:
            raise ExampleError(_BROKEN)
    except (http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionError) as error:
        raise ExampleError(_BROKEN) from error
    finally:
        connection.close()


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """A stream that has begun can report an error only inside it."""
    if "error" in answer:
        raise ExampleError(answer["error"])
    return answer


def _reason(response: http.client.HTTPResponse) -> str:
    text = response.read().decode(errors="replace")
    try:
        # A refused stream is an event, too.
        return str(json.loads(text.removeprefix("data:"))["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status}: {text[:200]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="What is the capital of France?")
    parser.add_argument("--stream", action="store_true", help="print pieces as they arrive")
    parser.add_argument("--raw", action="store_true", help="send the prompt as it is, without chat markup (ChatML)")
    parser.add_argument("--url", default="127.0.0.1:8000", help="host:port (default: %(default)s)")
    parser.add_argument("--model", default="paged_llm", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=120.0, help="default: %(default)s s")
    return parser


if __name__ == "__main__":
    try:
        main()
    except (ExampleError, http.client.HTTPException, OSError, ValueError) as error:
        sys.exit(f"error: {' '.join(str(error).split()) or type(error).__name__}")
    except KeyboardInterrupt:
        sys.exit(130)
