"""Reads a server's log while it runs and keeps what a person wants to know of it.

Knows Triton Server's log lines: which models are loading, loaded or failed, and why. Knows no processes or terminals.
The launcher owns one `ServerLog` per server; a thread of its own feeds it, since a full pipe would block the server.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable
from typing import IO

# I1129 16:37:34.617320 3646 http_server.cc:4713] "Started HTTPService at 127.0.0.1:18000"
_LINE = re.compile(r"^(?P<level>[IWEF])\d{4} [\d:.]+ \d+ (?P<source>\S+):\d+\] ?(?P<text>.*)$")
_LOADING = re.compile(r"^loading: (?P<model>.+):\d+$")
_LOADED = re.compile(r"^successfully loaded '(?P<model>[^']+)'")
_FAILED = re.compile(r"^failed to load '(?P<model>[^']+)' version \d+: (?P<why>.*)$", re.DOTALL)
# Said at every start on a machine without a GPU, and at every stop.
_HARMLESS = (
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "Unable to allocate pinned system memory",
    "failed to allocate pinned system memory",
    "Signal (",
)
_STATUS_PREFIX = re.compile(r"^(?:Internal|Invalid argument|Not found|Unavailable): ")
# A model's own words for its user; where in the code they were said helps nobody.
_DELIBERATE = "TritonModelException: "
# After its complaint about an argument the server prints all its options.
_USAGE = re.compile(r"^Usage: \S*tritonserver")
# Said by a server that gives up waiting for requests; it may hang afterwards.
_EXIT_TIMEOUT = "Exit timeout expired"
_MAX_FRAMES = 3
_TAIL = 10


class ServerLog:
    """What one server has logged so far. Safe to read from other threads than the one that feeds it."""

    def __init__(self, echo: Callable[[str], None] | None = None) -> None:
        """`echo` is called with every line; None keeps the log quiet."""
        self._echo = echo
        self._echo_problems: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self._loading: list[str] = []
        self._failures: dict[str, str] = {}
        self._errors: deque[str] = deque(maxlen=_TAIL)
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._note = ""
        self._in_usage = False
        self._gave_up = False
        self._reader: threading.Thread | None = None

    def follow(self, stream: IO[bytes]) -> None:
        """Read `stream` to its end in a thread."""
        self._reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._reader.start()

    def join(self, timeout: float) -> None:
        """Wait until everything the server wrote has been read, or `timeout` seconds."""
        if self._reader is not None:
            self._reader.join(timeout)

    def started(self, echo: Callable[[str], None]) -> None:
        """The server is ready: its complaints of before explain nothing that comes, and from now on warnings, errors
        and what the models print are passed on to `echo`, unless all is passed on already."""
        with self._lock:
            self._failures.clear()
            self._errors.clear()
            self._tail.clear()
        if self._echo is None:
            self._echo_problems = echo

    @property
    def loading(self) -> list[str]:
        """Names of the models being loaded, oldest first."""
        with self._lock:
            return list(self._loading)

    @property
    def note(self) -> str:
        """The last message a model's own Python code logged, or an empty string."""
        with self._lock:
            return self._note

    @property
    def gave_up_waiting(self) -> bool:
        """Whether the server, asked to stop, gave up waiting for requests in flight."""
        with self._lock:
            return self._gave_up

    def explain(self) -> list[str]:
        """Why the server gave up, in a few lines: for models that failed their reason, else the last error lines."""
        with self._lock:
            if self._failures:
                models: dict[str, list[str]] = {}
                for model, why in self._failures.items():
                    models.setdefault(_without_places(why), []).append(model)
                return [line for why, names in models.items() for line in _reason(", ".join(names), why)]
            return list(self._errors) or list(self._tail)

    def feed(self, line: str) -> None:
        """Take in one line of the log, without its newline."""
        match = _LINE.match(line)
        with self._lock:
            if match is None:
                self._take_plain(line)
            else:
                self._take(match["level"], match["source"], _unquoted(match["text"]))
        if self._echo is not None:
            self._echo(line)
        elif self._echo_problems is not None and _is_problem(line, match):
            self._echo_problems(line)

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                self.feed(raw.decode(errors="replace").rstrip("\r\n"))

    def _take_plain(self, line: str) -> None:
        self._in_usage = self._in_usage or _USAGE.match(line) is not None
        # Tables are drawn with | and +: a summary of what came line by line before.
        if self._in_usage or not line.strip() or line.startswith(("|", "+")) or _is_harmless(line):
            return
        self._tail.append(line)
        if line.startswith("error:"):
            self._errors.append(line.removeprefix("error:").strip())

    def _take(self, level: str, source: str, text: str) -> None:
        self._gave_up = self._gave_up or _EXIT_TIMEOUT in text
        if match := _LOADING.match(text):
            self._loading.append(match["model"])
        elif match := _LOADED.match(text):
            self._loading = [model for model in self._loading if model != match["model"]]
        elif match := _FAILED.match(text):
            self._failures[match["model"]] = match["why"]
            self._loading = [model for model in self._loading if model != match["model"]]
        if source.endswith(".py") and level == "I":
            self._note = text.splitlines()[0] if text else ""
        if level == "I" or _is_harmless(text):
            return
        self._tail.append(text)
        if level in "EF":
            self._errors.append(text)


def _is_harmless(text: str) -> bool:
    return any(phrase in text for phrase in _HARMLESS)


def _is_problem(line: str, match: re.Match[str] | None) -> bool:
    """Warnings, errors, and whatever does not come from the server's logger: a model's own prints."""
    return bool(line.strip()) and (match is None or match["level"] != "I") and not _is_harmless(line)


def _unquoted(text: str) -> str:
    """Messages come quoted, with line breaks written as \\n."""
    if len(text) >= 2 and text.startswith('"') and text.endswith('"'):
        text = text[1:-1]
    return text.replace("\\n", "\n").replace('\\"', '"').replace("\\'", "'")


def _without_places(why: str) -> str:
    """`why`, if it was said deliberately only its message: the same from several models is then the same text."""
    message, _, _ = why.partition("\n\nAt:\n")
    return message if _STATUS_PREFIX.sub("", message.strip()).startswith(_DELIBERATE) else why


def _reason(models: str, why: str) -> list[str]:
    """One line for the error, then the innermost places in somebody's file it came from."""
    message, _, where = why.partition("\n\nAt:\n")
    message = _STATUS_PREFIX.sub("", message.strip()).removeprefix(_DELIBERATE)
    frames = [frame.strip() for frame in where.splitlines() if frame.strip()]
    frames = [frame for frame in frames if not frame.startswith("<frozen ")]
    first, *rest = message.splitlines() or ["no reason given"]
    lines = [f"{models}: {first}", *(f"  {line}" for line in rest[-_TAIL:])]
    return lines + [f"  at {frame}" for frame in frames[:_MAX_FRAMES]]
