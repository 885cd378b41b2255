"""`serve`: start a Triton Server on a model repository, say when it is ready, stop it cleanly.

The order of events is all that lives here; each step is in a module of its own. Called by `paged_backend.cli`.
"""

from __future__ import annotations

import math
import os
import select
import shlex
import signal
import sys
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from paged_backend.model_source import resolve_model
from paged_backend.server import environment, locate, ports, probe, process, repository
from paged_backend.server.errors import LaunchError
from paged_backend.server.leftovers import sweep_python_env
from paged_backend.server.log import ServerLog
from paged_backend.server.progress import Progress
from paged_backend.server.scratch import scratch_folder
from paged_backend.server.stubs import StubWatch

_POLL_SECONDS = 0.2
# How often a running server's new stubs are looked for; what ends, the kernel says at once.
_SCAN_SECONDS = 1.0
# What the server may take to send the last answers, and to unload its models, once the engines have drained.
_ANSWER_SECONDS = 2.0
_UNLOAD_SECONDS = 8.0
# While models load nothing is in flight, and a server busy loading does not listen to signals.
_LOADING_GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class ServeOptions:
    """What `paged-backend serve` was asked for; ports of 0 mean any free one, None means the default.

    `drain_seconds` is how long requests in flight may go on after the first signal.
    """

    model_repository: str | None = None
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    model: str | None = None
    drain_seconds: float = 5.0
    verbose: bool = False
    server_arguments: tuple[str, ...] = ()


