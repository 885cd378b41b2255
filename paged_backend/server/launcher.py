"""`serve`: start a Triton Server on a model repository, say when it is ready, stop it cleanly.

The order of events is all that lives here; each step is in a module of its own. Called by `paged_backend.cli`.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from paged_backend.model_source import resolve_model
from paged_backend.server import environment, locate, ports, probe, process, repository
from paged_backend.server.errors import LaunchError
from paged_backend.server.log import ServerLog
from paged_backend.server.progress import Progress

_POLL_SECONDS = 0.2
# Requests in flight may finish for this long after Ctrl-C; the margin is for the models' own clean-up.
_EXIT_TIMEOUT_SECONDS = 20
_STOP_GRACE_SECONDS = _EXIT_TIMEOUT_SECONDS + 10.0
# While models load nothing is in flight, and a server busy loading does not listen to signals.
_LOADING_GRACE_SECONDS = 3.0
_QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class ServeOptions:
    """What `paged-backend serve` was asked for; ports of 0 mean any free one, None means the default."""

    model_repository: str | None = None
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    model: str | None = None
    verbose: bool = False
    server_arguments: tuple[str, ...] = ()


class StopRequests:
    """Counts SIGINT, SIGTERM and SIGHUP while it is entered; the first asks to stop, the second to hurry."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._count = 0
        self._any = threading.Event()

    def __enter__(self) -> StopRequests:
        # Explicit handlers also where a shell started this in the background with SIGINT ignored.
        self._previous = {number: signal.signal(number, self._note) for number in self._SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        """Sleep up to `seconds`; True as soon as a stop was asked for."""
        return self._any.wait(seconds)

    def hurry(self) -> bool:
        """Whether a stop was asked for more than once."""
        return self._count > 1

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        self._any.set()


def serve(options: ServeOptions) -> int:
    """Serve until a signal; returns the exit code 0 after a clean stop.

    Raises:
        LaunchError: the server cannot start, or ended by itself.
        ConfigError: `options.model` is no model.
    """
    models = repository.find_repository(options.model_repository)
    install = locate.find_server()
    model = resolve_model(options.model).path.resolve() if options.model else None
    endpoints = ports.choose_ports(options.host, options.http_port, options.grpc_port, options.metrics_port)
    prefix = process.new_region_prefix()
    with tempfile.TemporaryDirectory(prefix="paged-backend-") as scratch, StopRequests() as stop:
        prepared = environment.prepare(install, Path(scratch), model)
        command = server_command(install, prepared, models, endpoints, prefix, options)
        log = ServerLog(echo=_say if options.verbose else None)
        server = process.ServerProcess(command, prepared.variables, prefix)
        grace = _LOADING_GRACE_SECONDS
        try:
            log.follow(server.output)
            if _wait_until_ready(server, log, endpoints, stop, models, options):
                grace = _STOP_GRACE_SECONDS
                _supervise(server, log, stop)
            _say("\nstopping (Ctrl-C again to kill)" if sys.stdout.isatty() else "stopping")
        finally:
            orderly = server.stop(grace, stop.hurry)
            log.join(1.0)
    _say("stopped" if orderly else "stopped (the server was killed)")
    return 0


def server_command(
    install: locate.ServerInstall,
    prepared: environment.ServerEnvironment,
    models: Path,
    endpoints: ports.Endpoints,
    region_prefix: str,
    options: ServeOptions,
) -> list[str]:
    """The command line of the server; `options.server_arguments` come last and win."""
    return [
        str(install.binary),
        f"--model-repository={models}",
        f"--backend-directory={prepared.backend_directory}",
        f"--backend-config=python,shm-region-prefix-name={region_prefix}",
        f"--exit-timeout-secs={_EXIT_TIMEOUT_SECONDS}",
        *(f"--{service}-address={endpoints.host}" for service in ("http", "grpc", "metrics")),
        f"--http-port={endpoints.http}",
        f"--grpc-port={endpoints.grpc}",
        f"--metrics-port={endpoints.metrics}",
        *options.server_arguments,
    ]


def _wait_until_ready(
    server: process.ServerProcess,
    log: ServerLog,
    endpoints: ports.Endpoints,
    stop: StopRequests,
    models: Path,
    options: ServeOptions,
) -> bool:
    """True once everything answers (and says so); False when a stop was asked for before."""
    progress = Progress(redraw=False if options.verbose else None)
    progress.show(f"starting Triton Server on {models}")
    try:
        while not stop.wait(_POLL_SECONDS):
            if server.exit_code is not None:
                log.join(2.0)
                progress.clear()
                raise LaunchError(f"the server {_ending(server.exit_code)} before it was ready", log.explain())
            ready = probe.ready_models(endpoints.reachable, endpoints.http)
            if ready is not None:
                progress.clear()
                _announce(ready, endpoints, models, progress.elapsed)
                return True
            if loading := log.loading:
                note = f": {log.note}" if log.note else ""
                progress.show(f"loading {', '.join(loading)}{note}")
        return False
    finally:
        progress.clear()


def _supervise(server: process.ServerProcess, log: ServerLog, stop: StopRequests) -> None:
    """Wait for a stop request, passing on what the server complains about."""
    log.echo_problems(_say)
    while not stop.wait(_POLL_SECONDS):
        if server.exit_code is not None:
            log.join(2.0)
            raise LaunchError(f"the server {_ending(server.exit_code)}", log.explain())


def _ending(exit_code: int) -> str:
    return f"exited with code {exit_code}" if exit_code >= 0 else f"was killed by signal {-exit_code}"


def _announce(ready: list[str], endpoints: ports.Endpoints, models: Path, seconds: float) -> None:
    _say(f"ready after {seconds:.0f} s: {', '.join(ready) or 'no model'}")
    _say(
        f"HTTP {endpoints.url(endpoints.http)}  gRPC {endpoints.url(endpoints.grpc)}  "
        f"metrics {endpoints.url(endpoints.metrics)}/metrics  (Ctrl-C stops)"
    )
    _say(f"try: {_example(ready, endpoints, models)}")


def _example(ready: list[str], endpoints: ports.Endpoints, models: Path) -> str:
    """One command that shows the server at work."""
    script = repository.example_client(models)
    if script is not None and "paged_llm" in ready:
        words = [_short(Path(sys.executable)), _short(script), _QUESTION]
        if (endpoints.reachable, endpoints.grpc) != ("127.0.0.1", 8001):
            words += ["--url", endpoints.url(endpoints.grpc)]
        return shlex.join(words)
    return f"curl -s -X POST http://{endpoints.url(endpoints.http)}/v2/repository/index"


def _short(path: Path) -> str:
    """Relative to the working directory when below it, as one would type it. Symbolic links stay as they are."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _say(line: str) -> None:
    print(line, flush=True)
