"""`Scheduler`: decides, step by step, which tokens of which sequences are computed next.

    waiting (FCFS) --admit--> running --finish--> gone
        ^---------preempt--------'

Running requests come first, then waiting ones, within a budget of tokens; a long prompt is cut into chunks that share
steps with other requests' decodes. When blocks run out, the youngest running request is preempted: its blocks are
freed and its known tokens are computed anew later (nothing is sampled twice). The scheduler knows block tables and
token counts; it knows no tensors, no text and no clients.
"""

from __future__ import annotations

from collections import deque

from paged_backend.kv.block_manager import BlockManager
from paged_backend.request import Request, RequestStatus, Sequence
from paged_backend.sched.output import NewSequence, ScheduledSequence, SchedulerOutput


class Scheduler:
    """FCFS continuous batching with chunked prefill and recompute preemption.

    Args:
        blocks: the block tables.
        max_num_seqs: sequences running at most.
        max_num_batched_tokens: tokens of one step at most; at least `max_num_seqs`.

    A request handed to `add` must fit the pool when alone; the engine checks that at submission.
    """

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        # Rows the worker holds, and those of them it must drop at the next step.
        self._worker_rows: set[int] = set()
        self._removed: list[int] = []

    def add(self, request: Request) -> None:
        """Queue a new request behind the others."""
        self.waiting.append(request)

    def has_work(self) -> bool:
        """True while a request is waiting or running."""
        return bool(self.waiting or self.running)

    def schedule(self) -> SchedulerOutput:
        """Plan one step; the planned tokens count as computed from here on."""
        plan = SchedulerOutput()
        preemptions_before = self.num_preemptions
        self._schedule_running(plan)
        # Blocks that a preemption has just freed belong to those that still run.
        if self.num_preemptions == preemptions_before:
            self._schedule_waiting(plan)
        plan.removed, self._removed = self._removed, []
        return plan

    def finish(self, request: Request) -> None:
        """Drop a request, from wherever it is, and free its blocks."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        for sequence in request.sequences:
            self._drop(sequence)
        request.transition(RequestStatus.FINISHED)

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, statuses and block tables agree."""
        self.blocks.check_integrity()
        assert len(self.running) <= self.max_num_seqs
        assert all(request.status is RequestStatus.RUNNING for request in self.running)
        for request in self.waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert not any(self.blocks.block_ids(sequence.seq_id) for sequence in request.sequences)
        for request in self.running:
            for sequence in request.live_sequences():
                covered = len(self.blocks.block_ids(sequence.seq_id))
                assert covered == self.blocks.blocks_for(sequence.num_computed_tokens), "a block without a token"

    # --- phases of schedule() ---

    def _schedule_running(self, plan: SchedulerOutput) -> None:
        """Give each running sequence its next tokens, oldest request first, preempting the youngest for blocks."""
        position = 0
        while position < len(self.running) and self._budget(plan) > 0:
            request = self.running[position]
            sequence = request.sequences[0]
            count = min(sequence.num_tokens - sequence.num_computed_tokens, self._budget(plan))
            added = self._allocate_or_preempt(request, sequence.num_computed_tokens + count)
            if added is None:
                return
            if added:
                plan.new_block_ids[sequence.seq_id] = added
            self._plan(plan, sequence, count)
            position += 1

    def _schedule_waiting(self, plan: SchedulerOutput) -> None:
        """Admit waiting requests in order until budget, rows or blocks run out (the head never lets others pass)."""
        while self.waiting and self._budget(plan) > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            sequence = request.sequences[0]
            count = min(sequence.num_tokens, self._budget(plan))
            if self.blocks.allocate(sequence.seq_id, count) is None:
                return
            self.waiting.popleft()
            self.running.append(request)
            request.transition(RequestStatus.RUNNING)
            plan.new.append(self._new_row(sequence))
            self._worker_rows.add(sequence.seq_id)
            self._plan(plan, sequence, count)

    # --- steps the phases are made of ---

    def _budget(self, plan: SchedulerOutput) -> int:
        return self.max_num_batched_tokens - plan.num_scheduled_tokens

    def _plan(self, plan: SchedulerOutput, sequence: Sequence, count: int) -> None:
        start = sequence.num_computed_tokens
        samples = start + count == sequence.num_tokens
        plan.scheduled.append(ScheduledSequence(sequence.seq_id, start, count, samples))
        plan.num_scheduled_tokens += count
        sequence.num_computed_tokens = start + count

    def _new_row(self, sequence: Sequence) -> NewSequence:
        return NewSequence(
            seq_id=sequence.seq_id,
            token_ids=list(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            block_ids=self.blocks.block_ids(sequence.seq_id),
            params=sequence.request.params,
            seed=sequence.seed,
        )

    def _allocate_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for the request's first `num_tokens` positions, preempting the youngest running requests for them.

        Returns None if the request itself was the youngest and is preempted now. Running requests are in order of
        arrival, so a victim is never one that this step has already planned.
        """
        sequence = request.sequences[0]
        while True:
            added = self.blocks.allocate(sequence.seq_id, num_tokens)
            if added is not None:
                return added
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return None

    def _preempt(self, request: Request) -> None:
        """Free the request's blocks and put it at the head of the line; its known tokens are computed anew later."""
        for sequence in request.live_sequences():
            self._drop(sequence)
            sequence.num_computed_tokens = 0
        request.transition(RequestStatus.PREEMPTED)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _drop(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.seq_id)
        if sequence.seq_id in self._worker_rows:
            self._worker_rows.remove(sequence.seq_id)
            self._removed.append(sequence.seq_id)
