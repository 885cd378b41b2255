"""`python -m benchmarks.serving`, which `make bench` runs: measures, prints tables, writes JSON and a picture."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.roofline import model_work
from benchmarks.serving.harness import Harness, Setup
from benchmarks.serving.machine import describe
from benchmarks.serving.peers import BENCH, PEERS
from benchmarks.serving.report import Floor, build
from benchmarks.serving.results import Results, medians
from benchmarks.serving.suite import CONCURRENCY, RATES, TABLES, Cell, select
from paged_backend.config import DEFAULT_MODEL
from paged_backend.errors import PagedBackendError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns the exit code: 0 when all tables are complete, 1 when time was up before, 2 for a mistake."""
    parsed = _parser().parse_args(arguments)
    # As Ctrl-C: the systems' processes must end too.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(parsed)
    except (PagedBackendError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; run the same again to go on")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(parsed: argparse.Namespace) -> int:
    for path in (parsed.json, parsed.png, parsed.results):
        if path is not None and path != _default_results() and not path.resolve().parent.is_dir():
            raise ValueError(f"cannot write {path}: its directory does not exist")
    if parsed.png is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib: pip install 'paged-backend[bench]'")
    BENCH.mkdir(exist_ok=True)
    if parsed.fresh:
        parsed.results.unlink(missing_ok=True)
    setup = Setup(parsed.model, parsed.dtype, parsed.threads, parsed.rounds, parsed.timeout)
    facts = describe()
    _say(", ".join(f"{name} {value}" for name, value in facts.items()))
    deadline = time.monotonic() + 60 * parsed.minutes if parsed.minutes else None
    results, tables, complete = Results(parsed.results), [], True
    chosen = [(name, _cells(parsed, name)) for name in parsed.tables or TABLES]
    with Harness(setup, parsed.peers, results, _say) as harness:
        for name, cells in chosen:
            _say(f"\n{name}")
            if not parsed.report:
                complete &= harness.run(cells, deadline)
        floor = Floor(harness.machine(), model_work(parsed.model, parsed.dtype))
        for name, cells in chosen:
            keys = [harness.key(peer, cell) for cell in cells for peer in cell.peers if peer in harness.available]
            found = medians(results.of(keys))
            versions = {peer: PEERS[peer].versions() for peer in harness.available if any(peer == p for p, _ in found)}
            tables.append((build(name, cells, found, floor, versions), cells))
    for table, _ in tables:
        print("\n" + table.as_text())
    _write(parsed, facts, tables)
    return 0 if complete else 1


def _cells(parsed: argparse.Namespace, name: str) -> list[Cell]:
    return select(name, parsed.concurrency, parsed.rates, parsed.requests, parsed.max_tokens)


def _write(parsed: argparse.Namespace, facts: dict[str, object], tables: list) -> None:
    if parsed.json is not None:
        made = {"machine": facts, "dtype": parsed.dtype, "threads": parsed.threads}
        made["tables"] = {table.key: table.as_json() for table, _ in tables}
        parsed.json.write_text(json.dumps(made, indent=1, allow_nan=False) + "\n")
        print(f"wrote {parsed.json}")
    if parsed.png is not None:
        # Drawing needs matplotlib; without a picture nothing else does.
        from benchmarks.serving.plots import draw

        title = f"{parsed.model}, {parsed.dtype}, {parsed.threads} threads, {facts['cpu']}"
        draw(tables, title, parsed.png)
        print(f"wrote {parsed.png}")


def _say(line: str) -> None:
    print(line, flush=True)


def _default_results() -> Path:
    return BENCH / "results.jsonl"


def _parser() -> argparse.ArgumentParser:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="make bench ARGS='...'", description="Side-by-side serving benchmarks.")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; default: all")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), help="default: all set up")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=cores, help="default: %(default)s, the cores of this process")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY, help="of w1")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="of w2, requests per second, ascending")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin nothing after so long; default: no limit")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a measurement may take")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file, or the demo model (default)")
    parser.add_argument("--results", type=Path, default=_default_results(), help="measurements, to go on from")
    parser.add_argument("--fresh", action="store_true", help="forget the measurements of earlier runs")
    parser.add_argument("--report", action="store_true", help="measure nothing, print what is there")
    parser.add_argument("--requests", type=int, default=0, help="cut the workloads to so many requests (a trial)")
    parser.add_argument("--max-tokens", type=int, default=0, help="cut prompts and outputs to so many tokens (a trial)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the tables (needs matplotlib)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
