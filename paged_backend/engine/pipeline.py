"""`StepPipeline`: planned steps on their way through the worker, in order.

With a depth of one a step is computed while its caller waits. With two, the worker has a thread of its own, and the
next step is planned and the last one's results are processed while it computes. Knows plans and results; not what is in
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from paged_backend.sched.output import SchedulerOutput, WorkerOutput


class StepPipeline:
    """Runs `execute` on one plan after the other.

    Args:
        execute: computes a step.
        depth: steps under way at most, 1 or 2.
    """

    def __init__(self, execute: Callable[[SchedulerOutput], WorkerOutput], depth: int) -> None:
        self.depth = depth
        self._execute = execute
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paged-worker") if depth > 1 else None
        self._under_way: deque[Callable[[], WorkerOutput]] = deque()

    def __len__(self) -> int:
        """Steps submitted whose results have not been taken."""
        return len(self._under_way)

    def submit(self, plan: SchedulerOutput) -> None:
        """Start a step; without a thread, it is computed when its results are taken."""
        if self._thread is not None:
            self._under_way.append(self._thread.submit(self._execute, plan).result)
        else:
            self._under_way.append(partial(self._execute, plan))

    def take(self) -> WorkerOutput:
        """Wait for the oldest step's results; an error of the worker is raised here at the latest."""
        return self._under_way.popleft()()

    def close(self) -> None:
        """Let what is under way end, and forget it."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._under_way.clear()
