"""A stand-in for the module that Triton's stub gives to Python models, and for a request's response sender."""

from __future__ import annotations

import sys
from types import ModuleType

from paged_backend.engine.outputs import SequenceDelta
from paged_backend.request import Request
from paged_backend.sampling_params import SamplingParams
from paged_backend.triton_adapter.parse import ResponseOptions
from paged_backend.triton_adapter.sender import ResponseStream

FINAL = 1
TEXT = frozenset({"text_output"})


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class Response:
    def __init__(self, output_tensors=(), error=None):
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class TritonError:
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "INTERNAL", "INVALID_ARG", "UNAVAILABLE", "CANCELLED"

    def __init__(self, message, code=INTERNAL):
        self.message, self.code = message, code


def install(monkeypatch):
    """Put the stand-in where the stub's module is imported from, for the time of a test."""
    module = ModuleType("triton_python_backend_utils")
    module.Tensor, module.InferenceResponse, module.TritonError = Tensor, Response, TritonError
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    monkeypatch.setitem(sys.modules, module.__name__, module)


class Sender:
    """Behaves as the server's response sender does: nothing may follow FINAL."""

    def __init__(self, fails=False):
        self.sent, self.finals, self.cancelled, self.fails = [], 0, False, fails

    def send(self, response=None, flags=0):
        assert not self.finals, "sent after FINAL"
        self.finals += flags == FINAL
        if self.fails and response is not None and response.error is None:
            raise RuntimeError("no shared memory left")
        if response is not None:
            self.sent.append(response)

    def is_cancelled(self):
        assert not self.finals, "asked after FINAL: the real server crashes"
        return self.cancelled

    @property
    def texts(self):
        return [r.tensors["text_output"][0].decode() for r in self.sent if r.error is None]


def make_stream(sender, outputs=TEXT, stream=True, prefix="", schedule=lambda stream: None, interval=1, **options):
    closed = []
    result = ResponseStream(
        Request("1:", [1, 2, 3, 4, 5], SamplingParams(), seed=0, max_total_tokens=10),
        "",
        sender,
        ResponseOptions(stream, frozenset(outputs), prefix, **options),
        schedule=schedule,
        on_close=closed.append,
        interval=interval,
    )
    return result, closed


def delta(text="", ids=(1,), index=0, finish=None, last=False, span=None):
    return SequenceDelta("1:", index, list(ids), text, span, finish, None, last)
