"""Which checks `paged-backend doctor` makes. Called by `paged_backend.cli`."""

from __future__ import annotations

import argparse
from typing import Any

from paged_backend.doctor import live, machine, models
from paged_backend.doctor.report import Check, examine, tell

_HTTP = "127.0.0.1:8000"
_METRICS = "127.0.0.1:8002"


def add_doctor(commands: Any) -> None:
    """Add the command to the subparsers of the program."""
    parser = commands.add_parser(
        "doctor",
        help="check a deployment and say what to change",
        description="Checks the server, its Python, shared memory, GPU and models without starting anything; with "
        "--live a running server instead. Exit code 1 if something will not work.",
    )
    parser.add_argument("--model-repository", metavar="DIR", help="default: model_repository/ of this checkout")
    parser.add_argument("--model", help="what `serve --model` would be given")
    parser.add_argument("--live", action="store_true", help="check the running server at --url")
    parser.add_argument("--url", default=_HTTP, metavar="HOST:PORT", help="its HTTP address (default: %(default)s)")
    parser.add_argument("--metrics-url", default=_METRICS, metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument("--quiet", action="store_true", help="print only what needs something done")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    checks: list[tuple[str, Check]]
    if parsed.live:
        checks = [
            ("server", lambda: live.check_health(parsed.url)),
            ("engine", lambda: live.check_engines(parsed.metrics_url)),
        ]
    else:
        checks = [
            ("server", machine.check_server),
            ("shared memory", machine.check_shared_memory),
            ("GPU", machine.check_gpu),
            ("repository", lambda: models.check_repository(parsed.model_repository, parsed.model)),
        ]
    return tell(examine(checks), quiet=parsed.quiet, say=lambda line: print(line, flush=True))
