"""What can go wrong while launching a server. Raised by this package, printed by `paged_backend.cli`."""

from __future__ import annotations

from collections.abc import Sequence

from paged_backend.errors import PagedBackendError


class LaunchError(PagedBackendError):
    """The server cannot be started, or stopped by itself; the message says what to do.

    Attributes:
        details: lines that explain the message, such as the server's own error lines; may be empty.
    """

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)
