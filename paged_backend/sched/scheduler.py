"""`Scheduler`: decides, step by step, which tokens of which sequences are computed next.

    waiting --admit--> running --finish--> gone
       ^-----preempt------'

Running requests come first, then waiting ones, within a budget of tokens; a long prompt is cut into chunks that share
steps with other requests' decodes. When blocks run out, the least urgent running request is preempted as a whole: its
blocks are freed and its known tokens are computed anew later, or its blocks are swapped to the host. Nothing is
sampled twice. The scheduler knows block tables and token counts; it knows no tensors, no text and no clients.

A request with several sequences computes its prompt once: its first live sequence (the leader) does, and the others
attach by forking its blocks when the prompt is done, after a preemption as at first.
"""

from __future__ import annotations

from paged_backend.kv.block_manager import BlockManager, TableChanges, Write
from paged_backend.request import Request, RequestStatus, Sequence
from paged_backend.sched.output import NewSequence, ScheduledSequence, SchedulerOutput
from paged_backend.sched.policy import SchedulerPolicy
from paged_backend.sched.prefix_cache import PrefixCache
from paged_backend.sched.queue import RequestQueue

# One sequence's share of a step: how many tokens to compute.
_Work = list[tuple[Sequence, int]]


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching and preemption.

    Args:
        blocks: the block tables.
        policy: limits and choices.

    A request handed to `add` must fit the pool when alone; the engine checks that at submission.
    """

    def __init__(self, blocks: BlockManager, policy: SchedulerPolicy) -> None:
        self.blocks = blocks
        self.policy = policy
        self.prefix_cache = PrefixCache(blocks, enabled=policy.enable_prefix_caching)
        self.waiting = RequestQueue(policy.order)
        self.running = RequestQueue(policy.order)
        self.num_recomputed = 0
        self.num_swapped_out = 0
        self.num_swapped_in = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        # The first in line that others have passed, and how many did.
        self._passed: Request | None = None
        self._num_passed = 0
        # Rows the worker holds, those of them it must drop at the next step, and tokens it must be told.
        self._worker_rows: set[int] = set()
        # Rows set aside for each running request.
        self._reserved_rows: dict[str, int] = {}
        self._num_reserved_rows = 0
        self._removed: list[int] = []
        self._told_tokens: dict[int, list[int]] = {}

    @property
    def num_preemptions(self) -> int:
        """Preemptions of either kind since the start."""
        return self.num_recomputed + self.num_swapped_out

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.add(request)

    def has_work(self) -> bool:
        """True while a request is waiting or running."""
        return bool(len(self.waiting) or len(self.running))

    def schedule(self) -> SchedulerOutput:
        """Plan one step; the planned tokens count as computed from here on."""
        plan = SchedulerOutput()
        preemptions_before = self.num_preemptions
        self._preempt_for_priority(plan)
        self._schedule_running(plan)
        # Blocks that a preemption has just freed belong to those that still run.
        if self.num_preemptions == preemptions_before:
            self._schedule_waiting(plan)
        plan.removed, self._removed = self._removed, []
        return plan

    # --- what the engine does between steps ---

    def finish(self, request: Request) -> None:
        """Drop a request, from wherever it is, and free its blocks."""
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request)
        else:
            self.waiting.remove(request)
        for sequence in request.sequences:
            self._drop(sequence)
        request.transition(RequestStatus.FINISHED)

    def finish_sequence(self, sequence: Sequence) -> None:
        """Free the blocks of one sequence that has ended while its siblings go on."""
        self._drop(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Make `child` (beam search) share everything that `parent` has computed."""
        self.blocks.fork(parent.seq_id, child.seq_id, parent.num_computed_tokens)
        self.prefix_cache.fork(parent, child, parent.num_computed_tokens)
        child.num_computed_tokens = parent.num_computed_tokens
        child.is_attached = True

    def tell_token(self, sequence: Sequence, token_id: int) -> None:
        """Have the worker append a token that it did not sample itself to the sequence's row, if it has one."""
        if sequence.seq_id in self._worker_rows:
            self._told_tokens.setdefault(sequence.seq_id, []).append(token_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached contents; running sequences keep their blocks."""
        self.blocks.reset_cache()

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, statuses and block tables agree."""
        self.blocks.check_integrity()
        assert self._num_reserved_rows == sum(self._reserved_rows.values()) <= self.policy.max_num_seqs
        assert self._reserved_rows.keys() == {request.request_id for request in self.running}
        assert all(request.status is RequestStatus.RUNNING for request in self.running)
        for request in self.waiting:
            assert request.status not in (RequestStatus.RUNNING, RequestStatus.FINISHED)
            assert not any(self.blocks.block_ids(sequence.seq_id) for sequence in request.sequences)
        for request in self.running:
            for sequence in request.sequences:
                covered = len(self.blocks.block_ids(sequence.seq_id))
                is_live = sequence.finish is None
                expected = self.blocks.blocks_for(sequence.num_computed_tokens) if is_live else 0
                assert covered == expected, f"{covered} blocks for {sequence.num_computed_tokens} computed tokens"
                if len(request.sequences) == 1 and sequence.num_computed_tokens % self.blocks.block_size:
                    last = self.blocks.block_ids(sequence.seq_id)[-1]
                    assert self.blocks.pool.is_writable(last), "the block being filled is shared or hashed"

    # --- phases of schedule() ---

    def _preempt_for_priority(self, plan: SchedulerOutput) -> None:
        """Make room for the first waiting request by preempting running ones of a strictly lower class."""
        while len(self.waiting) and len(self.running):
            first, victim = self.waiting.first(), self.running.last()
            if not self.waiting.outranks(first, victim) or self._has_room(first):
                return
            self._preempt(victim, plan)

    def _schedule_running(self, plan: SchedulerOutput) -> None:
        """Give each running sequence its next tokens, most urgent request first, preempting the last for blocks.

        The step of nearly all of them is planned here, at a fraction of the general cost: a request of one sequence
        that lacks one token, with a slot for it. Off a block boundary there is one, in a last block that is neither
        full nor shared, for only siblings share such blocks.
        """
        rows, block_size, budget = self._worker_rows, self.blocks.block_size, self.policy.max_num_batched_tokens
        # The general way looks after windows, and after tokens that the worker must be told.
        may_be_simple = self.policy.sliding_window is None and not self._told_tokens
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:
                return  # preempted for a more urgent one, as are all behind it
            if may_be_simple and len(request.sequences) == 1 and plan.num_scheduled_tokens < budget:
                sequence = request.sequences[0]
                seq_id, start = sequence.seq_id, sequence.num_computed_tokens
                if sequence.num_missing_tokens == 1 and start % block_size and seq_id in rows:
                    sequence.num_computed_tokens = start + 1
                    self._expect_token(sequence)
                    if (start + 1) % block_size == 0:
                        self.prefix_cache.register(sequence)
                    plan.scheduled.append(ScheduledSequence(seq_id, start, 1, (seq_id,)))
                    plan.num_scheduled_tokens += 1
                    continue
            self._attach_siblings(request)
            work = self._next_work(request, plan)
            if not work:
                continue
            changes = self._allocate_or_preempt(request, work, plan)
            if changes is None:
                return
            self._commit(request, work, changes, plan)

    def _schedule_waiting(self, plan: SchedulerOutput) -> None:
        """Admit waiting requests in order until budget, rows or blocks run out."""
        while len(self.waiting) and self._budget(plan) > 0:
            request = self._next_to_admit()
            if request is None:
                return
            passes = request is not self.waiting.first()
            admitted = self._swap_in if request.status is RequestStatus.SWAPPED else self._admit
            if not admitted(request, plan):
                return
            self._num_passed += passes

    def _next_to_admit(self) -> Request | None:
        """The first in line, or, while that waits for more rows than are free, the first behind it for which they do.

        Otherwise one request with many outputs would leave nearly all rows idle. So many may pass as there are rows,
        then nobody: it must not wait for ever. Nobody passes a request of a better class, or one that waits for blocks.
        """
        first, free = self.waiting.first(), self.policy.max_num_seqs - self._num_reserved_rows
        if first.num_rows <= free:
            return first
        if self._passed is not first:
            self._passed, self._num_passed = first, 0
        if free == 0 or self._num_passed >= self.policy.max_num_seqs:
            return None
        for request in self.waiting:
            if request.num_rows <= free and not self.waiting.outranks(first, request):
                return request
        return None

    # --- steps the phases are made of ---

    def _budget(self, plan: SchedulerOutput) -> int:
        return self.policy.max_num_batched_tokens - plan.num_scheduled_tokens

    def _watermark(self) -> int:
        """Free blocks that an admission must leave to those already running."""
        return self.policy.watermark_blocks if len(self.running) else 0

    def _has_room(self, request: Request) -> bool:
        """True if the request could be admitted now, cached blocks not counted."""
        if self._num_reserved_rows + request.num_rows > self.policy.max_num_seqs:
            return False
        tokens = min(request.live_sequences()[0].num_tokens, self.policy.max_num_batched_tokens)
        return self.blocks.blocks_for(tokens) + self._watermark() <= self.blocks.pool.num_free

    def _next_work(self, request: Request, plan: SchedulerOutput) -> _Work:
        """The request's attached sequences and their next tokens, as far as the budget goes."""
        budget = self._budget(plan)
        if self.policy.long_prefill_tokens and len(self.running) + len(self.waiting) > 1:
            chunk = self.policy.long_prefill_tokens
        else:
            chunk = budget
        work: _Work = []
        for sequence in request.live_sequences():
            count = min(sequence.num_missing_tokens, budget, chunk)
            if count > 0 and sequence.is_attached:
                work.append((sequence, count))
                budget -= count
        return work

    def _allocate_or_preempt(self, request: Request, work: _Work, plan: SchedulerOutput) -> TableChanges | None:
        """Blocks for the work, preempting the least urgent running requests for them.

        Returns None if the request itself was the last and is preempted now. Requests are planned in order of urgency,
        so a victim is never one that this step has already planned.
        """
        writes, nulls = _writes(work), self._release_windows(work)
        while True:
            changes = self.blocks.allocate(writes)
            if changes is not None:
                changes.nulls = nulls
                return changes
            victim = self.running.last()
            self._preempt(victim, plan)
            if victim is request:
                return None

    def _release_windows(self, work: _Work) -> dict[int, int]:
        """Give up blocks that the sliding window of the next token to compute, and of all later ones, has passed."""
        window = self.policy.sliding_window
        nulls: dict[int, int] = {}
        if window is not None:
            for sequence, _ in work:
                count = self.blocks.release_before(sequence.seq_id, sequence.num_computed_tokens - window + 1)
                if count:
                    nulls[sequence.seq_id] = count
        return nulls

    def _admit(self, request: Request, plan: SchedulerOutput) -> bool:
        """Start a new or recomputed request on what the cache has of it and free blocks; false if they do not do."""
        leader, *siblings = request.live_sequences()
        cached = self.prefix_cache.find(leader)
        if request.wants_prompt_logprobs:
            # A cached block gives no log-probabilities: what is not known of the prompt must be computed.
            cached = cached[: request.num_known_prompt_logprobs // self.blocks.block_size]
        if siblings and self.policy.sliding_window is not None:
            # From beyond the prompt, the leader's window would release what its siblings are still to share.
            cached = cached[: request.num_prompt_tokens // self.blocks.block_size]
        self._start_from_cache(leader, cached)
        work = self._next_work(request, plan)
        self._release_windows(work)
        changes = self.blocks.allocate(_writes(work))
        if changes is None or self.blocks.pool.num_free < self._watermark():
            self.blocks.free(leader.seq_id)
            leader.num_computed_tokens = 0
            return False
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = leader.num_computed_tokens
            self.prefix_queries += leader.num_tokens
            self.prefix_hits += leader.num_computed_tokens
        self._start_running(request)
        self._commit(request, work, changes, plan)
        return True

    def _swap_in(self, request: Request, plan: SchedulerOutput) -> bool:
        """Bring a swapped request's blocks back and go on with it; false if too few device blocks are free."""
        seq_ids = [sequence.seq_id for sequence in request.live_sequences()]
        # A block for each sequence's next token, unless the pool is all its own: then what is free suffices.
        reserve = len(seq_ids) + self._watermark() if len(self.running) else 0
        pairs = self.blocks.swap_in(seq_ids, reserve)
        if pairs is None:
            return False
        plan.swap_in += pairs
        self.num_swapped_in += 1
        self._start_running(request)
        work = self._next_work(request, plan)
        changes = self.blocks.allocate(_writes(work))
        # A request swapped out while its prompt was computed may want more tokens at once than blocks are free.
        while changes is None:
            work = [(sequence, count // 2) for sequence, count in work if count > 1]
            changes = self.blocks.allocate(_writes(work))
        self._commit(request, work, changes, plan)
        return True

    def _start_running(self, request: Request) -> None:
        self.waiting.remove(request)
        self.running.add(request)
        self._reserved_rows[request.request_id] = request.num_rows
        self._num_reserved_rows += request.num_rows
        request.transition(RequestStatus.RUNNING)

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self._num_reserved_rows -= self._reserved_rows.pop(request.request_id)

    def _commit(self, request: Request, work: _Work, changes: TableChanges, plan: SchedulerOutput) -> None:
        """Enter the work into the plan."""
        plan.copies += changes.copies
        for sequence, count in work:
            seq_id, start = sequence.seq_id, sequence.num_computed_tokens
            sequence.num_computed_tokens = start + count
            self.prefix_cache.register(sequence)
            if seq_id in self._worker_rows:
                self._plan_row_changes(seq_id, changes, plan)
            else:
                self._plan_new_row(sequence, plan)
            samples: tuple[int, ...] = ()
            if sequence.num_missing_tokens == 0:
                samples = (seq_id, *self._fork_first_time(sequence, plan))
                self._expect_token(sequence)
            plan.scheduled.append(ScheduledSequence(seq_id, start, count, samples))
            plan.num_scheduled_tokens += count

    def _plan_row_changes(self, seq_id: int, changes: TableChanges, plan: SchedulerOutput) -> None:
        if seq_id in changes.appended:
            plan.new_block_ids[seq_id] = changes.appended[seq_id]
        if seq_id in changes.replaced:
            plan.replaced_block_ids[seq_id] = changes.replaced[seq_id]
        if seq_id in changes.nulls:
            plan.null_blocks[seq_id] = changes.nulls[seq_id]
        told = self._told_tokens.pop(seq_id, None)
        if told:
            plan.new_token_ids[seq_id] = told

    def _plan_new_row(self, sequence: Sequence, plan: SchedulerOutput) -> None:
        self._worker_rows.add(sequence.seq_id)
        plan.new.append(
            NewSequence(
                seq_id=sequence.seq_id,
                token_ids=list(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                block_ids=self.blocks.block_ids(sequence.seq_id),
                params=sequence.request.params,
                seed=sequence.seed,
                num_logprobs=sequence.request.num_logprobs,
                is_beam=sequence.request.params.use_beam_search,
                rules=sequence.request.rules,
                num_prompt_logprobs=(
                    sequence.request.num_prompt_logprobs if sequence.request.wants_prompt_logprobs else None
                ),
            )
        )

    def _fork_first_time(self, leader: Sequence, plan: SchedulerOutput) -> list[int]:
        """At the end of a prompt nobody has continued yet, attach the siblings: they sample from the same logits."""
        if leader.num_output_tokens:
            return []
        children = [sequence for sequence in leader.request.live_sequences() if not sequence.is_attached]
        for child in children:
            self.fork(leader, child)
            self._plan_new_row(child, plan)
            self._expect_token(child)
        return [child.seq_id for child in children]

    @staticmethod
    def _expect_token(sequence: Sequence) -> None:
        # A beam samples nothing: its search decides what continues it.
        if not sequence.request.params.use_beam_search:
            sequence.num_pending_tokens += 1

    def _attach_siblings(self, request: Request) -> None:
        """After a recompute preemption: once the leader has computed the prompt, its siblings share it again."""
        if len(request.sequences) == 1:
            return
        leader, *siblings = request.live_sequences()
        shared = request.num_prompt_tokens
        if not leader.is_attached:
            # The former leader ended in the very step that computed the prompt; this one computes it again.
            self._start_from_cache(leader, self.prefix_cache.find(leader))
        if leader.num_output_tokens == 0 or leader.num_computed_tokens < shared:
            return
        shared_blocks = self.blocks.block_ids(leader.seq_id)[: shared // self.blocks.block_size]
        for sequence in siblings:
            if sequence.is_attached:
                continue
            cached = self.prefix_cache.find(sequence)
            # Of the prompt the very blocks of the leader, else the request might need more than when it was admitted.
            if len(cached) > len(shared_blocks) and cached[: len(shared_blocks)] == shared_blocks:
                self._start_from_cache(sequence, cached)
            else:
                self.blocks.fork(leader.seq_id, sequence.seq_id, shared)
                sequence.num_computed_tokens = shared
                sequence.is_attached = True

    def _start_from_cache(self, sequence: Sequence, cached: list[int]) -> None:
        self.blocks.start(sequence.seq_id, cached)
        sequence.num_computed_tokens = len(cached) * self.blocks.block_size
        sequence.is_attached = True

    # --- preemption ---

    def _preempt(self, request: Request, plan: SchedulerOutput) -> None:
        """Take the request's blocks, all of them, and put it back in line."""
        self._stop_running(request)
        sequences = request.live_sequences()
        pairs = None
        if self.policy.prefers_swap(sum(s.num_computed_tokens for s in sequences), self._num_blocks(sequences)):
            pairs = self.blocks.swap_out([sequence.seq_id for sequence in sequences])
        for sequence in sequences:
            self._remove_row(sequence)
        if pairs is not None:
            plan.swap_out += pairs
            self.num_swapped_out += 1
            request.transition(RequestStatus.SWAPPED)
        else:
            self._restart(sequences)
            self.num_recomputed += 1
            request.transition(RequestStatus.PREEMPTED)
        self.waiting.add(request)

    def _num_blocks(self, sequences: list[Sequence]) -> int:
        return len({block_id for sequence in sequences for block_id in self.blocks.block_ids(sequence.seq_id)})

    def _restart(self, sequences: list[Sequence]) -> None:
        """Forget what was computed; the first sequence leads the recomputation of the prompt."""
        for position, sequence in enumerate(sequences):
            self.blocks.free(sequence.seq_id)
            self.prefix_cache.restart(sequence)
            sequence.num_computed_tokens = 0
            sequence.is_attached = position == 0

    def _drop(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.seq_id)
        self.prefix_cache.forget(sequence)
        self._remove_row(sequence)

    def _remove_row(self, sequence: Sequence) -> None:
        self._told_tokens.pop(sequence.seq_id, None)
        if sequence.seq_id in self._worker_rows:
            self._worker_rows.remove(sequence.seq_id)
            self._removed.append(sequence.seq_id)


def _writes(work: _Work) -> list[Write]:
    return [
        Write(sequence.seq_id, sequence.num_computed_tokens, sequence.num_computed_tokens + count)
        for sequence, count in work
    ]
