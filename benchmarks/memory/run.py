"""Runs all memory experiments in a few processes, prints their tables, and writes them as JSON and as a picture."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.memory import blocks, load
from benchmarks.memory.cost import A100_13B
from benchmarks.memory.report import Table
from benchmarks.memory.systems import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from paged_backend.errors import ConfigError

EXPERIMENTS = {
    "slots": load.slots,
    "rates": load.rates,
    "sharing": blocks.sharing,
    "prefixes": load.prefixes,
    "block_sizes": blocks.block_sizes,
    "preemption": blocks.preemption,
}
MAX_PROCESSES = 8


def run_all(names: Sequence[str], scale: float = 1.0, processes: int | None = None) -> list[Table]:
    """The tables of the experiments named. `scale` multiplies the number of requests; nothing else changes results."""
    experiments = [EXPERIMENTS[name](scale) for name in names]
    # Fresh processes: a fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes or min(MAX_PROCESSES, os.cpu_count() or 1), context) as pool:
        futures = [[pool.submit(function, *args) for function, args in e.tasks] for e in experiments]
        return [
            experiment.assemble([future.result() for future in pending])
            for experiment, pending in zip(experiments, futures, strict=True)
        ]


def main(
    json_path: Path | None = None, png_path: Path | None = None, only: Sequence[str] = (), scale: float = 1.0
) -> int:
    """Run (all experiments, or `only` some), print and write; returns the exit code.

    Raises:
        ConfigError: an experiment is not known, or a file could not be written; found out before the runs.
    """
    unknown = sorted(set(only) - EXPERIMENTS.keys())
    if unknown:
        raise ConfigError(f"no experiment {unknown[0]!r}; there are: {', '.join(EXPERIMENTS)}")
    only = only or list(EXPERIMENTS)
    for path in (json_path, png_path):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"cannot write {path}: its directory does not exist")
    if png_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib: pip install 'paged-backend[bench]'")
    started = time.monotonic()
    print(
        f"Simulated: 13B parameters in fp16 on an A100 with 40 GB, {A100_13B.num_slots} KV slots,\n"
        f"at most {MAX_NUM_SEQS} sequences and {MAX_NUM_BATCHED_TOKENS} tokens a step.\n"
        "Real: scheduler, block manager, prefix cache, beam search. See docs/memory.md.\n",
        flush=True,
    )
    tables = run_all(only, scale)
    for table in tables:
        print(table.as_text() + "\n")
    if json_path is not None:
        content = {"scale": scale, "tables": {table.key: table.as_json() for table in tables}}
        json_path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"wrote {json_path}")
    if png_path is not None:
        # Drawing needs matplotlib; without a picture nothing else does.
        from benchmarks.memory.plots import draw

        draw({table.key: table for table in tables}, png_path)
        print(f"wrote {png_path}")
    print(f"took {time.monotonic() - started:.0f} s")
    return 0
