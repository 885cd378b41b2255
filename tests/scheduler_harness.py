"""Scheduler and fake worker in a loop, with every invariant checked at each step."""

from __future__ import annotations

from fake_worker import FakeWorker

from paged_backend.kv.block_manager import BlockManager
from paged_backend.request import FinishReason, Request
from paged_backend.sampling_params import SamplingParams
from paged_backend.sched.output import SchedulerOutput
from paged_backend.sched.policy import SchedulerPolicy
from paged_backend.sched.scheduler import Scheduler

DEFAULTS = {"max_num_seqs": 8, "max_num_batched_tokens": 32}


class Harness:
    """Drives a scheduler as the engine does, without a model; `policy` as for `SchedulerPolicy`."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = 8, num_host_blocks: int = 0, **policy) -> None:
        self.manager = BlockManager(num_blocks, block_size, num_host_blocks)
        self.scheduler = Scheduler(self.manager, SchedulerPolicy(**{**DEFAULTS, **policy}))
        self.worker = FakeWorker(block_size, policy.get("sliding_window"))
        self.sequences = {}
        self.outputs: dict[str, list[list[int]]] = {}
        self.finished_order: list[str] = []

    def add(self, request_id: str, prompt: list[int], max_tokens: int | list[int], **fields) -> Request:
        """Queue a request; with a list, one sequence for each limit."""
        limits = max_tokens if isinstance(max_tokens, list) else [max_tokens]
        request = Request(
            request_id,
            prompt,
            SamplingParams(max_tokens=max(limits)),
            seed=fields.pop("seed", 0),
            max_total_tokens=len(prompt) + max(limits),
            num_sequences=len(limits),
            **fields,
        )
        for sequence, limit in zip(request.sequences, limits, strict=True):
            self.sequences[sequence.seq_id] = (sequence, len(prompt) + limit)
        self.scheduler.add(request)
        return request

    def step(self) -> SchedulerOutput:
        """One engine step."""
        plan = self.scheduler.schedule()
        assert plan.num_scheduled_tokens <= self.scheduler.policy.max_num_batched_tokens
        self.scheduler.check_integrity()
        result = self.worker.execute(plan)
        for seq_id, token_id in zip(result.seq_ids, result.token_ids, strict=True):
            sequence, limit = self.sequences[seq_id]
            sequence.append(token_id)
            if sequence.num_tokens >= limit:
                sequence.finish = FinishReason("length")
                if sequence.request.live_sequences():
                    self.scheduler.finish_sequence(sequence)
                else:
                    self.finish(sequence.request)
        self.scheduler.check_integrity()
        assert plan.scheduled or plan.removed or plan.swap_in or not self.scheduler.has_work(), "no progress"
        return plan

    def finish(self, request: Request) -> None:
        """End a request, finished or not."""
        self.outputs[request.request_id] = [sequence.output_token_ids for sequence in request.sequences]
        self.finished_order.append(request.request_id)
        self.scheduler.finish(request)
        self.scheduler.check_integrity()

    def run(self) -> None:
        """Step until nothing is left."""
        for _ in range(10_000):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")
