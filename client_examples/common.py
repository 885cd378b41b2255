"""What the gRPC examples share: one request as an iterator of responses, arguments, and one-line errors.

Knows tritonclient and the names of the served tensors; nothing of the package that serves them.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

try:
    import numpy as np
    from tritonclient import grpc
    from tritonclient.utils import InferenceServerException, np_to_triton_dtype
except ModuleNotFoundError as missing:
    sys.exit(
        f"error: {missing.name} is not installed for {sys.executable}: run this example with "
        ".venv/bin/python, or pip install 'tritonclient[grpc,http]'"
    )

GRPC_URL = "127.0.0.1:8001"
PROMPT = "What is the capital of France?"
# How the demo model, like many, is told that a user speaks and that it is its turn to answer.
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class ExampleError(Exception):
    """The example did not get what it asked for; the message is for the person who ran it."""


class Request:
    """One streamed request on a connection of its own; iterate it once for the responses that carry data.

    A stream carries the answers to all requests made on it; with one request each, nothing needs sorting out.
    """

    def __init__(self, url: str, timeout: float, request_id: str = "") -> None:
        """`timeout` is how many seconds the next response may take; the `request_id` is a fresh one if not given."""
        self._timeout = timeout
        self._answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        self._client = grpc.InferenceServerClient(url)
        self.ended = False
        self.request_id = request_id or uuid.uuid4().hex

    def start(self, model: str, inputs: dict[str, Any], outputs: Sequence[str]) -> Request:
        """Send `inputs`, by tensor name, to `model`, asking for the tensors `outputs`."""
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))
        try:
            self._client.async_stream_infer(
                model,
                [as_tensor(name, value) for name, value in inputs.items()],
                outputs=[grpc.InferRequestedOutput(name) for name in outputs],
                request_id=self.request_id,
                # The last response may be empty: without this the client would not learn of it.
                enable_empty_final_response=True,
            )
        except InferenceServerException as refused:
            # A stream that broke before the request was sent: why is in what it delivered.
            raise self._next()[1] or refused from None
        return self

    def __iter__(self) -> Iterator[Any]:
        while True:
            result, error = self._next()
            if error is not None:
                self.ended = True
                raise error
            response = result.get_response()
            # Before the result is handed out: whoever takes it may never come back here.
            self.ended = response.parameters["triton_final_response"].bool_param
            if response.outputs:
                yield result
            if self.ended:
                return

    def is_for_ensemble(self, model: str) -> bool:
        """Whether `model` is a pipeline of models rather than one."""
        return bool(self._client.get_model_config(model).config.ensemble_scheduling.step)

    def _next(self) -> tuple[Any, Exception | None]:
        try:
            return self._answers.get(timeout=self._timeout)
        except queue.Empty:
            raise ExampleError(f"no response for {self._timeout:.0f} s") from None

    def close(self) -> None:
        """End the stream; the server is told to cancel a request that still runs.

        Never one that has ended: servers before 24.12 can lose count of it and then wait for it when they stop.
        """
        while not self.ended and not self._answers.empty():
            result, error = self._next()
            self.ended = error is not None or result.get_response().parameters["triton_final_response"].bool_param
        self._client.stop_stream(cancel_requests=not self.ended)
        self._client.close()


def stream_text(arguments: argparse.Namespace, prompt: str | None = None) -> Iterator[str]:
    """Send a text prompt and yield the pieces of the answer as they come."""
    inputs = text_inputs(prompt or arguments.prompt, arguments)
    with closing(Request(arguments.url, arguments.timeout)) as request:
        for result in request.start(arguments.model, inputs, ["text_output"]):
            yield from text_of(result)


def text_inputs(prompt: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The inputs of the text interface for a streamed answer."""
    return {
        "text_input": prompt if arguments.raw else CHAT.format(prompt),
        "stream": True,
        "sampling_parameters": json.dumps(sampling_parameters(arguments)),
    }


def sampling_parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the model is told about how to choose tokens."""
    return {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}


def text_of(result: Any) -> list[str]:
    """The text in a response: one string, or several with n > 1."""
    return [piece.decode() for piece in result.as_numpy("text_output").reshape(-1)]


def parser(description: str | None, model: str = "paged_llm", prompt: str | None = PROMPT) -> argparse.ArgumentParser:
    """The arguments all examples have; none is required. `prompt` None: the example asks its own."""
    made = argparse.ArgumentParser(description=description)
    if prompt is not None:
        made.add_argument("prompt", nargs="?", default=prompt, help="default: %(default)s")
    made.add_argument("--url", default=GRPC_URL, help="gRPC host:port (default: %(default)s)")
    made.add_argument("--model", default=model, help="default: %(default)s")
    made.add_argument("--raw", action="store_true", help="send the prompt as it is, without chat markup (ChatML)")
    made.add_argument("--max-tokens", type=int, default=64, help="default: %(default)s")
    made.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    made.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        help="seconds the next response may take (default: %(default)s)",
    )
    return made


def run(main: Callable[[], None]) -> None:
    """Run `main` and exit; any failure becomes one line and a non-zero exit code."""
    try:
        main()
    except (ExampleError, InferenceServerException) as error:
        message = error.message() if isinstance(error, InferenceServerException) else error
        sys.exit(f"error: {' '.join(str(message).split())}")
    except KeyboardInterrupt:
        sys.exit(130)


def as_tensor(name: str, value: Any) -> grpc.InferInput:
    """Scalars become tensors of one element; sequences of numbers are token ids."""
    if isinstance(value, str):
        data = np.array([value.encode()], dtype=np.object_)
    elif isinstance(value, bool):
        data = np.array([value], dtype=np.bool_)
    else:
        data = np.array(value, dtype=np.int32)
    tensor = grpc.InferInput(name, list(data.shape), np_to_triton_dtype(data.dtype))
    tensor.set_data_from_numpy(data)
    return tensor
