"""`Engine`: the whole path of a request, step by step. Read this file first.

    make_request -> add_request -> [ schedule -> execute -> process ]* -> SequenceDelta ...

The engine owns a scheduler (which tokens next), a worker (computes and samples them) and an output processor (text and
stopping). It is synchronous and single-threaded; `EngineThread` runs it for a server, `LLM` for a script. It knows
nothing of Triton Server.
"""

from __future__ import annotations

import heapq
import logging
import time

from paged_backend.config import EngineConfig
from paged_backend.engine.beam_search import BeamSearch, Continuation
from paged_backend.engine.input_processor import InputProcessor
from paged_backend.engine.output_processor import OutputProcessor
from paged_backend.engine.outputs import SequenceDelta
from paged_backend.engine.pipeline import StepPipeline
from paged_backend.errors import InvalidRequestError
from paged_backend.kv.block_manager import BlockManager
from paged_backend.model_source import resolve_model
from paged_backend.request import FinishReason, Request, RequestStatus, Sequence
from paged_backend.sampling_params import SamplingParams
from paged_backend.sched.output import SchedulerOutput, WorkerOutput
from paged_backend.sched.policy import SchedulerPolicy
from paged_backend.sched.scheduler import Scheduler
from paged_backend.tokenizer import Tokenizer
from paged_backend.worker.worker import Worker, check_model

logger = logging.getLogger(__name__)


