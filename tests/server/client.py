"""What the server tests share: a request as a `Call` with all its responses, HTTP, and the gauges.

Every `Call` has a gRPC stream of its own, as separate clients have. This module knows the served tensors
and tritonclient, and nothing of the package.
"""

from __future__ import annotations

import json
import queue
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

ROOT = Path(__file__).resolve().parents[2]
TEXT_MODELS = ("paged_llm", "paged_ensemble")
TIMEOUT = 120.0
GREEDY = {"temperature": 0}


def chat(question: str) -> str:
    """`question` as the demo model was trained to be asked."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class Answer:
    """Everything that came back for one request."""

    responses: list[dict[str, list]] = field(default_factory=list)
    finals: int = 0
    error: InferenceServerException | None = None
    errors: int = 0

    @property
    def texts(self) -> list[str]:
        """The text of each response."""
        return [value.decode() for r in self.responses for value in r.get("text_output", [])]

    @property
    def text(self) -> str:
        """All text, joined."""
        assert self.error is None, self.error
        return "".join(self.texts)

    def joined(self, name: str) -> list:
        """The values of an output tensor over all responses."""
        assert self.error is None, self.error
        return [value for response in self.responses for value in response.get(name, [])]


class Call:
    """One request on a connection of its own; starts at once.

    Args:
        url: the server's gRPC address.
        model: a model name.
        inputs: input tensors by name, as Python values or arrays.
        params: the `sampling_parameters` tensor; None: not sent.
        options: of tritonclient's `async_stream_infer`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        inputs: dict[str, Any],
        params: dict | None = None,
        *,
        outputs: tuple[str, ...] = (),
        empty_final: bool = True,
        **options: Any,
    ) -> None:
        self._events: queue.Queue = queue.Queue()
        self._client = grpc.InferenceServerClient(url)
        # Stamped on arrival: the test may look much later.
        self._client.start_stream(lambda result, error: self._events.put((result, error, time.monotonic())))
        self.times: list[float] = []
        self._answer = Answer()
        if params is not None:
            inputs = {**inputs, "sampling_parameters": json.dumps(params)}
        self._client.async_stream_infer(
            model,
            [_input(name, value) for name, value in inputs.items()],
            outputs=[grpc.InferRequestedOutput(name) for name in outputs] or None,
            enable_empty_final_response=empty_final,
            **options,
        )

    @property
    def ended(self) -> bool:
        """Whether the final response has been looked at."""
        return bool(self._answer.finals)

    def next(self, timeout: float = TIMEOUT) -> dict[str, list]:
        """The tensors of the next response.

        Raises:
            InferenceServerException: it is an error.
        """
        result, error, arrived = self._events.get(timeout=timeout)
        if error is not None:
            raise error
        self.times.append(arrived)
        response = result.get_response()
        tensors = {output.name: result.as_numpy(output.name).tolist() for output in response.outputs}
        if tensors:
            self._answer.responses.append(tensors)
        self._answer.finals += response.parameters["triton_final_response"].bool_param
        return tensors

    def wait(self, linger: float = 0.0) -> Answer:
        """All responses from the first on; `linger` seconds more for what must not come after the end."""
        try:
            while not self._answer.finals:
                self.next()
            while linger:
                self.next(linger)
        except InferenceServerException as error:
            self._answer.error = error
        except queue.Empty:
            assert self._answer.finals, "no final response came"
        # Only a real cancellation cancels: see `cancel`.
        self._client.stop_stream()
        self._client.close()
        return self._answer

    def drain(self) -> Answer:
        """Half-close and collect all that comes until the server ends the stream, which it does after the final."""
        self._client.stop_stream()
        while not self._events.empty():
            try:
                self.next(0)
            except InferenceServerException as error:
                self._answer.error = error
                self._answer.errors += 1
        self._client.close()
        return self._answer

    def cancel(self) -> None:
        """Go away without waiting for anything.

        Not for calls that have ended: releases of the server before 24.12 can crash when a cancellation meets the end
        of its request, and when a client asks for gRPC error codes in a stream, which is why no test here does.
        """
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


def ask(url: str, model: str, prompt: str, max_tokens: int = 8, *, stream: bool = True, **params: Any) -> str:
    """The text of a greedy answer."""
    inputs = {"text_input": prompt, "stream": stream}
    if not stream:
        inputs["exclude_input_in_output"] = True
    return Call(url, model, inputs, {**GREEDY, "max_tokens": max_tokens, **params}).wait().text


def post(url: str, model: str, endpoint: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and body of an HTTP generate or generate_stream request."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://{url}/v2/models/{model}/{endpoint}", data)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events(body: str) -> list[dict[str, Any]]:
    """The JSON objects of a generate_stream body."""
    return [json.loads(line[len("data: ") :]) for line in body.splitlines() if line.startswith("data: ")]


def gauges(metrics_url: str, model: str | None = None) -> dict[str, float]:
    """The gauges of an engine model (None: the first): `running`, `waiting`, `used`, `free` (cached or empty)."""
    text = urllib.request.urlopen(f"http://{metrics_url}/metrics", timeout=10).read().decode()
    patterns = {
        "running": r"^vllm:num_requests_running\{.*?\} (\S+)$",
        "waiting": r"^vllm:num_requests_waiting\{.*?\} (\S+)$",
        "used": r'^paged_kv_blocks\{.*?state="used".*?\} (\S+)$',
        "cached": r'^paged_kv_blocks\{.*?state="cached".*?\} (\S+)$',
        "empty": r'^paged_kv_blocks\{.*?state="empty".*?\} (\S+)$',
    }
    text = "\n".join(line for line in text.splitlines() if model is None or f'model="{model}"' in line)
    found = {name: float(re.search(pattern, text, re.MULTILINE)[1]) for name, pattern in patterns.items()}
    return {**found, "free": found["cached"] + found["empty"]}


def wait_for(metrics_url: str, model: str | None = None, timeout: float = 30.0, **wanted: float) -> float:
    """Wait until the gauges have the wanted values; returns how many seconds it took."""
    began = time.monotonic()
    while True:
        now = gauges(metrics_url, model)
        if all(now[name] == value for name, value in wanted.items()):
            return time.monotonic() - began
        assert time.monotonic() - began < timeout, f"{now} never became {wanted}"
        time.sleep(0.02)


def _input(name: str, value: Any) -> grpc.InferInput:
    if isinstance(value, str):
        value = np.array([value.encode()], dtype=np.object_)
    elif isinstance(value, bytes):
        value = np.array([value], dtype=np.object_)
    elif isinstance(value, bool):
        value = np.array([value])
    elif isinstance(value, list):
        value = np.array(value, dtype=np.int32)
    types = {
        "object": "BYTES",
        "bool": "BOOL",
        "int32": "INT32",
        "int64": "INT64",
        "uint64": "UINT64",
        "float32": "FP32",
    }
    tensor = grpc.InferInput(name, list(value.shape), types[str(value.dtype)])
    tensor.set_data_from_numpy(value)
    return tensor
