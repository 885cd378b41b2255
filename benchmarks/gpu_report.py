"""The kernels and the engine on one GPU, in less than ten minutes.

    PYTHONPATH=.:kernels python benchmarks/gpu_report.py [--json gpu_report.json] [--markdown FILE] [--seconds 540]

Needs torch with Triton-lang and numpy, nothing else. First the kernels are held against the reference; on a difference
nothing is measured. Then come the ceilings of the machine and the tables, the most telling first. Each row is kept as
soon as it is measured: run again to continue. --toy runs everything at tiny sizes, also interpreted on a CPU
(TRITON_INTERPRET=1), which proves that the report runs and says nothing about time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# `python benchmarks/gpu_report.py` puts only this file's folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.gpu import ceilings, correctness, decode, elementwise, engine, prefill, sampler, splits
from benchmarks.gpu.bench import FULL, TOY, Bench, Table, machine
from benchmarks.gpu.report import Report

TABLES: list[Table] = [
    *decode.TABLES[1:], splits.TABLE, *prefill.TABLES, elementwise.TABLE, sampler.TABLE, decode.TABLES[0], engine.TABLE,
]  # fmt: skip
"""In the order in which they are measured; the largest table last but one, the engine, which needs its memory, last."""

# Of the time, what is kept for the engine.
_ENGINE_SHARE = 0.15


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; returns 1 if a row failed."""
    parser = argparse.ArgumentParser(description="Measure the kernels and the engine on a GPU.")
    parser.add_argument("--json", type=Path, default=Path("gpu_report.json"), metavar="FILE", help="results, continued")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="tables (default: beside the JSON file)")
    parser.add_argument("--seconds", type=float, default=540, help="start no row after so long (default: 540)")
    parser.add_argument("--only", nargs="+", metavar="TABLE", help="only these tables, besides the ceilings")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, also interpreted on a CPU")
    parsed = parser.parse_args(arguments)
    known = [table.name for table in TABLES]
    for name in parsed.only or []:
        if name not in known:
            parser.error(f"there is no table {name!r}; tables: {', '.join(known)}")
    bench = make_bench(parsed.toy)
    report = Report(parsed.json, machine(bench), time.monotonic() + parsed.seconds)
    print("correctness", flush=True)
    correctness.require_agreement(report.run(correctness.TABLE, bench), report.failed)
    # Quick, and every share depends on them: a continued report keeps the first run's.
    for key, row in report.run(ceilings.TABLE, bench).items():
        bench.ceilings[key] = row["rate"]
    end = report.deadline
    for table in TABLES:
        if parsed.only and table.name not in parsed.only:
            continue
        print(table.name, flush=True)
        report.deadline = end if table is engine.TABLE else end - _ENGINE_SHARE * parsed.seconds
        report.run(table, bench)
    path = parsed.markdown or parsed.json.with_suffix(".md")
    path.write_text(report.markdown([correctness.TABLE, ceilings.TABLE, *TABLES]))
    print(f"written: {parsed.json}, {path}")
    return 1 if report.failed else 0


def make_bench(toy: bool) -> Bench:
    """The GPU at full or toy sizes, or a CPU at toy sizes."""
    if torch.cuda.is_available():
        return Bench(torch.device("cuda", torch.cuda.current_device()), TOY if toy else FULL)
    if not toy or os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("there is no CUDA GPU; TRITON_INTERPRET=1 with --toy shows on a CPU that the report runs")
    # The interpreter gets bfloat16 wrong.
    return Bench(torch.device("cpu"), TOY, torch.float16)


if __name__ == "__main__":
    sys.exit(main())