class Engine:
    """A language model with a paged KV cache and continuous batching.

    Args:
        config: engine arguments; `self.config` is the resolved copy.

    Raises:
        ConfigError, ModelLoadError, UnsupportedError: the model cannot be served as configured.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_model(config)
        self.tokenizer = _load_tokenizer(config)
        self.worker = Worker(config)
        self.config = self.worker.resolved
        assert self.config.num_kv_blocks and self.config.block_size, "the worker resolves the pool"
        self.blocks = BlockManager(self.config.num_kv_blocks, self.config.block_size, self.worker.num_host_blocks)
        self.scheduler = Scheduler(self.blocks, _policy(self.config, self.worker))
        self._inputs = InputProcessor(self.config, self.worker.shape, self.tokenizer)
        self._outputs = OutputProcessor(self.tokenizer, frozenset(self.worker.shape.eos_token_ids))
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._searches: dict[str, BeamSearch] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._steps = StepPipeline(lambda plan: self.worker.execute(plan), 2 if self.config.async_scheduling else 1)
        # Live requests of which no step can be planned before the last one's results are known.
        self._num_lockstep = 0
        self._counts = dict.fromkeys(
            (
                *("steps", "step_microseconds", "prefill_tokens", "decode_tokens"),
                *("prompt_tokens", "generation_tokens", "requests_finished"),
            ),
            0,
        )

    def make_request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        field: str = "prompt",
        timeout_s: float | None = None,
    ) -> Request:
        """Tokenize and check a request without queueing it; safe from any thread.

        Args:
            request_id: must not belong to a live request when it is added.
            prompt: text, or token ids.
            params: sampling parameters.
            field: what the caller's interface calls the prompt, for the error messages.
            timeout_s: seconds from now after which the request ends, finished or not, with reason `timeout`.

        Raises:
            InvalidRequestError: the request can never be served; the message names the field and the limit.
        """
        return self._inputs.make_request(request_id, prompt, params, field=field, timeout_s=timeout_s)

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
        if request.params.use_beam_search:
            self._searches[request.request_id] = BeamSearch(request, self._inputs.stop_token_ids(request.params))
        self._num_lockstep += _needs_lockstep(request)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.request_id))
        self._outputs.add(request)
        self.scheduler.add(request)

    def step(self) -> list[SequenceDelta]:
        """Compute the next tokens of some requests; returns what each sequence gained."""
        began = time.perf_counter_ns()
        expired = self._expire()
        self._plan_steps()
        deltas = self._process(self._steps.take())
        self._counts["step_microseconds"] += (time.perf_counter_ns() - began) // 1000
        if self.config.check_integrity:
            self.scheduler.check_integrity()
        return expired + deltas

    def abort_request(self, request_id: str) -> list[SequenceDelta]:
        """End a request now and free its blocks; returns its last deltas (none if it is not live)."""
        return self._end(request_id, FinishReason("abort"))

    def has_unfinished_requests(self) -> bool:
        """True while `step()` has work."""
        return bool(self._requests)

    def live_request_ids(self) -> list[str]:
        """Ids of the requests that have not finished."""
        return list(self._requests)

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV contents; running requests go on undisturbed."""
        self.scheduler.reset_prefix_cache()

    def stats(self) -> dict[str, int]:
        """Counts as of now.

        `blocks_total`, `blocks_used`, `blocks_cached` (free, content kept), `blocks_empty`: KV blocks by state;
        `host_blocks_total`, `host_blocks_used`: blocks of the swap space; `requests_running`, `requests_waiting` (of
        these `requests_preempted` wait to be computed anew and `requests_swapped` to be swapped in); and since the
        start: `requests_finished`, `preemptions` (`recomputations` and `swaps_out`), `swaps_in`, `block_copies`
        (copy-on-write), `block_evictions` (of cached contents), `prefix_cache_queries` and `prefix_cache_hits`
        (prompt tokens looked up and found), `steps` and the `step_microseconds` they took, `prefill_tokens` and
        `decode_tokens` (computed for sequences with several tokens in a step, and with one), `prompt_tokens` (of
        requests that got a first token), `generation_tokens`. `requests_prefilling` have no token yet.
        """
        pool, host_pool, scheduler = self.blocks.pool, self.blocks.host_pool, self.scheduler
        statuses = [request.status for request in scheduler.waiting]
        return {
            "blocks_total": pool.num_blocks,
            "blocks_used": pool.num_used,
            "blocks_cached": pool.num_cached,
            "blocks_empty": pool.num_empty,
            "host_blocks_total": host_pool.num_blocks,
            "host_blocks_used": host_pool.num_used,
            "requests_running": len(scheduler.running),
            "requests_prefilling": sum(r.sequences[0].num_output_tokens == 0 for r in scheduler.running),
            "requests_waiting": len(statuses),
            "requests_preempted": statuses.count(RequestStatus.PREEMPTED),
            "requests_swapped": statuses.count(RequestStatus.SWAPPED),
            "preemptions": scheduler.num_preemptions,
            "recomputations": scheduler.num_recomputed,
            "swaps_out": scheduler.num_swapped_out,
            "swaps_in": scheduler.num_swapped_in,
            "block_copies": self.blocks.num_copies,
            "block_evictions": pool.num_evictions,
            "prefix_cache_queries": scheduler.prefix_queries,
            "prefix_cache_hits": scheduler.prefix_hits,
            **self._counts,
        }

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one state and every table accounted for."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """End all requests and free the model's memory; the engine cannot be used afterwards."""
        for request_id in self.live_request_ids():
            self.abort_request(request_id)
        self._inputs.close()
        self._steps.close()
        self.worker.close()

    # --- parts of a step ---

    def _plan_steps(self) -> None:
        """Plan as many steps as may be under way; one that depends on a token not known yet waits for it."""
        depth = 1 if self._num_lockstep else self._steps.depth
        while len(self._steps) < depth:
            plan = self.scheduler.schedule()
            plan.token_masks = self._outputs.token_masks(plan.scheduled)
            self._count_planned(plan)
            self._steps.submit(plan)

    def _process(self, result: WorkerOutput) -> list[SequenceDelta]:
        """Append the sampled tokens, advance beam searches, and retire the requests that end."""
        self._counts["steps"] += 1
        deltas = []
        for seq_id, (start, found) in result.prompt_logprobs.items():
            if seq_id in self._sequences:
                self._outputs.add_prompt_logprobs(self._sequences[seq_id].request, start, found)
        for seq_id, token_id in zip(result.seq_ids, result.token_ids, strict=True):
            sequence = self._sequences.get(seq_id)
            if sequence is None or sequence.finish is not None:
                continue  # it ended while this step was under way
            self._count_tokens(sequence)
            delta = self._outputs.append(sequence, token_id, result.logprobs.get(seq_id))
            deltas.append(delta)
            if sequence.finish is not None:
                self._let_go(sequence, delta)
        for seq_id in result.stuck:
            sequence = self._sequences.get(seq_id)
            if sequence is None or sequence.finish is not None:
                continue
            deltas.append(self._outputs.end_stuck(sequence))
            self._let_go(sequence, deltas[-1])
        if self._searches:
            deltas += self._process_beams(result)
        return deltas

    def _let_go(self, sequence: Sequence, delta: SequenceDelta) -> None:
        """Free what a sequence that has ended holds, and its request with the last one."""
        if delta.request_finished:
            self._retire(sequence.request)
        else:
            self.scheduler.finish_sequence(sequence)

    def _count_planned(self, plan: SchedulerOutput) -> None:
        decoding = sum(item.num_new_tokens == 1 for item in plan.scheduled)
        self._counts["decode_tokens"] += decoding
        self._counts["prefill_tokens"] += plan.num_scheduled_tokens - decoding

    def _count_tokens(self, sequence: Sequence) -> None:
        self._counts["generation_tokens"] += 1
        if sequence.num_output_tokens == 0 and sequence.index == 0:
            self._counts["prompt_tokens"] += sequence.num_prompt_tokens

    def _process_beams(self, result: WorkerOutput) -> list[SequenceDelta]:
        """Hand each beam's continuations to its search, and carry out the steps of those that are ready."""
        reported: dict[str, BeamSearch] = {}
        for seq_id, candidates in result.logprobs.items():
            sequence = self._sequences.get(seq_id)
            search = self._searches.get(sequence.request.request_id) if sequence is not None else None
            if sequence is not None and search is not None:
                self._count_tokens(sequence)
                search.report(sequence, candidates)
                reported[sequence.request.request_id] = search
        deltas = []
        for request_id, search in reported.items():
            if search.is_ready():
                deltas += self._advance_search(self._requests[request_id], search)
        return deltas

    def _advance_search(self, request: Request, search: BeamSearch) -> list[SequenceDelta]:
        continuations = search.advance()
        if not continuations:
            deltas = self._outputs.beam_results(request, search.best(request.params.n))
            self._retire(request)
            return deltas
        search.continued(self._continue_beams(request, continuations))
        return []

    def _continue_beams(self, request: Request, continuations: list[Continuation]) -> dict[int, float]:
        """Make the continuations the request's beams: drop, fork and extend; returns their scores by sequence."""
        kept = {item.parent.seq_id for item in continuations}
        for sequence in request.sequences:
            if sequence.seq_id not in kept:
                self.scheduler.finish_sequence(sequence)
                del self._sequences[sequence.seq_id]
        beams: list[Sequence] = []
        for item in continuations:
            # A parent's best continuation takes its place; the others fork it, before any token is appended.
            beam = item.parent
            if beam in beams:
                beam = request.fork_sequence(item.parent)
                self.scheduler.fork(item.parent, beam)
                self._sequences[beam.seq_id] = beam
            beams.append(beam)
        request.sequences = beams
        for beam, item in zip(beams, continuations, strict=True):
            beam.token_ids.append(item.token_id)
            self.scheduler.tell_token(beam, item.token_id)
        return {beam.seq_id: item.score for beam, item in zip(beams, continuations, strict=True)}

    def _expire(self) -> list[SequenceDelta]:
        """End the requests whose deadline has passed."""
        deltas: list[SequenceDelta] = []
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            deadline, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            # The id may belong to a later request by now.
            if request is not None and request.deadline == deadline:
                deltas += self._end(request_id, FinishReason("timeout"))
        return deltas

    def _end(self, request_id: str, reason: FinishReason) -> list[SequenceDelta]:
        request = self._requests.get(request_id)
        if request is None:
            return []
        if request.params.use_beam_search:
            # An unfinished search has nothing to show.
            for sequence in request.sequences:
                sequence.finish = reason
            deltas = [SequenceDelta(request_id, 0, [], "", finish_reason=reason.kind, request_finished=True)]
        else:
            deltas = [self._outputs.end(sequence, reason) for sequence in request.live_sequences()]
        self._retire(request)
        return deltas

    def _retire(self, request: Request) -> None:
        self.scheduler.finish(request)
        self._outputs.remove(request)
        for sequence in request.sequences:
            del self._sequences[sequence.seq_id]
        self._searches.pop(request.request_id, None)
        del self._requests[request.request_id]
        self._num_lockstep -= _needs_lockstep(request)
        self._counts["requests_finished"] += 1


def _needs_lockstep(request: Request) -> bool:
    """Beams are chosen, and masks of a form computed, from the tokens before; rules may leave no next token at all."""
    return request.params.use_beam_search or request.grammar is not None or request.rules is not None


def _policy(config: EngineConfig, worker: Worker) -> SchedulerPolicy:
    assert config.max_num_seqs and config.max_num_batched_tokens and config.num_kv_blocks
    assert config.long_prefill_token_threshold is not None
    per_token, per_block = worker.preemption_costs
    return SchedulerPolicy(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        order=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        preemption_mode=config.preemption_mode if worker.num_host_blocks else "recompute",
        recompute_seconds_per_token=per_token,
        swap_seconds_per_block=per_block,
        watermark_blocks=int(config.watermark * config.num_kv_blocks),
        long_prefill_tokens=config.long_prefill_token_threshold,
        sliding_window=worker.shape.sliding_window,
    )


def _load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    return Tokenizer.load(resolve_model(config.tokenizer or config.model))
