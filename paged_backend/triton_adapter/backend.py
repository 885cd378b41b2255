"""`LLMModel`: the engine model's `TritonPythonModel`: its lifecycle, and requests on their way in.

    stub's main thread: execute() parses, tokenizes, validates each request by itself and submits it
    engine thread:      steps; deltas go to each request's ResponseStream
    sender thread:      responses (sender.py)
    watcher thread:     cancellation and gauges (watcher.py)

`execute` returns at once and never raises: an exception there would fail every request of the call.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from typing import Any

from paged_backend.config import EngineConfig
from paged_backend.errors import InvalidRequestError, PagedBackendError
from paged_backend.triton_adapter.aliases import ALIAS_INPUTS
from paged_backend.triton_adapter.devices import claim_device
from paged_backend.triton_adapter.logs import ServerLogHandler
from paged_backend.triton_adapter.metrics import EngineMetrics
from paged_backend.triton_adapter.parse import is_stop, parse_request, stop_options
from paged_backend.triton_adapter.pb import pb_utils, printable
from paged_backend.triton_adapter.response import Chunk, build_response
from paged_backend.triton_adapter.sender import ResponseStream, SenderThread, send_error
from paged_backend.triton_adapter.settings import (
    drain_seconds,
    engine_arguments,
    own_version_dir,
    serving_settings,
)
from paged_backend.triton_adapter.tensors import LLM_INPUTS, LLM_OUTPUTS, declare
from paged_backend.triton_adapter.termination import TerminationListener
from paged_backend.triton_adapter.watcher import Watcher

logger = logging.getLogger(__name__)

_LAST_REFUSALS_S = 0.2
# Looks of an idle OpenMP thread before it sleeps, some 0.1 ms; the library's own default is 300,000.
_SPINS = "4000"
# In config.pbtxt; "false" leaves the TensorRT-LLM tensors out. HTTP's generate endpoints turn a JSON value with a
# tensor's name into that tensor, and then refuse a number written as a string, which some vLLM clients send.
_ALIASES_PARAMETER = "tensorrt_llm_inputs"


class LLMModel:
    """The decoupled engine model; the server calls these methods and no others."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Declare every tensor and the decoupled policy, so that config.pbtxt needs neither."""
        parameters = config.as_dict().get("parameters", {})
        aliases = parameters.get(_ALIASES_PARAMETER, {}).get("string_value", "true").lower() != "false"
        declare(config, (*LLM_INPUTS, *ALIAS_INPUTS) if aliases else LLM_INPUTS, LLM_OUTPUTS)
        # The engine batches; the server's batcher would only add a dimension.
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model and start the threads.

        Raises:
            TritonModelException: one line that says what to change.
        """
        self._log_handler = ServerLogHandler()
        self._log_handler.install()
        try:
            self._start(args)
        except PagedBackendError as error:
            self._log_handler.remove()
            raise pb_utils().TritonModelException(printable(str(error))) from None
        except Exception as error:
            logger.exception("the engine did not start")
            self._log_handler.remove()
            message = f"the engine did not start: {type(error).__name__}: {error}"
            raise pb_utils().TritonModelException(printable(message)) from None

    def execute(self, requests: list[Any]) -> None:
        """Take requests in; the answers come later from the sender thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except PagedBackendError as error:
                self._refuse(sender, error)
            except Exception as error:
                logger.exception("taking in a request failed")
                self._refuse(sender, PagedBackendError(f"taking in the request failed: {error!r}"))

    def is_ready(self) -> bool:
        """Asked by servers that know this method (2026 on) before they call the model ready."""
        return self._engine_thread.is_alive

    def finalize(self) -> None:
        """Answer every live request, then stop the threads and free the model."""
        # In this order: no aborts once the engine is gone; every stream ends before the sender does.
        self._termination.remove()
        self._watcher.stop()
        # The server itself waits for requests in flight before it finalizes a model, so few are ever left.
        self._engine_thread.shutdown(self._drain_s)
        self._sender.stop()
        self._metrics.close()
        logger.info("model unloaded")
        self._log_handler.remove()

    def _start(self, args: dict[str, str]) -> None:
        config = EngineConfig.from_mapping(engine_arguments(own_version_dir(args)))
        self._settings = serving_settings(own_version_dir(args))
        config = claim_device(config, args)
        # OpenMP's threads would spin for milliseconds after every step, on cores that the server and its clients wait
        # for (measured on two cores: 1 to 3 ms of the time to the first token). Read when torch is loaded.
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
        # Imported here because it brings torch, which completing a configuration does not need.
        from paged_backend.engine.engine import Engine
        from paged_backend.engine.engine_thread import EngineThread

        self._ids = itertools.count(1)
        self._live: dict[str, ResponseStream] = {}
        # Guards `_live`: added to by the main thread, removed from by the sender thread, read by the watcher.
        self._live_lock = threading.Lock()
        self._drain_s = drain_seconds()
        self._engine = Engine(config)
        self._engine_thread = EngineThread(self._engine, self._die)
        self._sender = SenderThread()
        self._metrics = _metrics(args, self._engine.config)
        self._watcher = Watcher(self._streams, self._engine_thread.abort, self._publish)
        self._engine_thread.start()
        self._sender.start()
        self._watcher.start()
        self._termination = TerminationListener(self._terminate)
        self._termination.install()
        logger.info("serving %s", self._engine.config)

    def _die(self) -> None:
        """The engine has failed: end the process once every client has its error.

        The server of a dead process refuses requests at once, and a launcher or a probe sees that it is gone; a living
        process without an engine would look healthy for ever.
        """
        self._sender.stop()
        # Requests being taken in at this moment still get their refusal.
        time.sleep(_LAST_REFUSALS_S)
        logger.error("the engine failed, so the model's process ends: start the server again")
        os._exit(1)

    def _publish(self) -> None:
        # Counted here, not by the engine: a request is in flight until its last response is out.
        self._metrics.publish({**self._engine_thread.stats(), "requests_in_flight": len(self._live)})

    def _terminate(self) -> None:
        """The server is going down: live requests get what `drain_seconds` allows, new ones are refused."""
        logger.info("the server stops: requests in flight may go on for %g s", self._drain_s)
        self._engine_thread.drain(self._drain_s)

    def _accept(self, request: Any, sender: Any) -> None:
        client_id = request.request_id()
        if is_stop(request):
            self._stop(request, client_id, sender)
            return
        tokenizer = self._engine.tokenizer
        parsed = parse_request(request, has_tokenizer=tokenizer is not None, tokenizer=tokenizer)
        # Clients may give no id, or the same: the engine gets one of ours.
        key = f"{next(self._ids)}:{client_id}"
        engine_request = self._engine.make_request(
            key, parsed.prompt, parsed.params, field=parsed.field, timeout_s=parsed.timeout_s
        )
        stream = ResponseStream(
            engine_request,
            client_id,
            sender,
            parsed.options,
            schedule=self._sender.schedule,
            on_close=self._forget,
            interval=self._settings.stream_interval,
        )
        with self._live_lock:
            self._live[key] = stream
        self._watcher.wake()
        try:
            self._engine_thread.submit(engine_request, stream.sink, wait=self._settings.when_full == "block")
        except PagedBackendError:
            with self._live_lock:
                del self._live[key]
            raise

    def _stop(self, request: Any, client_id: str, sender: Any) -> None:
        """Cancel every live request with this request's id; none being live is fine, it may just have ended."""
        if not client_id:
            raise InvalidRequestError("`stop` needs the request id of the request to cancel", field="stop")
        options = stop_options(request)
        for stream in self._streams():
            if stream.client_id == client_id:
                self._engine_thread.abort(stream.key)
        # An empty answer rather than none: HTTP's generate endpoint insists on exactly one.
        final = pb_utils().TRITONSERVER_RESPONSE_COMPLETE_FINAL
        sender.send(build_response([Chunk(0)], options, 0), flags=final)

    def _refuse(self, sender: Any, error: PagedBackendError) -> None:
        self._metrics.refused(error.code)
        self._watcher.wake()
        try:
            send_error(sender, error)
        except Exception:
            logger.exception("a request could not be refused")

    def _streams(self) -> list[ResponseStream]:
        with self._live_lock:
            return list(self._live.values())

    def _forget(self, stream: ResponseStream) -> None:
        # Noted before it is forgotten: whoever sees that none is in flight finds all of them counted.
        self._metrics.ended(stream.record())
        with self._live_lock:
            self._live.pop(stream.key, None)
        if not stream.ended:
            self._engine_thread.abort(stream.key)


def _metrics(args: dict[str, str], config: EngineConfig) -> EngineMetrics:
    """The metrics of the model being initialized, on the engine arguments as they turned out."""
    assert config.num_kv_blocks and config.block_size and config.max_num_seqs
    limits = {
        "blocks_total": config.num_kv_blocks,
        "block_size": config.block_size,
        "max_num_seqs": config.max_num_seqs,
    }
    # vLLM's label names.
    info = {
        "block_size": str(config.block_size),
        "num_gpu_blocks": str(config.num_kv_blocks),
        "cache_dtype": config.dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "swap_space": str(config.swap_space),
    }
    return EngineMetrics(args["model_name"], args["model_version"], limits, info)
