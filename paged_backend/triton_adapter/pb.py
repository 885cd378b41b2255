"""The one place that reaches for `triton_python_backend_utils`, which exists only inside the server's stub process.

Imported on use, so that everything else here can be imported, and tested, without a server.
"""

from __future__ import annotations

from types import ModuleType

from paged_backend.errors import PagedBackendError

# A message is shown to a person; what a client sent must not make it endless.
_MAX_MESSAGE = 2000


def pb_utils() -> ModuleType:
    """The server's utility module."""
    import triton_python_backend_utils

    return triton_python_backend_utils


def triton_error(error: PagedBackendError) -> object:
    """`error` as a `TritonError` with the code its class names."""
    utils = pb_utils()
    # Servers differ in which codes their module has.
    code = getattr(utils.TritonError, error.code, utils.TritonError.INTERNAL)
    return utils.TritonError(printable(str(error)), code)


def printable(message: str) -> str:
    """`message` as text that can cross to the server: lone surrogates (JSON can hold them) escaped, and not endless."""
    text = message.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 3] + "..."
