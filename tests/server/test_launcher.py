"""The launcher with a real Triton Server and tiny models, and each of its one-line errors."""

from __future__ import annotations

import http.client
import importlib.metadata
import importlib.util
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paged_backend import cli
from paged_backend.server import environment, locate, ports, process, scratch
from paged_backend.server.errors import LaunchError
from paged_backend.server.log import ServerLog
from paged_backend.server.progress import Progress

CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [1] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [-1] } ]
instance_group [ { kind: KIND_MODEL count: 1 } ]
"""
# Answers with the words of its input, one response each; $NAME becomes the environment variable, ? sys.prefix.
MODEL = """
import os, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pass  # initialize

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            for word in text.split():
                word = os.environ.get(word[1:], "unset") if word[0] == "$" else word
                word = sys.prefix if word == "?" else word
                tensor = pb_utils.Tensor("text_output", np.array([word.encode()], dtype=object))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        pass  # finalize
"""
Launch = Callable[..., Any]


def make_repository(folder: Path, initialize: str = "pass", finalize: str = "pass") -> Path:
    model = folder / "repository" / "tiny"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(CONFIG)
    source = MODEL.replace("pass  # initialize", initialize).replace("pass  # finalize", finalize)
    (model / "1" / "model.py").write_text(source)
    return model.parent


def ask(http_url: str, text: str) -> list[str]:
    connection = http.client.HTTPConnection(http_url, timeout=20)
    body = json.dumps({"text_input": text})
    connection.request("POST", "/v2/models/tiny/generate_stream", body)
    lines = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    return [event["text_output"] for event in events]


# --- with a real server ---


@pytest.mark.server
def test_serves_until_ctrl_c_and_leaves_nothing(tmp_path: Path, launch: Launch) -> None:
    launched = launch(make_repository(tmp_path)).wait_ready()
    assert "loading tiny (" in launched.output
    assert "ready after" in launched.output
    assert ": tiny\n" in launched.output
    assert ask(launched.http_url, "one two three") == ["one", "two", "three"]
    # The stub sees the packages of this very environment.
    assert ask(launched.http_url, "?") == [sys.prefix]
    assert len(launched.family()) == 2
    for url in (launched.http_url, launched.grpc_url, launched.metrics_url):
        assert url.startswith("127.0.0.1:")

    assert launched.stop() == 0
    assert launched.output.endswith("stopping\nstopped\n")
    launched.assert_gone()
    launched.assert_no_files()


@pytest.mark.server
def test_passes_the_model_on_as_an_absolute_path(tmp_path: Path, launch: Launch) -> None:
    weights = tmp_path / "weights.gguf"
    weights.touch()
    relative = os.path.relpath(weights)
    launched = launch(make_repository(tmp_path), f"--model={relative}").wait_ready()
    assert ask(launched.http_url, "$PAGED_BACKEND_MODEL") == [str(weights)]


@pytest.mark.server
def test_a_model_that_fails_is_explained_in_few_lines(tmp_path: Path, launch: Launch) -> None:
    launched = launch(make_repository(tmp_path, initialize="import no_such_module"))
    assert launched.wait() == 2
    lines = launched.output.splitlines()
    error = lines.index("paged-backend: error: the server exited with code 1 before it was ready")
    assert lines[error + 1] == "  tiny: ModuleNotFoundError: No module named 'no_such_module'"
    assert lines[error + 2].endswith("model.py(8): initialize")
    assert len(lines) < 10
    assert "Traceback" not in launched.output
    launched.assert_gone()
    launched.assert_no_files()


@pytest.mark.server
def test_an_argument_the_server_does_not_know_is_named(tmp_path: Path, launch: Launch) -> None:
    launched = launch(make_repository(tmp_path), "--", "--bogus-flag")
    assert launched.wait() == 2
    assert "unrecognized option '--bogus-flag'" in launched.output
    assert len(launched.output.splitlines()) < 5


@pytest.mark.server
def test_ctrl_c_while_loading(tmp_path: Path, launch: Launch) -> None:
    launched = launch(make_repository(tmp_path, initialize="time.sleep(120)"))
    launched.wait_for("loading tiny")
    begun = time.monotonic()
    assert launched.stop() == 0
    assert time.monotonic() - begun < 15
    assert "client" not in launched.output
    launched.assert_gone()
    launched.assert_no_files()


@pytest.mark.server
def test_a_second_ctrl_c_kills_a_server_that_hangs(tmp_path: Path, launch: Launch) -> None:
    launched = launch(make_repository(tmp_path, finalize="time.sleep(120)")).wait_ready()
    begun = time.monotonic()
    launched.signal(signal.SIGINT)
    launched.wait_for("stopping")
    time.sleep(1.0)
    launched.signal(signal.SIGINT)
    assert launched.wait(10) == 0
    assert "stopped (the server was killed)" in launched.output
    assert time.monotonic() - begun < 10
    launched.assert_gone()
    launched.assert_no_files()


@pytest.mark.server
def test_a_server_that_dies_is_reported_and_cleaned_up(tmp_path: Path, launch: Launch) -> None:
    launched = launch(make_repository(tmp_path)).wait_ready()
    launched.family()[0].kill()
    assert launched.wait(20) == 2
    assert "paged-backend: error: the server was killed by signal 9" in launched.output
    launched.assert_gone()
    launched.assert_no_files()


@pytest.mark.server
def test_the_server_ends_with_a_killed_launcher(tmp_path: Path, launch: Launch) -> None:
    launched = launch(make_repository(tmp_path)).wait_ready()
    launched.signal(signal.SIGKILL)
    launched.wait()
    launched.assert_gone(timeout=20)


@pytest.mark.server
def test_verbose_and_server_arguments(tmp_path: Path, launch: Launch) -> None:
    launched = launch(make_repository(tmp_path), "--verbose", "--", "--allow-metrics=false").wait_ready()
    assert "Started HTTPService" in launched.output
    assert "Started Metrics Service" not in launched.output


# --- errors that need no server ---


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of standard error of a command that fails."""
    assert cli.main(["serve", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("paged-backend: error: ")
    return lines[0]


@pytest.mark.parametrize(("service", "name"), [("http", "HTTP"), ("grpc", "gRPC"), ("metrics", "metrics")])
def test_port_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str], service: str, name: str) -> None:
    flags = {f"--{one}-port": "0" for one in ("http", "grpc", "metrics")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags[f"--{service}-port"] = port = str(taken.getsockname()[1])
        arguments = [word for pair in flags.items() for word in pair]
        line = run_cli(capsys, f"--model-repository={make_repository(tmp_path)}", *arguments)
    assert f"{name} port {port} on 127.0.0.1 is in use" in line
    assert f"another with --{service}-port" in line


def test_port_zero_picks_different_ports_and_no_named_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    chosen = ports.choose_ports("127.0.0.1", 0, 0, free)
    assert chosen.metrics == free
    assert len({chosen.http, chosen.grpc, chosen.metrics}) == 3
    # Released again, for the server.
    socket.create_server(("127.0.0.1", chosen.http)).close()


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("127.0.0.1", 70000, "--http-port 70000 is not a port"),
        ("192.0.2.1", 0, "cannot listen on --host 192.0.2.1"),
    ],
)
def test_impossible_addresses(host: str, port: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        ports.choose_ports(host, port, 0, 0)


def test_the_same_port_twice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    with pytest.raises(LaunchError, match=f"gRPC port {free} .* --grpc-port"):
        ports.choose_ports("127.0.0.1", free, free, 0)


def test_repository_missing_or_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = run_cli(capsys, f"--model-repository={tmp_path / 'none'}")
    assert "is not a directory: check --model-repository" in line
    line = run_cli(capsys, f"--model-repository={tmp_path}")
    assert "holds no model" in line


def test_model_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none"
    line = run_cli(capsys, f"--model-repository={make_repository(tmp_path)}", f"--model={missing}")
    assert str(missing) in line
    assert "does not exist" in line


def test_an_empty_model_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = run_cli(capsys, f"--model-repository={make_repository(tmp_path)}", "--model", "")
    assert "`model` must name a directory, a .gguf file or a model id" in line


def test_drain_seconds_out_of_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = run_cli(capsys, f"--model-repository={make_repository(tmp_path)}", "--drain-seconds=-1")
    assert "--drain-seconds -1" in line


def test_no_server_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(locate, "_FIRST_WITHOUT_NUMPY_1", (4, 0))
    with pytest.raises(LaunchError, match=r"pip install 'paged-backend\[server\]'"):
        locate.find_server()
    monkeypatch.setattr(locate, "_FIRST_WITHOUT_NUMPY_1", (3, 0))
    with pytest.raises(LaunchError, match=r"use Python 3\.10, 3\.11 or 3\.12"):
        locate.find_server()


def fake_server_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, stub: bytes | None) -> Path:
    binary = folder / "opt" / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    python = folder / "opt" / "backends" / "python"
    python.mkdir(parents=True)
    if stub is not None:
        (python / "triton_python_backend_stub").write_bytes(stub)
    monkeypatch.setenv("PATH", str(binary.parent))
    return binary


