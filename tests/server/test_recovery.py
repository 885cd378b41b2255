"""A killed engine under plain `tritonserver`: clients hang, and reloading the model brings it back (deployment.md)."""

from __future__ import annotations

import json
import queue
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from server.client import GREEDY, Call

from paged_backend.server import environment, locate, probe, process
from paged_backend.server.log import ServerLog

pytestmark = pytest.mark.server

IDS = {"input_ids": [1, 5, 7], "stream": True}


class Plain(NamedTuple):
    """A server without the launcher, its models loaded and unloaded by request."""

    process: process.ServerProcess
    http_port: int
    grpc_url: str

    def repository(self, action: str) -> None:
        """`load` or `unload` the model."""
        url = f"http://127.0.0.1:{self.http_port}/v2/repository/models/llm/{action}"
        urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=60).read()

    def stub(self) -> psutil.Process:
        """The model's process; a killed one stays a zombie, which the server does not collect."""
        children = psutil.Process(self.process.pid).children()
        (found,) = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        return found


@pytest.fixture
def plain(tmp_path: Path, tiny_llama: Path) -> Iterator[Plain]:
    """`llm`, a tiny random model, under explicit model control."""
    version = tmp_path / "models" / "llm" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "paged"\ninstance_group [{ kind: KIND_MODEL }]\n')
    arguments = {"model": str(tiny_llama), "skip_tokenizer_init": True, "num_kv_blocks": 64, "num_threads": 1}
    (version / "model.json").write_text(json.dumps(arguments))
    install = locate.find_server()
    prepared = environment.prepare(install, tmp_path, None)
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        http_port, grpc_port = first.getsockname()[1], second.getsockname()[1]
    prefix = process.new_region_prefix()
    options = [
        *(f"--model-repository={tmp_path / 'models'}", "--model-control-mode=explicit", "--load-model=llm"),
        *(f"--backend-directory={prepared.backend_directory}", "--allow-metrics=false"),
        *("--http-address=127.0.0.1", f"--http-port={http_port}", "--grpc-address=127.0.0.1"),
        *(f"--grpc-port={grpc_port}", f"--backend-config=python,shm-region-prefix-name={prefix}"),
    ]
    server = process.ServerProcess([str(install.binary), *options], prepared.variables, prefix)
    log = ServerLog()
    log.follow(server.output)
    try:
        deadline = time.monotonic() + 60
        while probe.ready_models("127.0.0.1", http_port) is None:
            assert server.exit_code is None, log.explain()
            assert time.monotonic() < deadline, log.explain()
            time.sleep(0.1)
        yield Plain(server, http_port, f"127.0.0.1:{grpc_port}")
    finally:
        # At once: a request that hangs would delay an orderly end.
        server.stop(grace=0)


def test_a_killed_engine_is_brought_back_by_reloading(plain: Plain) -> None:
    alone = Call(plain.grpc_url, "llm", IDS, {**GREEDY, "max_tokens": 4}).wait().joined("output_ids")
    hanging = Call(plain.grpc_url, "llm", IDS, {**GREEDY, "max_tokens": 240, "ignore_eos": True})
    hanging.next()
    stub = plain.stub()
    stub.kill()
    # Nothing but what was on its way reaches the client any more.
    with pytest.raises(queue.Empty):
        _ = [hanging.next(timeout=1.5) for _ in range(240)]
    error = Call(plain.grpc_url, "llm", IDS, {**GREEDY, "max_tokens": 4}).wait().error
    assert error is not None
    assert "is not healthy" in error.message()
    plain.repository("unload")
    plain.repository("load")
    assert plain.stub().pid != stub.pid
    assert Call(plain.grpc_url, "llm", IDS, {**GREEDY, "max_tokens": 4}).wait().joined("output_ids") == alone
    hanging.cancel()
