"""`Engine`: the whole path of a request, step by step. Read this file first.

    make_request -> add_request -> [ schedule -> execute -> process ]* -> SequenceDelta ...

The engine owns a scheduler (which tokens next), a worker (computes and samples them) and an output processor (text and
stopping). It is synchronous and single-threaded; `EngineThread` runs it for a server, `LLM` for a script. It knows
nothing of Triton Server.
"""

from __future__ import annotations

import logging

from paged_backend.config import EngineConfig
from paged_backend.engine.input_processor import InputProcessor
from paged_backend.engine.output_processor import OutputProcessor
from paged_backend.engine.outputs import SequenceDelta
from paged_backend.errors import InvalidRequestError
from paged_backend.kv.block_manager import BlockManager
from paged_backend.model_source import resolve_model
from paged_backend.request import FinishReason, Request, RequestStatus, Sequence
from paged_backend.sampling_params import SamplingParams
from paged_backend.sched.output import WorkerOutput
from paged_backend.sched.scheduler import Scheduler
from paged_backend.tokenizer import Tokenizer
from paged_backend.worker.worker import Worker

logger = logging.getLogger(__name__)


class Engine:
    """A language model with a paged KV cache and continuous batching.

    Args:
        config: engine arguments; `self.config` is the resolved copy.

    Raises:
        ConfigError, ModelLoadError, UnsupportedError: the model cannot be served as configured.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.tokenizer = _load_tokenizer(config)
        self.worker = Worker(config)
        self.config = self.worker.resolved
        assert self.config.num_kv_blocks and self.config.block_size, "the worker resolves the pool"
        assert self.config.max_num_seqs and self.config.max_num_batched_tokens, "the worker resolves the limits"
        self.blocks = BlockManager(self.config.num_kv_blocks, self.config.block_size)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )
        self._inputs = InputProcessor(self.config, self.worker.shape, self.tokenizer)
        self._outputs = OutputProcessor(self.tokenizer, frozenset(self.worker.shape.eos_token_ids))
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._counts = {"steps": 0, "prompt_tokens": 0, "generation_tokens": 0, "requests_finished": 0}

    def make_request(
        self, request_id: str, prompt: str | list[int], params: SamplingParams, *, field: str = "prompt"
    ) -> Request:
        """Tokenize and check a request without queueing it; safe from any thread.

        Args:
            request_id: must not belong to a live request when it is added.
            prompt: text, or token ids.
            params: sampling parameters.
            field: what the caller's interface calls the prompt, for the error messages.

        Raises:
            InvalidRequestError: the request can never be served; the message names the field and the limit.
        """
        return self._inputs.make_request(request_id, prompt, params, field=field)

    def add_request(self, request: Request) -> None:
        """Queue a request made by `make_request`.

        Raises:
            InvalidRequestError: its id belongs to a live request.
        """
        if request.request_id in self._requests:
            message = f"request id {request.request_id!r} belongs to a request that has not finished"
            raise InvalidRequestError(message, field="request_id", request_id=request.request_id)
        self._requests[request.request_id] = request
        self._sequences.update((sequence.seq_id, sequence) for sequence in request.sequences)
        self._outputs.add(request)
        self.scheduler.add(request)

    def step(self) -> list[SequenceDelta]:
        """Compute the next tokens of some requests; returns what each sequence gained."""
        plan = self.scheduler.schedule()
        result = self.worker.execute(plan)
        deltas = self._process(result)
        if self.config.check_integrity:
            self.scheduler.check_integrity()
        return deltas

    def abort_request(self, request_id: str) -> list[SequenceDelta]:
        """End a request now and free its blocks; returns its last deltas (none if it is not live)."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        reason = FinishReason("abort")
        deltas = [self._outputs.end(sequence, reason) for sequence in request.live_sequences()]
        self._retire(request)
        return deltas

    def has_unfinished_requests(self) -> bool:
        """True while `step()` has work."""
        return bool(self._requests)

    def live_request_ids(self) -> list[str]:
        """Ids of the requests that have not finished."""
        return list(self._requests)

    def stats(self) -> dict[str, int]:
        """Counts as of now.

        `blocks_total`, `blocks_used`, `blocks_cached` (free, content kept), `blocks_empty`: KV blocks by state;
        `requests_running`, `requests_waiting` (of these `requests_preempted` wait to resume); and since the start:
        `requests_finished`, `preemptions`, `steps`, `prompt_tokens` (of requests that got a first token),
        `generation_tokens`.
        """
        pool = self.blocks.pool
        waiting = self.scheduler.waiting
        return {
            "blocks_total": pool.num_blocks,
            "blocks_used": pool.num_used,
            "blocks_cached": 0,
            "blocks_empty": pool.num_free,
            "requests_running": len(self.scheduler.running),
            "requests_waiting": len(waiting),
            "requests_preempted": sum(request.status is RequestStatus.PREEMPTED for request in waiting),
            "preemptions": self.scheduler.num_preemptions,
            **self._counts,
        }

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one state and every table accounted for."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """End all requests and free the model's memory; the engine cannot be used afterwards."""
        for request_id in self.live_request_ids():
            self.abort_request(request_id)
        self.worker.close()

    def _process(self, result: WorkerOutput) -> list[SequenceDelta]:
        """Append the sampled tokens, and retire the requests that end with them."""
        self._counts["steps"] += 1
        self._counts["generation_tokens"] += len(result.token_ids)
        deltas = []
        for seq_id, token_id in zip(result.seq_ids, result.token_ids, strict=True):
            sequence = self._sequences[seq_id]
            if sequence.num_output_tokens == 0:
                self._counts["prompt_tokens"] += sequence.num_prompt_tokens
            delta = self._outputs.append(sequence, token_id)
            deltas.append(delta)
            if delta.request_finished:
                self._retire(sequence.request)
        return deltas

    def _retire(self, request: Request) -> None:
        self.scheduler.finish(request)
        self._outputs.remove(request)
        for sequence in request.sequences:
            del self._sequences[sequence.seq_id]
        del self._requests[request.request_id]
        self._counts["requests_finished"] += 1


def _load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    return Tokenizer.load(resolve_model(config.tokenizer or config.model))
