"""The `paged-backend` command: parses arguments, prints errors in one line, leaves the work to others.

Exit codes: 0 after a clean stop, 1 after one that cut off requests, 2 for a mistake in arguments or environment and for
a server that cannot run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paged_backend.bench import add_bench
from paged_backend.doctor.arguments import add_arguments_page
from paged_backend.doctor.command import add_doctor
from paged_backend.errors import PagedBackendError
from paged_backend.model_source import DEMO_MODEL
from paged_backend.monitor.top import top
from paged_backend.server.errors import LaunchError
from paged_backend.server.install import BACKEND_NAME, install_backend
from paged_backend.server.launcher import ServeOptions, serve

PROGRAM = "paged-backend"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (default: the process's own); returns the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except PagedBackendError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        if isinstance(error, LaunchError):
            for line in error.details:
                print(f"  {line}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output is gone; a second failure at interpreter exit would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Serve language models with a paged KV cache on Triton Server."
    )
    version = importlib.metadata.version(PROGRAM)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {version}")
    commands = parser.add_subparsers(required=True, metavar="command")
    serve_parser = commands.add_parser(
        "serve",
        help="start a Triton Server on a model repository",
        description="Start a Triton Server (the one on PATH, else the one in nvidia-pytriton) on a "
        "model repository, say when it is ready, and stop it on Ctrl-C.",
    )
    _add_serve(serve_parser)
    _add_install(commands)
    _add_top(commands)
    add_doctor(commands)
    add_arguments_page(commands)
    add_bench(commands)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-repository",
        metavar="DIR",
        help="what to serve (default: model_repository/ of this checkout)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="directory with config.json and *.safetensors, .gguf file, hub id, or the demo model's name "
        f"{DEMO_MODEL!r}; replaces the one named in the repository",
    )
    parser.add_argument("--host", default=ServeOptions.host, help="default: %(default)s")
    for service in ("http", "grpc", "metrics"):
        parser.add_argument(
            f"--{service}-port",
            type=int,
            default=getattr(ServeOptions, f"{service}_port"),
            metavar="PORT",
            help="default: %(default)s; 0 picks a free one",
        )
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=ServeOptions.drain_seconds,
        metavar="S",
        help="how long requests in flight may go on after Ctrl-C or SIGTERM (default: %(default)s)",
    )
    parser.add_argument("--verbose", action="store_true", help="pass the server's whole log on")
    parser.add_argument(
        "server_arguments",
        nargs="*",
        metavar="-- ARG",
        help="arguments for tritonserver itself, such as -- --log-verbose=1",
    )
    parser.set_defaults(run=_serve)


def _add_install(commands: Any) -> None:
    parser = commands.add_parser(
        "install-backend",
        help=f'make backend: "{BACKEND_NAME}" known to a Triton Server',
        description=f"Writes DIR/{BACKEND_NAME}/model.py, so that a model needs only a config.pbtxt with "
        f'backend: "{BACKEND_NAME}" and a <version>/model.json.',
    )
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=Path("/opt/tritonserver/backends"),
        metavar="DIR",
        help="the server's backend directory (default: %(default)s)",
    )
    parser.set_defaults(run=_install)


def _install(parsed: argparse.Namespace) -> int:
    print(f"installed {install_backend(parsed.directory)}")
    return 0


def _add_top(commands: Any) -> None:
    parser = commands.add_parser(
        "top", help="watch a running server", description="A live view of a running server, from its metrics."
    )
    parser.add_argument("--metrics-url", default="127.0.0.1:8002", metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="default: %(default)s s")
    parser.add_argument("--once", action="store_true", help="print one view after an interval, and end")
    parser.set_defaults(run=lambda parsed: top(parsed.metrics_url, parsed.interval, once=parsed.once))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("must be 0.1 to 3600 seconds")
    return seconds


def _serve(parsed: argparse.Namespace) -> int:
    return serve(
        ServeOptions(
            model_repository=parsed.model_repository,
            host=parsed.host,
            http_port=parsed.http_port,
            grpc_port=parsed.grpc_port,
            metrics_port=parsed.metrics_port,
            model=parsed.model,
            drain_seconds=parsed.drain_seconds,
            verbose=parsed.verbose,
            server_arguments=tuple(parsed.server_arguments),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
