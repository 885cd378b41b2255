"""`EngineThread`: runs an `Engine` for many clients. One thread owns the engine; everybody else sends it commands.

    any thread:    submit / abort / shutdown --> command queue
    engine thread: commands -> step -> sink(delta) for each delta -> commands -> ...

A sink is called on the engine thread and must not block. It is called for every delta of its request and never again
after the one call that ends it: a delta with `request_finished`, or an error. This module knows
nothing of Triton Server.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable

from paged_backend.engine.engine import Engine
from paged_backend.engine.outputs import SequenceDelta
from paged_backend.errors import EngineDeadError, OverloadedError, PagedBackendError
from paged_backend.request import Request

logger = logging.getLogger(__name__)

Sink = Callable[[SequenceDelta | PagedBackendError], None]


class EngineThread:
    """The engine loop of a server.

    Args:
        engine: owned by this object from here on, `make_request` excepted, which any thread may call.
        on_failure: called on the engine thread when the engine has failed, after every request got its error.
    """

    def __init__(self, engine: Engine, on_failure: Callable[[], None] = lambda: None) -> None:
        self.engine = engine
        self._on_failure = on_failure
        self._failure: Exception | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        # Guards `_accepting` and `_num_live`, which submitters read; the rest belongs to the engine thread.
        self._lock = threading.Condition()
        self._accepting = True
        self._num_live = 0
        self._stop_at: float | None = None
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="paged-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted."""
        return self._accepting

    @property
    def num_live(self) -> int:
        """Requests submitted and not ended."""
        return self._num_live

    def start(self) -> None:
        """Start the loop."""
        self._thread.start()

    def submit(self, request: Request, sink: Sink, *, wait: bool = False) -> None:
        """Hand a request to the engine.

        Args:
            request: as `Engine.make_request` made it.
            sink: takes its deltas, or its error.
            wait: with a full waiting list, block until there is room rather than refuse.

        Raises:
            OverloadedError: the waiting list is full, or the server is shutting down.
            EngineDeadError: the engine has failed.
        """
        config = self.engine.config
        assert config.max_num_seqs is not None
        limit = config.max_num_seqs + config.max_waiting_requests
        with self._lock:
            while wait and self._accepting and self._num_live >= limit:
                self._lock.wait()
            if not self._accepting:
                raise self._refusal(request.request_id)
            if self._num_live >= limit:
                raise OverloadedError(
                    f"{self._num_live} requests are running or waiting; the limit is {limit} (max_num_seqs "
                    f"{config.max_num_seqs} and max_waiting_requests {config.max_waiting_requests}); try again later",
                    request_id=request.request_id,
                )
            self._num_live += 1
            self._commands.put(lambda: self._add(request, sink))

    def abort(self, request_id: str) -> None:
        """End a request with reason `abort` before the next step; an id that is not live is fine."""
        self._commands.put(lambda: self._deliver(self.engine.abort_request(request_id)))

    def stats(self) -> dict[str, int]:
        """The engine's counts as of the last step."""
        return self._stats

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests from now on, let live ones go on for `timeout_s` seconds, then end the rest with an error
        and the loop with them; returns at once. Of several calls the earliest end holds."""
        with self._lock:
            self._accepting = False
            self._lock.notify_all()
        deadline = time.monotonic() + timeout_s
        self._commands.put(lambda: self._set_stop(deadline))

    def shutdown(self, timeout_s: float) -> None:
        """`drain`, wait for its end, and close the engine."""
        self.drain(timeout_s)
        if self._thread.is_alive():
            self._thread.join()
        self.engine.close()

    # --- on the engine thread ---

    def _run(self) -> None:
        try:
            while not self._stopping():
                self._run_commands(wait=not self.engine.has_unfinished_requests())
                if self.engine.has_unfinished_requests():
                    self._deliver(self.engine.step())
                self._stats = self.engine.stats()
            self._end_all(self._refusal())
            for request_id in self.engine.live_request_ids():
                self.engine.abort_request(request_id)
            self._stats = self.engine.stats()
        except Exception as error:
            logger.exception("the engine failed")
            self._failure = error
            self._end_all(self._refusal())
            self._on_failure()

    def _stopping(self) -> bool:
        if self._stop_at is None:
            return False
        return time.monotonic() >= self._stop_at or not self.engine.has_unfinished_requests()

    def _set_stop(self, deadline: float) -> None:
        self._stop_at = deadline if self._stop_at is None else min(self._stop_at, deadline)

    def _run_commands(self, *, wait: bool) -> None:
        """Carry out what has been asked; with `wait`, sleep until something is (an idle engine costs nothing)."""
        try:
            self._commands.get(block=wait)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _add(self, request: Request, sink: Sink) -> None:
        try:
            self.engine.add_request(request)
        except PagedBackendError as error:
            self._count_ended(1)
            sink(error)
            return
        self._sinks[request.request_id] = sink

    def _deliver(self, deltas: Iterable[SequenceDelta]) -> None:
        for delta in deltas:
            sink = self._sinks[delta.request_id]
            if delta.request_finished:
                del self._sinks[delta.request_id]
                self._count_ended(1)
            sink(delta)

    def _end_all(self, error: PagedBackendError) -> None:
        """Refuse from here on, and answer every live request, queued commands included, with the error."""
        with self._lock:
            self._accepting = False
        # No add can be queued any more; those already queued are live requests too.
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                break
            except Exception:
                logger.exception("a command failed while the engine was ending")
        sinks, self._sinks = self._sinks, {}
        self._count_ended(len(sinks))
        for sink in sinks.values():
            sink(error)

    def _refusal(self, request_id: str | None = None) -> PagedBackendError:
        """Why requests are not served any more."""
        if self._failure is not None:
            return EngineDeadError(f"the engine failed: {self._failure!r}", request_id=request_id)
        return OverloadedError("the server is shutting down; try another one", request_id=request_id)

    def _count_ended(self, count: int) -> None:
        with self._lock:
            self._num_live -= count
            self._lock.notify_all()
