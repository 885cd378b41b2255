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
# A round trip takes about 0.1 ms. With many live requests the sweeps space out rather than eat a core.
_MAX_SHARE = 0.1


class Watcher:
    """Sweeps over the live requests every 50 ms, or less often if there are many.

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
        self._thread = threading.Thread(target=self._run, name="paged-watcher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the sweep it is in."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        pause = _INTERVAL_S
        while not self._stop.wait(pause):
            began = time.monotonic()
            try:
                self._sweep()
            except Exception:
                logger.exception("looking after the live requests failed")
            pause = max(_INTERVAL_S, (time.monotonic() - began) / _MAX_SHARE)

    def _sweep(self) -> None:
        for stream in self._live():
            if self._stop.is_set():
                return
            if stream.poll_cancelled():
                self._abort(stream.key)
        self._publish()
