"""Python's `logging` of this package, forwarded to the server's log while a model is loaded."""

from __future__ import annotations

import logging

from paged_backend.triton_adapter.pb import pb_utils

_LOGGER = logging.getLogger("paged_backend")


class ServerLogHandler(logging.Handler):
    """Writes records to the server's log; `install` and `remove` bracket a model's life."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        # The server's log stamps time and level itself.
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def install(self) -> None:
        """Forward from now on."""
        _LOGGER.addHandler(self)
        _LOGGER.setLevel(logging.INFO)
        # Otherwise a handler of the root logger would print each line a second time.
        _LOGGER.propagate = False

    def remove(self) -> None:
        """Forward no more."""
        _LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            message = self.format(record)
            log = pb_utils().Logger
            if record.levelno >= logging.ERROR:
                log.log_error(message)
            elif record.levelno >= logging.WARNING:
                log.log_warn(message)
            else:
                log.log_info(message)
        except Exception:
            self.handleError(record)
