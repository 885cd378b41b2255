"""The thread that looks after live requests: it notices clients that have gone and publishes gauges.

Both are synchronous round trips to the server process, so they happen here and at a bounded rate. Every live request
is asked about, whether it waits, prefills or decodes; this module knows no requests beyond that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from paged_backend.triton_adapter.sender import ResponseStream

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.05
# With no request since `_LINGER_S`, in which the engine's last counts come in, there is only the heartbeat to publish.
_IDLE_INTERVAL_S = 1.0
_LINGER_S = 1.0
# A round trip takes about 0.1 ms. With many live requests the sweeps space out rather than eat a core.
_MAX_SHARE = 0.1


class Watcher:
    """Sweeps over the live requests every 50 ms, less often if there are many, once a second if there are none.

    Args:
        live: the live requests' streams, as a new list.
        abort: called with the key of each cancelled one, again on each sweep until it has ended.
        publish: updates the gauges.
    """

    def __init__(
        self, live: Callable[[], Iterable[ResponseStream]], abort: Callable[[str], None], publish: Callable[[], None]
    ) -> None:
        self._live = live
        self._abort = abort
        self._publish = publish
        self._stop = threading.Event()
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paged-watcher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """There is something to look after: a new live request, or something to publish."""
        self._news.set()

    def stop(self) -> None:
        """End the thread after the sweep it is in."""
        self._stop.set()
        self._news.set()
        self._thread.join()

    def _run(self) -> None:
        pause = _INTERVAL_S
        idle_since = time.monotonic()
        while not self._stop.wait(pause):
            # Cleared before the look: what comes during it is seen by the next.
            woken = self._news.is_set()
            self._news.clear()
            began = time.monotonic()
            live = True
            try:
                live = self._sweep()
            except Exception:
                logger.exception("looking after the live requests failed")
            now = time.monotonic()
            pause = max(_INTERVAL_S, (now - began) / _MAX_SHARE)
            if woken or live:
                idle_since = now
            elif now - idle_since >= _LINGER_S and not self._stop.is_set():
                self._news.wait(_IDLE_INTERVAL_S)

    def _sweep(self) -> bool:
        """Whether there was a live request."""
        live = list(self._live())
        for stream in live:
            if self._stop.is_set():
                return True
            if stream.poll_cancelled():
                self._abort(stream.key)
        self._publish()
        return bool(live)