def test_a_server_on_path_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    soname = f"\0libpython3.{sys.version_info.minor}.so.1.0\0".encode()
    binary = fake_server_on_path(tmp_path, monkeypatch, soname)
    install = locate.find_server()
    assert install.binary == binary
    assert not install.bundled
    prepared = environment.prepare(install, tmp_path, None, base={"PATH": "/usr/bin"})
    assert prepared.backend_directory == tmp_path / "opt" / "backends"
    assert "LD_LIBRARY_PATH" not in prepared.variables


@pytest.mark.parametrize(
    ("stub", "message"),
    [
        (None, "has no python backend"),
        (b"\0libpython3.99.so.1.0\0", r"runs Python 3\.99.* install paged-backend into a Python 3\.99"),
    ],
)
def test_a_server_on_path_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stub: bytes | None, message: str
) -> None:
    fake_server_on_path(tmp_path, monkeypatch, stub)
    with pytest.raises(LaunchError, match=message):
        locate.find_server()


def fake_bundle(folder: Path, monkeypatch: pytest.MonkeyPatch, stub_version: str) -> None:
    stub = folder / "pytriton" / "tritonserver" / "python_backend_stubs" / stub_version
    stub.mkdir(parents=True)
    soname = f"\0libpython{stub_version}.missing.so.1.0\0".encode()
    (stub / "triton_python_backend_stub").write_bytes(soname)
    (folder / "pytriton" / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location("pytriton", folder / "pytriton" / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("PATH", "")


def test_no_stub_for_this_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_bundle(tmp_path, monkeypatch, "3.2")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(LaunchError, match=rf"no stub for Python {version} \(it has 3.2\)"):
        locate.find_server()


def test_no_libpython(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    fake_bundle(tmp_path, monkeypatch, version)
    install = locate.find_server()
    assert install.bundled
    with pytest.raises(LaunchError, match=rf"no shared library libpython{version}.missing.so.1.0"):
        environment.find_libpython(install)


def test_numpy_2_with_the_bundled_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_bundle(tmp_path, monkeypatch, f"{sys.version_info.major}.{sys.version_info.minor}")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.4.0")
    with pytest.raises(LaunchError, match=r"numpy 2\.4\.0: pip install 'numpy<2'"):
        environment.prepare(locate.find_server(), tmp_path, None)


def test_a_command_that_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot start .*none: No such file"):
        process.ServerProcess([str(tmp_path / "none")], {}, process.new_region_prefix())


# --- small parts ---


def test_stop_reaches_grandchildren_and_sweeps_only_its_own_regions() -> None:
    prefix = process.new_region_prefix()
    mine = Path("/dev/shm") / f"{prefix}region"
    other = Path("/dev/shm") / f"other_{prefix}region"
    mine.touch()
    other.touch()
    try:
        server = process.ServerProcess(
            ["/bin/sh", "-c", "trap '' INT; sleep 300 & echo $!; wait"], dict(os.environ), prefix
        )
        grandchild = psutil.Process(int(server.output.readline()))
        assert server.stop(grace=0.2) is False
        assert server.exit_code == -signal.SIGKILL
        assert not grandchild.is_running()
        assert not mine.exists()
        assert other.exists()
        server.stop(grace=0.2)
    finally:
        mine.unlink(missing_ok=True)
        other.unlink()


LOG = r'''E1129 16:36:42.057996 3585 server.cc:241] "CudaDriverHelper has not been initialized."
I1129 16:36:42.059800 3585 model_lifecycle.cc:472] "loading: tiny:1"
I1129 16:36:42.059801 3585 model_lifecycle.cc:472] "loading: other:1"
I1129 16:36:42.060000 3594 model.py:7] "weights 3 of 9"
I1129 16:36:42.061000 3585 model_lifecycle.cc:839] "successfully loaded 'other'"'''
FAILURE = (
    r"""E1129 16:36:42.113824 3585 model_lifecycle.cc:642] "failed to load 'tiny' version 1: """
    r"""Internal: ValueError: dtype\n\nAt:\n  /repo/tiny/1/model.py(2): initialize\n"""
    r'''  <frozen importlib._bootstrap>(241): _call_with_frames_removed\n"'''
)


def test_log_knows_what_loads_and_why_it_failed() -> None:
    log = ServerLog()
    for line in LOG.splitlines():
        log.feed(line)
    assert log.loading == ["tiny"]
    assert log.note == "weights 3 of 9"
    assert log.explain() == []
    log.feed(FAILURE)
    assert log.loading == []
    assert log.explain() == ["tiny: ValueError: dtype", "  at /repo/tiny/1/model.py(2): initialize"]


def test_log_says_the_same_mistake_once() -> None:
    log = ServerLog()
    said = r"Internal: TritonModelException: engine argument `x` is not known\n\nAt:\n  /repo/model.py(2): initialize"
    for model in ("tokenizer", "paged_llm"):
        log.feed(f"E1129 16:36:42.1 3585 model_lifecycle.cc:642] \"failed to load '{model}' version 1: {said}\"")
    assert log.explain() == ["tokenizer, paged_llm: engine argument `x` is not known"]


def test_log_forgets_the_start_once_ready() -> None:
    log = ServerLog()
    log.feed('E1129 16:36:42.1 1 pinned_memory_manager.cc:1] "no pinned memory"')
    log.started(lambda line: None)
    assert log.explain() == []
    log.feed('E1129 16:36:42.1 1 a.cc:1] "the end"')
    assert log.explain() == ["the end"]


def test_log_passes_on_only_problems_once_ready() -> None:
    seen: list[str] = []
    log = ServerLog()
    log.feed('W1129 16:36:42.1 1 a.cc:1] "before"')
    log.started(seen.append)
    wanted = ['W1129 16:36:42.1 1 a.cc:1] "after"', "printed by a model"]
    for line in [*wanted, 'I1129 16:36:42.1 1 a.cc:1] "quiet"', "", "Signal (2) received."]:
        log.feed(line)
    assert seen == wanted


_HOLD = """
import sys, time
from paged_backend.server.scratch import scratch_folder
with scratch_folder(sys.argv[1]) as folder:
    print(folder, flush=True)
    time.sleep(300)
"""


def test_the_next_launcher_sweeps_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = process.new_region_prefix()
    region = Path("/dev/shm") / f"{prefix}region"
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", _HOLD, prefix]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    somebody_elses = tmp_path / "paged-backend-notes"
    somebody_elses.mkdir()
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        folder = Path(launcher.stdout.readline().strip())
        assert f"-{launcher.pid}-" in folder.name
        region.touch()
        try:
            assert scratch.sweep() == [], "its launcher lives"
            launcher.kill()
            launcher.wait()
            assert folder.is_dir()
            with scratch.scratch_folder(process.new_region_prefix()) as mine:
                assert mine.is_dir()
                assert not folder.exists()
                assert not region.exists()
            assert not mine.exists()
        finally:
            launcher.kill()
            region.unlink(missing_ok=True)
    assert somebody_elses.is_dir()


def test_progress_draws_one_line_on_a_terminal_and_few_elsewhere() -> None:
    terminal, plain = io.StringIO(), io.StringIO()
    drawn, printed = Progress(terminal, redraw=True), Progress(plain, redraw=False)
    for display in (drawn, printed):
        for text in ("loading a, b", "loading a, b", "loading b"):
            display.show(text)
        display.clear()
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert plain.getvalue() == "loading a, b (0 s)\nloading b (0 s)\n"


def test_the_launcher_imports_no_torch() -> None:
    code = "import sys, paged_backend.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
