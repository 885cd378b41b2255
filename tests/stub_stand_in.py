"""A stand-in for the module that Triton's stub gives to Python models, for its requests and their response senders."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np

from paged_backend.engine.outputs import SequenceDelta
from paged_backend.request import Request as EngineRequest
from paged_backend.sampling_params import SamplingParams
from paged_backend.triton_adapter.parse import ResponseOptions
from paged_backend.triton_adapter.sender import ResponseStream
from paged_backend.triton_adapter.tensors import LLM_OUTPUTS

FINAL = 1
TEXT = frozenset({"text_output"})
ALL_OUTPUTS = {spec.name for spec in LLM_OUTPUTS}


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


class TritonModelException(Exception):
    """What a model raises to fail its loading, and the server's module if something is not to be had."""


class Request:
    """The stub's InferenceRequest; tensors are given as Python values."""

    def __init__(self, parameters=None, outputs=ALL_OUTPUTS, timeout_us=0, sender=None, **tensors):
        self._timeout_us = timeout_us
        self._parameters = parameters
        self._outputs = outputs
        self._sender = sender
        self._tensors = [Tensor(name, self._array(value)) for name, value in tensors.items()]

    @staticmethod
    def _array(value):
        if isinstance(value, np.ndarray):
            return value
        if isinstance(value, bool):
            return np.array([value])
        if isinstance(value, (str, bytes)):
            return np.array([value.encode() if isinstance(value, str) else value], dtype=object)
        return np.array(value, dtype=np.int32)

    def inputs(self):
        return self._tensors

    def parameters(self):
        return "" if self._parameters is None else json.dumps(self._parameters)

    def timeout(self):
        return self._timeout_us

    def request_id(self):
        return ""

    def requested_output_names(self):
        return set(self._outputs)

    def get_response_sender(self):
        return self._sender


class MetricFamily:
    """As on a server that was started without metrics."""

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, **_):
        raise TritonModelException("metrics are disabled")


def install(monkeypatch):
    """Put the stand-in where the stub's module is imported from, for the time of a test."""
    module = ModuleType("triton_python_backend_utils")
    module.Tensor, module.InferenceResponse, module.TritonError = Tensor, Response, TritonError
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    module.TritonModelException, module.MetricFamily = TritonModelException, MetricFamily
    module.Logger = SimpleNamespace(log_info=print, log_warn=print, log_error=print)
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
        EngineRequest("1:", [1, 2, 3, 4, 5], SamplingParams(), seed=0, max_total_tokens=10),
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
