"""Response streams and the thread that sends them.

A response is a synchronous round trip to the server process, so it never happens on the engine thread:

    engine thread --sink(delta)--> ResponseStream (merges) --queue--> sender thread --send()--> server

Deltas that pile up while a send is under way merge into the request's next response; nothing is ever held back to wait
for more. Order per request holds because one thread sends. This module knows the response sender's rules:

- FINAL goes out exactly once on every path, errors and cancellation included. It rides on the last response if that
  one says something; if the last step brought no text (an end-of-sequence token has none), FINAL goes alone. Clients
  with `triton_enable_empty_final_response` see it then, others just see the stream end; an empty text instead would be
  an error to some clients, and holding every chunk until the next one is known would cost a step of latency.
- After FINAL the sender must not be touched again: asking it `is_cancelled()` then ends the server process with a
  segmentation fault. `_io_lock` and `_closed` see to that.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from paged_backend.engine.outputs import SequenceDelta
from paged_backend.errors import DeadlineExceededError, InvalidRequestError, PagedBackendError, RequestCancelledError
from paged_backend.request import Request
from paged_backend.triton_adapter.metrics import RequestRecord
from paged_backend.triton_adapter.parse import ResponseOptions
from paged_backend.triton_adapter.pb import pb_utils, triton_error
from paged_backend.triton_adapter.response import Chunk, build_response

logger = logging.getLogger(__name__)


class ResponseStream:
    """The answers to one live request.

    Args:
        request: the engine's; its id is unique.
        client_id: the id the client gave; may be empty, and others may have given the same.
        sender: the request's response sender.
        options: how it wants to be answered.
        schedule: called, from the engine thread, when `flush` has something to send.
        on_close: called once FINAL is out.
        interval: tokens that a sequence of a stream gathers for each response after its first.
    """

    def __init__(
        self,
        request: Request,
        client_id: str,
        sender: Any,
        options: ResponseOptions,
        *,
        schedule: Callable[[ResponseStream], None],
        on_close: Callable[[ResponseStream], None],
        interval: int = 1,
    ) -> None:
        self.key = request.request_id
        self.client_id = client_id
        self._sender = sender
        self._options = options
        self._request = request
        self._interval = interval
        self._began: set[int] = set()
        self._times = _Times()
        self._schedule = schedule
        self._on_close = on_close
        # Guards what the engine thread writes; never held during a round trip.
        self._lock = threading.Lock()
        self._chunks: dict[int, Chunk] = {}
        self._ended = False
        self._error: PagedBackendError | None = None
        self._queued = False
        # Held during round trips, so that no two overlap and none follows FINAL.
        self._io_lock = threading.Lock()
        self._closed = False
        self._cancelled = False
        # Of an output that ended with the finish reason `error`: what went wrong; and whether another one ended well.
        self._failure: str | None = None
        self._any_well = False
        # Of a cumulative stream: what each sequence has said so far.
        self._said: dict[int, Chunk] = {}

    def sink(self, event: SequenceDelta | PagedBackendError) -> None:
        """Take a delta or the error that ends the request; called on the engine thread, does not block."""
        with self._lock:
            if isinstance(event, PagedBackendError):
                self._error = event
                self._ended = True
                self._times.finish_reason = "error"
            else:
                self._merge(event)
            if self._queued or not self._has_news():
                return
            self._queued = True
        self._schedule(self)

    def flush(self) -> None:
        """Send what has piled up; called on the sender thread."""
        with self._lock:
            self._queued = False
            ended, error = self._ended, self._error
            chunks = self._take(everything=ended)
        with self._io_lock:
            if self._closed:
                return
            try:
                self._send(chunks, ended, error)
            except Exception:
                logger.exception("request %s: sending a response failed", self.key)
                self._give_up()
            closed = self._closed
        if closed:
            if self._failure is not None and error is None:
                logger.warning("request %s: an output could not be completed: %s", self.key, self._failure)
            self._on_close(self)

    @property
    def ended(self) -> bool:
        """Whether the engine has finished with the request."""
        return self._ended

    def poll_cancelled(self) -> bool:
        """True if the client has cancelled or gone; asks the server, a synchronous round trip."""
        with self._io_lock:
            if self._closed:
                return False
            if not self._cancelled:
                self._cancelled = self._sender.is_cancelled()
            return self._cancelled

    def record(self) -> RequestRecord:
        """What became of the request; once it is closed."""
        request, times = self._request, self._times
        queued = request.first_scheduled_time
        return RequestRecord(
            finish_reason=times.finish_reason if self._ended else "error",
            prompt_tokens=request.num_prompt_tokens,
            generation_tokens=times.tokens,
            queued_s=None if queued is None else queued - request.arrival_time,
            first_token_s=None if times.first is None else times.first - request.arrival_time,
            per_token_s=times.per_token(),
            total_s=time.monotonic() - request.arrival_time,
        )

    # --- under `_lock` ---

    def _merge(self, delta: SequenceDelta) -> None:
        self._times.note(delta)
        if delta.index not in self._chunks:
            self._chunks[delta.index] = Chunk(delta.index)
        self._chunks[delta.index].add(delta)
        if delta.finish_reason == "error":
            self._failure = str(delta.stop_reason)
        elif delta.finish_reason is not None:
            self._any_well = True
        if delta.request_finished:
            self._ended = True
            if delta.finish_reason == "abort":
                self._error = RequestCancelledError("the request was cancelled", request_id=self.client_id)
            elif delta.finish_reason == "timeout":
                message = "the request's timeout passed before it finished: give it more time or fewer tokens"
                self._error = DeadlineExceededError(message, request_id=self.client_id)
            elif self._failure is not None and not self._any_well and "finish_reason" not in self._options.outputs:
                # Else the client would take what there is, perhaps nothing, for an answer.
                message = f"the output could not be completed: {self._failure}"
                self._error = InvalidRequestError(message, request_id=self.client_id)

    def _has_news(self) -> bool:
        if self._ended:
            return True
        return self._options.stream and any(map(self._is_due, self._chunks.values()))

    def _is_due(self, chunk: Chunk) -> bool:
        """Whether a chunk of a stream is worth a response by now."""
        enough = chunk.index not in self._began or len(chunk.token_ids) >= self._interval
        return enough and chunk.is_visible(self._options)

    def _take(self, *, everything: bool) -> list[Chunk]:
        if everything:
            taken = list(self._chunks.values())
        else:
            taken = [chunk for chunk in self._chunks.values() if self._is_due(chunk)]
            self._began.update(chunk.index for chunk in taken)
        for chunk in taken:
            del self._chunks[chunk.index]
        return sorted(taken, key=lambda chunk: chunk.index)

    # --- under `_io_lock` ---

    def _send(self, chunks: list[Chunk], ended: bool, error: PagedBackendError | None) -> None:
        # Nobody reads the answers to a cancelled request; the server only needs its FINAL.
        gone = self._cancelled
        if not ended:
            for chunk in [] if gone else chunks:
                self._sender.send(self._response([chunk]))
            return
        if gone and error is None:
            error = RequestCancelledError("the request was cancelled", request_id=self.client_id)
        if error is not None:
            self._closed = True
            send_error(self._sender, error)
            return
        said = chunks
        if self._options.stream:
            said = [c for c in chunks if c.is_visible(self._options) or c.must_be_said(self._options)]
            for chunk in said[:-1]:
                self._sender.send(self._response([chunk]))
            said = said[-1:]
        self._send_final(self._response(said) if said else None)

    def _send_final(self, response: Any) -> None:
        self._closed = True
        final = pb_utils().TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if response is None:
            self._sender.send(flags=final)
        else:
            self._sender.send(response, flags=final)

    def _give_up(self) -> None:
        """A response could not be made or sent: end with an error, or client and server would wait for ever."""
        if self._closed:
            return
        self._closed = True
        try:
            send_error(self._sender, PagedBackendError("a response could not be sent; see the server's log"))
        except Exception:
            logger.exception("request %s: the error could not be sent either", self.key)

    def _response(self, chunks: list[Chunk]) -> Any:
        if self._options.cumulative:
            for chunk in chunks:
                self._said.setdefault(chunk.index, Chunk(chunk.index)).extend(chunk)
            chunks = [self._said[chunk.index] for chunk in chunks]
        return build_response(chunks, self._options, self._request.num_prompt_tokens)


class _Times:
    """When a request's tokens came; written on the engine thread."""

    __slots__ = ("finish_reason", "first", "indices", "last", "tokens")

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.tokens = 0
        self.indices: set[int] = set()
        self.finish_reason = "error"

    def note(self, delta: SequenceDelta) -> None:
        """Take in a delta."""
        if delta.token_ids:
            self.last = time.monotonic()
            self.first = self.first or self.last
            self.tokens += len(delta.token_ids)
            self.indices.add(delta.index)
        if delta.request_finished:
            self.finish_reason = delta.finish_reason or "error"

    def per_token(self) -> float | None:
        """Mean seconds between the tokens of a single output; of several they come together."""
        if self.first is None or self.last is None or self.tokens < 2 or len(self.indices) > 1:
            return None
        return (self.last - self.first) / (self.tokens - 1)


class SenderThread:
    """Sends the streams that have something to say, in the order they came to have it."""

    def __init__(self) -> None:
        self._ready: queue.SimpleQueue[ResponseStream | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paged-sender", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def schedule(self, stream: ResponseStream) -> None:
        """Have `stream` flushed soon; from any thread."""
        self._ready.put(stream)

    def stop(self) -> None:
        """Send everything scheduled so far, then end."""
        self._ready.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (stream := self._ready.get()) is not None:
            stream.flush()


def send_error(sender: Any, error: PagedBackendError) -> None:
    """End a request with an error response."""
    utils = pb_utils()
    response = utils.InferenceResponse(output_tensors=[], error=triton_error(error))
    sender.send(response, flags=utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
