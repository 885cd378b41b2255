"""`PeerProcess`: a runner as a child process, loaded once, asked for measurements one by one, and surely ended.

Also notes how much of the machine's CPU time went elsewhere during a measurement: on a machine that others use too,
numbers say little. Knows the protocol; no workloads, no tables. Linux only where it looks at CPU time.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_STOP_SECONDS = 90.0
# A runner may have a server to stop.
_KILL_SECONDS = 45.0
_TAIL_BYTES = 2000
# A measurement begins when others used at most this share of the CPU for so long, or after so long at the latest.
_QUIET_SHARE = 0.03
_LOOK_SECONDS = 0.5
_QUIET_SECONDS = 15.0


class PeerError(Exception):
    """A system did not load or did not answer; the message says what its log says."""


class PeerProcess:
    """A runner in `--serve` mode.

    Args:
        command: runs it.
        variables: its whole environment.
        folder: its working directory, from which `benchmarks` can be imported.
        log: file for what it prints beside its answers.
        load_timeout: seconds it may take to load.

    Attributes:
        ready: its first message, with versions.

    Raises:
        PeerError: it ended, or did not load in time.
    """

    def __init__(
        self, command: Sequence[str], variables: dict[str, str], folder: Path, log: Path, load_timeout: float
    ) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [*command, "--serve"],
                cwd=folder,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.ready = self._receive(load_timeout)
        except BaseException:
            self.kill()
            raise

    def measure(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        """One measurement's numbers; `other_cpu` is the share of the machine's CPU time that went to others.

        Raises:
            PeerError: the system failed, ended or took longer than `timeout` seconds; in the latter cases it is gone.
        """
        assert self._process.stdin is not None
        _wait_until_quiet()
        before = _busy_seconds(), self._own_seconds(), time.monotonic()
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
            answer = self._receive(timeout)
        except (OSError, PeerError) as error:
            self.kill()
            raise PeerError(str(error)) from error
        if "error" in answer:
            raise PeerError(answer["error"])
        after = _busy_seconds(), self._own_seconds(), time.monotonic()
        busy, own, elapsed = (end - start for start, end in zip(before, after, strict=True))
        share = max(0.0, busy - own) / (elapsed * (os.cpu_count() or 1))
        return {**answer["metrics"], "other_cpu": round(share, 4)}

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def close(self) -> None:
        """Let it end by itself, as it does when its input ends; kill what is left after a while."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End it and its children at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM if self._process.poll() is None else signal.SIGKILL)
        try:
            self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(5)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _receive(self, timeout: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise PeerError(f"no answer in {timeout:.0f} s; its log is {self._log}") from None
        if line is None:
            tail = self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip().splitlines()
            raise PeerError(f"ended: {tail[-1] if tail else 'without a word'}; its log is {self._log}")
        return json.loads(line)

    def _own_seconds(self) -> float:
        """CPU time of the process and its descendants."""
        times: dict[int, tuple[int, float]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = stat.read_text().rpartition(")")[2].split()
                ticks = sum(int(number) for number in fields[11:15])
                times[int(stat.parent.name)] = int(fields[1]), ticks / os.sysconf("SC_CLK_TCK")
        family = {self._process.pid}
        while grown := {pid for pid, (parent, _) in times.items() if parent in family} - family:
            family |= grown
        return sum(times[pid][1] for pid in family if pid in times)


def _wait_until_quiet() -> None:
    """Until hardly anything runs, or `_QUIET_SECONDS` have passed: some systems look for work for seconds after their
    last, and would take CPU time from the one measured after them."""
    deadline = time.monotonic() + _QUIET_SECONDS
    most = _QUIET_SHARE * _LOOK_SECONDS * (os.cpu_count() or 1)
    while time.monotonic() < deadline:
        before = _busy_seconds()
        time.sleep(_LOOK_SECONDS)
        if _busy_seconds() - before <= most:
            return


def _busy_seconds() -> float:
    """CPU time that was not idle, over all cores, since the machine started; 0.0 where it cannot be told."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0
    # user nice system idle iowait irq softirq steal: what the host took away is time lost to others, too.
    numbers = [int(word) for word in stat.read_text().splitlines()[0].split()[1:9]]
    return (sum(numbers) - numbers[3] - numbers[4]) / os.sysconf("SC_CLK_TCK")
