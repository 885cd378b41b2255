"""`paged-backend bench`: hands over to the benchmarks of a checkout; they are not part of the installed package."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from paged_backend.errors import ConfigError


def add_bench(commands: argparse._SubParsersAction) -> None:
    """Add the command `bench` and its own commands to the parser."""
    bench = commands.add_parser("bench", help="run a benchmark of this checkout", description="Run a benchmark.")
    names = bench.add_subparsers(required=True, metavar="benchmark")
    memory = names.add_parser(
        "memory",
        help="the PagedAttention paper's memory experiments, in simulated time",
        description="Reproduce the PagedAttention paper's memory experiments on the real scheduler and block manager, "
        "with synthetic lengths and a cost model as the clock. Needs no GPU and no model; takes a minute or two.",
    )
    memory.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    memory.add_argument("--png", type=Path, metavar="FILE", help="draw the results (needs matplotlib)")
    memory.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="run only these experiments, such as slots"
    )
    memory.add_argument(
        "--scale", type=_scale, default=1.0, metavar="X", help="multiply the number of requests (default: 1)"
    )
    memory.set_defaults(run=_memory)


def _scale(text: str) -> float:
    value = float(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError("must be above 0 and at most 100")
    return value


def _memory(parsed: argparse.Namespace) -> int:
    root = Path(__file__).resolve().parents[1]
    if not (root / "benchmarks" / "memory" / "run.py").is_file():
        raise ConfigError(
            f"`bench` runs from a checkout of the project: there are no benchmarks in {root}. Clone the repository and "
            "install it with `pip install -e .`"
        )
    sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks.memory.run").main(parsed.json, parsed.png, parsed.only, parsed.scale)
