"""`Harness`: measures the cells of tables on every system that is set up, in interleaved rounds.

Each system is loaded once, when it is first needed. What a results file already holds is not measured again, so a run
may be stopped at any time and continued. A system that fails is named in one line and left out of what follows. Knows
processes and results; what a workload is, and what a table looks like, is elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.roofline import Machine, measure_machine
from benchmarks.serving.export_model import export
from benchmarks.serving.peers import BENCH, PEERS, ROOT, own_version
from benchmarks.serving.process import PeerError, PeerProcess
from benchmarks.serving.results import Key, Results
from benchmarks.serving.suite import Cell, Measurement, order

MACHINE = "machine"
_LOAD_SECONDS = 600.0


@dataclass(frozen=True)
class Setup:
    """What all systems have in common in a run.

    Attributes:
        model: a GGUF file or the demo model's name.
        dtype: float32 or bfloat16.
        threads: compute threads.
        rounds: repetitions of each measurement (slow systems have one).
        timeout: seconds that a measurement may take.
    """

    model: str
    dtype: str
    threads: int
    rounds: int
    timeout: float

    def label(self, kv_tokens: int) -> str:
        """In the keys of results."""
        return f"{Path(self.model).stem} {self.dtype} {self.threads} threads {kv_tokens} KV tokens"


class Harness:
    """Runs measurements. Use it as a context manager: leaving it ends all processes.

    Args:
        setup: common to all systems.
        peers: those that may take part.
        results: where measurements go.
        say: takes lines for the terminal.
    """

    def __init__(self, setup: Setup, peers: Sequence[str], results: Results, say: Callable[[str], None]) -> None:
        self._setup, self._results, self._say = setup, results, say
        self._own_version = own_version()
        self._processes: dict[tuple[str, int], PeerProcess] = {}
        self._logs = BENCH / "logs"
        # Set up here, and of these those that have not failed.
        self.available: list[str] = []
        for name in peers:
            missing = PEERS[name].missing()
            if missing:
                say(missing)
            else:
                self.available.append(name)
        self._working = list(self.available)

    def __enter__(self) -> Harness:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def key(self, peer: str, cell: Cell) -> Key:
        """Under which results of a cell are kept."""
        version = PEERS[peer].version() if PEERS[peer].environment else self._own_version
        return Key(peer, cell.job.cell, self._setup.label(cell.kv_tokens), version)

    def run(self, cells: Sequence[Cell], deadline: float | None) -> bool:
        """Measure what is missing of a table.

        Args:
            cells: the table's.
            deadline: on `time.monotonic()`'s clock; no measurement begins after it.

        Returns:
            Whether nothing is missing any more, failures aside.
        """
        slow = [name for name in self.available if PEERS[name].slow]
        steps = order(cells, self._working, slow, self._setup.rounds)
        missing = [(n, m) for n, m in steps if not self._results.has(self.key(m.peer, m.cell), n)]
        if missing and (deadline is None or time.monotonic() <= deadline):
            self._measure_machine()
        for count, (number, measurement) in enumerate(missing):
            if deadline is not None and time.monotonic() > deadline:
                self._say(f"time is up, {len(missing) - count} measurements are missing: run the same again to go on")
                return False
            if measurement.peer in self._working:
                self._measure(measurement, number)
        if missing:
            self._measure_machine()
        return True

    def machine(self) -> Machine:
        """Bandwidth and GEMM rate: medians over all runs of this version, measured now if there are none."""
        key = self._machine_key()
        if not self._results.of([key]):
            self._measure_machine()
        records = self._results.of([key])
        bandwidth = median(record.metrics["bandwidth"] for record in records)
        rate = median(record.metrics["gemm_rate"] for record in records)
        return Machine(bandwidth, rate, self._setup.dtype, self._setup.threads)

    def _machine_key(self) -> Key:
        return Key(MACHINE, "roofline", f"{self._setup.dtype} {self._setup.threads} threads", self._own_version)

    def _measure_machine(self) -> None:
        found = measure_machine(self._setup.dtype, self._setup.threads)
        self._say(f"  this machine now: {found}")
        numbers = {"bandwidth": found.bandwidth, "gemm_rate": found.gemm_rate}
        self._results.add(self._machine_key(), 0, numbers)

    def _measure(self, measurement: Measurement, number: int) -> None:
        peer, cell = measurement.peer, measurement.cell
        job = {**cell.job.as_json(), "round": number}
        try:
            metrics = self._process(peer, cell.kv_tokens).measure(job, self._setup.timeout)
        except PeerError as error:
            self._say(f"  {peer} failed at {cell.job.cell} and is left out from here on: {error}")
            self._working.remove(peer)
            return
        self._results.add(self.key(peer, cell), number, metrics)
        self._say(
            f"  round {number + 1}  {cell.job.cell:10}  {peer:16} {metrics['seconds']:7.1f} s"
            f"  {metrics['output_tokens_per_s']:7.1f} tokens/s  others' CPU {100 * metrics['other_cpu']:.0f} %"
        )

    def _process(self, peer: str, kv_tokens: int) -> PeerProcess:
        """The system's process, started if need be."""
        known = self._processes.get((peer, kv_tokens))
        if known is not None and known.alive:
            return known
        setup = self._setup
        directory = export(setup.model, setup.dtype, BENCH / "models" / f"{Path(setup.model).stem}-{setup.dtype}")
        options = ["--dtype", setup.dtype, "--threads", str(setup.threads), "--kv-tokens", str(kv_tokens)]
        self._say(f"  loading {peer}")
        process = PeerProcess(
            [*PEERS[peer].command(directory), *options],
            PEERS[peer].process_variables(setup.threads),
            ROOT,
            self._logs / f"{peer}.log",
            _LOAD_SECONDS,
        )
        self._processes[peer, kv_tokens] = process
        return process