class StopRequests:
    """Counts SIGINT, SIGTERM and SIGHUP while it is entered; the first asks to stop, the second to hurry."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._count = 0
        self._asked = os.eventfd(0)

    def __enter__(self) -> StopRequests:
        # Explicit handlers also where a shell started this in the background with SIGINT ignored.
        self._previous = {number: signal.signal(number, self._note) for number in self._SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._asked)

    def wait(self, seconds: float, *others: int) -> bool:
        """Sleep up to `seconds`, or until one of `others`, file descriptors, is readable; whether a stop was asked for,
        which also ends the sleep. Only while this is entered."""
        poll = select.poll()
        for fd in (self._asked, *others):
            poll.register(fd, select.POLLIN)
        poll.poll(seconds * 1000)
        return self._count > 0

    def hurry(self) -> bool:
        """Whether a stop was asked for more than once."""
        return self._count > 1

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        os.eventfd_write(self._asked, 1)


def serve(options: ServeOptions) -> int:
    """Serve until a signal; returns the exit code: 0 after a clean stop, 1 if requests in flight were cut off.

    Raises:
        LaunchError: the server cannot start, or it or the process of a model ended by itself.
        ConfigError: `options.model` is no model.
    """
    if not 0 <= options.drain_seconds <= 86400:
        raise LaunchError(f"--drain-seconds {options.drain_seconds:g} is out of bounds: give 0 to 86400")
    models = repository.find_repository(options.model_repository)
    install = locate.find_server()
    model = None if options.model is None else resolve_model(options.model).path.resolve()
    endpoints = ports.choose_ports(options.host, options.http_port, options.grpc_port, options.metrics_port)
    prefix = process.new_region_prefix()
    with scratch_folder(prefix) as scratch, StopRequests() as stop:
        prepared = environment.prepare(install, scratch, model, options.drain_seconds)
        command = server_command(install, prepared, models, endpoints, prefix, options)
        log = ServerLog(echo=_say if options.verbose else None)
        server = process.ServerProcess(command, prepared.variables, prefix)
        stubs = StubWatch(server.pid)
        grace = _LOADING_GRACE_SECONDS
        ready, lost = False, 0
        try:
            log.follow(server.output)
            ready = _wait_until_ready(server, log, endpoints, stop, models, options)
            if ready:
                # Should the server or a stub die, nothing is left to wait for.
                grace = 0.0
                _supervise(server, log, stubs, stop)
                drained = _drain(stubs, endpoints, stop, options)
                lost = drained.lost
                grace = _UNLOAD_SECONDS if drained.complete else 2.0 * _exit_timeout(options)
            else:
                _announce_stop(0, options)
        finally:
            orderly = server.stop(grace, lambda: stop.hurry() or log.gave_up_waiting)
            stubs.close()
            log.join(1.0)
            # A server that was killed, this one or an earlier, has left its own.
            sweep_python_env()
    if stop.hurry():
        killed = "the server was killed"
    elif ready:
        killed = "the server was killed: a client keeps its connection open, or a model does not unload"
    else:
        killed = "the server was killed while it loaded its models"
    return _farewell("" if orderly and server.exit_code == 0 else killed, lost)


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
        f"--exit-timeout-secs={_exit_timeout(options)}",
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


def _supervise(server: process.ServerProcess, log: ServerLog, stubs: StubWatch, stop: StopRequests) -> None:
    """Wait for a stop request, passing on what the server complains about."""
    log.started(_say)
    while True:
        # The server goes on without noticing: its clients would wait for ever for what the model owes them.
        for stub in stubs.poll():
            raise LaunchError(
                f"the process of model {stub.model!r} {stub.ending}; ended the server, so that no client waits for it",
                log.explain(),
            )
        if stop.wait(_POLL_SECONDS if stubs.unsure else _SCAN_SECONDS, *server.pidfds, *stubs.pidfds):
            return
        if server.exit_code is not None:
            before = [
                f"the process of model {stub.model!r} {stub.ending}; then " for stub in stubs.dead_before_server()
            ]
            log.join(2.0)
            raise LaunchError(f"{''.join(before)}the server {_ending(server.exit_code)}", log.explain())


@dataclass(frozen=True)
class _Drained:
    """How draining ended: `complete` if no request is left, `lost` requests got an error for an answer, or none."""

    complete: bool
    lost: int


def _drain(stubs: StubWatch, endpoints: ports.Endpoints, stop: StopRequests, options: ServeOptions) -> _Drained:
    """Have the engine models end their requests while the server still runs, until they say that none is left.

    Before the server is told to stop: a stopping server refuses the next step of every ensemble.
    """
    address = endpoints.url(endpoints.metrics)
    before = now = probe.engine_requests(address)
    _announce_stop(before.live if before else 0, options)
    stubs.ask_to_drain()
    if before is None:
        return _Drained(complete=False, lost=0)
    deadline = time.monotonic() + options.drain_seconds + _ANSWER_SECONDS
    last = before
    while last.live and time.monotonic() < deadline and not stop.hurry():
        time.sleep(_POLL_SECONDS)
        now = probe.engine_requests(address)
        last = now or last
    # A look is not atomic: what has ended by the first that shows none live is surely counted by the next.
    failed = (probe.engine_requests(address) or last).failed
    return _Drained(complete=last.live == 0 and now is not None, lost=last.live + max(0, failed - before.failed))


def _exit_timeout(options: ServeOptions) -> int:
    """Seconds the server itself waits for requests in flight: of models that do not drain."""
    return math.ceil(options.drain_seconds + _UNLOAD_SECONDS)


def _announce_stop(live: int, options: ServeOptions) -> None:
    what = "stopping"
    if live:
        what += f": {_requests(live)} in flight may go on for {options.drain_seconds:g} s"
    _say(f"\n{what} (Ctrl-C again to kill)" if sys.stdout.isatty() else what)


def _farewell(killed: str, lost: int) -> int:
    """Say how it went; returns the exit code.

    Args:
        killed: why the server did not end by itself and content; "" if it did.
        lost: requests that got an error, or nothing, because of the stop.
    """
    why = f" ({killed})" if killed else ""
    if lost:
        _say(f"stopped, but {_requests(lost)} in flight {'was' if lost == 1 else 'were'} ended before the answer{why}")
        return 1
    _say(f"stopped{why}")
    return 0


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


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
        words = [_short(Path(sys.executable)), _short(script), repository.EXAMPLE_QUESTION]
        if (endpoints.reachable, endpoints.grpc) != ("127.0.0.1", 8001):
            words += ["--url", endpoints.url(endpoints.grpc)]
        return shlex.join(words)
    if (request := repository.example_request(models, ready)) is not None:
        model, body = request
        url = f"http://{endpoints.url(endpoints.http)}/v2/models/{urllib.parse.quote(model)}/generate"
        return shlex.join(["curl", "-s", url, "-d", body])
    return f"curl -s -X POST http://{endpoints.url(endpoints.http)}/v2/repository/index"


def _short(path: Path) -> str:
    """Relative to the working directory when below it, as one would type it. Symbolic links stay as they are."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _say(line: str) -> None:
    print(line, flush=True)
