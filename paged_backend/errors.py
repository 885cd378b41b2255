"""Typed errors: what went wrong, in which field, and whose request it was.

Every error a user can cause is one of these, with a message that says what to change. `code` names the Triton
Server error code the adapter answers with; this module itself knows nothing about Triton Server.
"""

from __future__ import annotations


class PagedBackendError(Exception):
    """Base of every error this package raises on purpose.

    Attributes:
        code: name of the Triton Server error code that fits (`INVALID_ARG`, `UNAVAILABLE`, ...).
        field: the request or configuration field at fault, or None.
        request_id: the request at fault, or None when the error belongs to no single request.
    """

    code = "INTERNAL"

    def __init__(self, message: str, *, field: str | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.request_id = request_id


class InvalidRequestError(PagedBackendError, ValueError):
    """The request cannot be served as written; the message names the field and the allowed values."""

    code = "INVALID_ARG"


class UnsupportedError(PagedBackendError):
    """The request asks for something this model or build does not do."""

    code = "UNSUPPORTED"


class OverloadedError(PagedBackendError):
    """The engine takes no more requests now; trying again later may succeed."""

    code = "UNAVAILABLE"


class DeadlineExceededError(PagedBackendError):
    """The request did not finish within the time its client gave it."""

    # What the server answers when a request's timeout passes in its own queue.
    code = "UNAVAILABLE"


class RequestCancelledError(PagedBackendError):
    """The client cancelled the request before it finished."""

    code = "CANCELLED"


class EngineDeadError(PagedBackendError):
    """The engine loop failed or was shut down; no further request will be served by it."""

    code = "INTERNAL"


class ConfigError(PagedBackendError, ValueError):
    """An engine argument or the environment is wrong; the message names the argument and what to change."""

    code = "INVALID_ARG"


class ModelLoadError(PagedBackendError):
    """The model's files are missing, damaged, of an unsupported architecture, or refused for safety."""

    code = "INVALID_ARG"
