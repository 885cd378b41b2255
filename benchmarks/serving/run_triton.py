"""This project's engine through Triton Server: a server of its own on free ports, requests over gRPC streaming.

All requests travel on one stream of one connection, read by the thread that needs the answers: the client shares the
machine's cores with the server, so it should cost as little as a client in Python can. Token ids in, token ids out, as
in the offline runner.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import grpc
from tritonclient.grpc.service_pb2 import ModelInferRequest
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from benchmarks.serving.drive import drive
from benchmarks.serving.protocol import Options, serve
from benchmarks.serving.run_paged import engine_arguments
from benchmarks.serving.stats import Timeline
from benchmarks.serving.workload import Item, Plan

ROOT = Path(__file__).resolve().parents[2]
_GRPC_URL = re.compile(r"^HTTP \S+  gRPC (\S+)  metrics", re.MULTILINE)
_READY_SECONDS = 180.0
_STOP_SECONDS = 60.0
_ID_BYTES = 4


class Server:
    """`paged-backend serve` on a repository with the engine model alone, on free ports.

    Args:
        arguments: what the model's `model.json` says.

    Attributes:
        pid: of the launcher, whose descendants the server and the model's process are.
    """

    def __init__(self, arguments: Mapping[str, object]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="paged-bench-")
        models, self._log = Path(self._folder.name, "models"), Path(self._folder.name, "log")
        shutil.copytree(ROOT / "model_repository" / "paged_llm", models / "paged_llm")
        (models / "paged_llm" / "1" / "model.json").write_text(json.dumps(arguments))
        ports = [f"--{service}-port=0" for service in ("http", "grpc", "metrics")]
        command = [sys.executable, "-m", "paged_backend.cli", "serve", *ports, "--model-repository", str(models)]
        variables = {key: value for key, value in os.environ.items() if key != "PAGED_BACKEND_MODEL"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self.pid = self._process.pid

    def wait_ready(self) -> str:
        """The gRPC address, once the model is served.

        Raises:
            RuntimeError: it ended, or took too long; the message has the end of its log.
        """
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            printed = self._log.read_text(errors="replace")
            if found := _GRPC_URL.search(printed):
                return found[1]
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server is not ready: {printed[-1500:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """As Ctrl-C does; a second time, or a server that does not listen, is ended at once."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


class TritonRunner:
    """See `protocol.Runner`."""

    def __init__(self, options: Options) -> None:
        self.versions = {name: version(name) for name in ("paged-backend", "nvidia-pytriton", "tritonclient")}
        self._requests: queue.SimpleQueue[ModelInferRequest | None] = queue.SimpleQueue()
        self._server = Server(engine_arguments(options))
        try:
            self._channel = grpc.insecure_channel(self._server.wait_ready())
        except BaseException:
            self._server.stop()
            raise
        self._answers = GRPCInferenceServiceStub(self._channel).ModelStreamInfer(iter(self._requests.get, None))

    def run(self, plan: Plan) -> list[Timeline]:
        if plan.prefix:
            drive(self, Plan([Item(0.0, plan.prefix, 1)], 1))
        return drive(self, plan)

    def extras(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        try:
            self._requests.put(None)
            self._channel.close()
        finally:
            self._server.stop()

    def add(self, index: int, item: Item) -> None:
        parameters = {"temperature": 0.0, "max_tokens": item.output_tokens, "ignore_eos": True}
        request = ModelInferRequest(model_name="paged_llm", id=str(index + 1))
        _add_tensor(
            request, "input_ids", "INT32", [len(item.prompt)], struct.pack(f"<{len(item.prompt)}i", *item.prompt)
        )
        _add_tensor(request, "stream", "BOOL", [1], b"\1")
        text = json.dumps(parameters).encode()
        _add_tensor(request, "sampling_parameters", "BYTES", [1], struct.pack("<I", len(text)) + text)
        request.outputs.add().name = "output_ids"
        self._requests.put(request)

    def step(self) -> Iterable[tuple[int, int]]:
        answer = next(self._answers)
        if answer.error_message:
            raise RuntimeError(answer.error_message)
        response = answer.infer_response
        return [(int(response.id) - 1, len(ids) // _ID_BYTES) for ids in response.raw_output_contents if ids]


def _add_tensor(request: ModelInferRequest, name: str, kind: str, shape: list[int], data: bytes) -> None:
    request.inputs.add(name=name, datatype=kind, shape=shape)
    request.raw_input_contents.append(data)


if __name__ == "__main__":
    serve(TritonRunner, __doc__)
