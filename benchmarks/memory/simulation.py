"""Runs jobs through a scheduler on a simulated clock, and measures latency and memory.

The loop is the engine's (schedule, execute, process) with a cost model in the place of the worker: every output has the
length its job says. Knows requests and block tables through the scheduler's public interface only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.memory.beams import SHARPNESS, SyntheticBeams
from benchmarks.memory.cost import StepCost
from benchmarks.memory.reservation import ReservingManager
from benchmarks.memory.workload import Job
from paged_backend.kv.block_manager import BlockManager
from paged_backend.request import FinishReason, Request, Sequence
from paged_backend.sampling_params import SamplingParams
from paged_backend.sched.output import SchedulerOutput
from paged_backend.sched.policy import SchedulerPolicy
from paged_backend.sched.scheduler import Scheduler

# Memory is looked at once in so many steps.
SAMPLE_STEPS = 8
# This share of the requests finishes before memory is looked at.
WARM_UP = 0.2
TOKEN = 0


@dataclass
class MemoryUse:
    """Time-weighted sums over the samples, in slot-seconds unless named otherwise.

    Attributes:
        seconds: simulated time covered.
        total: all slots.
        held: slots that hold a token.
        promised: reserved or allocated slots that their request will fill later.
        never_used: reserved or allocated slots that stay empty.
        running: running requests (request-seconds).
        blocks, blocks_unshared: blocks in use, and what they would be if no two tables shared any (block-seconds).
    """

    seconds: float = 0.0
    total: float = 0.0
    held: float = 0.0
    promised: float = 0.0
    never_used: float = 0.0
    running: float = 0.0
    blocks: float = 0.0
    blocks_unshared: float = 0.0

    def share(self, part: float) -> float:
        """A part of all slots."""
        return part / self.total if self.total else 0.0

    @property
    def empty_in_allocated(self) -> float:
        """Share of allocated slots that hold no token."""
        allocated = self.held + self.promised + self.never_used
        return 1 - self.held / allocated if allocated else 0.0

    @property
    def mean_running(self) -> float:
        """Requests running side by side."""
        return self.running / self.seconds if self.seconds else 0.0

    @property
    def saved_by_sharing(self) -> float:
        """Blocks saved by sharing, as a share of those needed without."""
        return 1 - self.blocks / self.blocks_unshared if self.blocks_unshared else 0.0


@dataclass
class Outcome:
    """What a run gave.

    Attributes:
        normalised_latency: mean over requests of (finish - arrival) / output tokens, in seconds; infinite if the run
            was given up.
        seconds: simulated time.
        memory: from the end of the warm-up for as long as there are requests to come or to admit, or of the whole run.
    """

    normalised_latency: float
    seconds: float
    memory: MemoryUse
    num_steps: int = 0
    num_preemptions: int = 0
    num_copies: int = 0
    cached_share: float = 0.0


@dataclass
class _Live:
    job: Job
    request: Request
    end: int
    search: SyntheticBeams | None


@dataclass
class Simulation:
    """One system and its clock.

    Args:
        blocks: this project's block manager or a reserving one.
        policy: the scheduler's.
        cost: duration of a step.
        check: verify all bookkeeping after every step (slow).
        whole_run: look at memory from the first step to the last, not only under load.
        sharpness: of the made-up distributions in beam searches.
    """

    blocks: BlockManager | ReservingManager
    policy: SchedulerPolicy
    cost: StepCost
    check: bool = False
    whole_run: bool = False
    sharpness: float = SHARPNESS
    memory: MemoryUse = field(default_factory=MemoryUse)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.blocks, self.policy)  # type: ignore[arg-type]
        self.now = 0.0
        self._live: dict[str, _Live] = {}
        self._sequences: dict[int, tuple[Sequence, _Live]] = {}
        self._latency_sum = 0.0

    def run(self, jobs: list[Job], give_up_at: float = float("inf")) -> Outcome:
        """Serve all jobs, in order of arrival; give up once the mean normalised latency must exceed `give_up_at`."""
        waiting, steps, sampled_at = 0, 0, 0.0
        while waiting < len(jobs) or self.scheduler.has_work():
            if not self.scheduler.has_work():
                self.now = max(self.now, jobs[waiting].arrival)
            while waiting < len(jobs) and jobs[waiting].arrival <= self.now:
                self._add(jobs[waiting], waiting)
                waiting += 1
            plan = self.scheduler.schedule()
            if not (plan.scheduled or plan.swap_in or plan.swap_out or plan.removed):
                raise RuntimeError("the scheduler plans nothing although there is work")
            self.now += self.cost.seconds(plan)
            if steps % SAMPLE_STEPS == 0:
                is_fed = waiting < len(jobs) or len(self.scheduler.waiting)
                is_warm = waiting - len(self._live) >= WARM_UP * len(jobs)
                if self.whole_run or (is_fed and is_warm):
                    self._sample(self.now - sampled_at)
                sampled_at = self.now
            steps += 1
            self._process(plan)
            if self.check:
                self.scheduler.check_integrity()
            if self._latency_sum > give_up_at * len(jobs):
                break
        finished = not self._live and waiting == len(jobs)
        latency = self._latency_sum / len(jobs) if finished else float("inf")
        scheduler = self.scheduler
        return Outcome(
            latency,
            self.now,
            self.memory,
            num_steps=steps,
            num_preemptions=scheduler.num_preemptions,
            num_copies=getattr(self.blocks, "num_copies", 0),
            cached_share=scheduler.prefix_hits / scheduler.prefix_queries if scheduler.prefix_queries else 0.0,
        )

    def _add(self, job: Job, index: int) -> None:
        end = len(job.prompt) + job.output_tokens
        if job.beam_width:
            width = job.beam_width
            params = SamplingParams(temperature=0.0, use_beam_search=True, beam_width=width, max_tokens=end)
        else:
            params = SamplingParams(max_tokens=end)
        request = Request(
            str(index), job.prompt, params, seed=index, max_total_tokens=end, num_sequences=job.num_sequences
        )
        search = SyntheticBeams(request, index, self.sharpness) if job.beam_width else None
        live = self._live[request.request_id] = _Live(job, request, end, search)
        for sequence in request.sequences:
            self._sequences[sequence.seq_id] = (sequence, live)
            if isinstance(self.blocks, ReservingManager):
                self.blocks.expect(sequence.seq_id, len(job.prompt), job.output_tokens)
        self.scheduler.add(request)

    def _process(self, plan: SchedulerOutput) -> None:
        """Append a token to each sequence that sampled, and retire what ends."""
        searching: dict[str, _Live] = {}
        for item in plan.scheduled:
            for seq_id in item.samples:
                sequence, live = self._sequences[seq_id]
                if live.search is not None:
                    live.search.report(sequence)
                    searching[live.request.request_id] = live
                    continue
                sequence.append(TOKEN)
                if len(sequence.token_ids) >= live.end:
                    sequence.finish = FinishReason("length")
                    if live.request.live_sequences():
                        self.scheduler.finish_sequence(sequence)
                    else:
                        self._retire(live)
        for live in searching.values():
            self._advance_search(live)

    def _advance_search(self, live: _Live) -> None:
        assert live.search is not None
        advanced = live.search.advance(self.scheduler)
        if advanced is None:
            return
        new, goes_on = advanced
        self._sequences.update((sequence.seq_id, (sequence, live)) for sequence in new)
        if not goes_on:
            self._retire(live)

    def _retire(self, live: _Live) -> None:
        self.scheduler.finish(live.request)
        for sequence in live.request.sequences:
            del self._sequences[sequence.seq_id]
        del self._live[live.request.request_id]
        self._latency_sum += (self.now - live.job.arrival) / live.job.output_tokens

    def _sample(self, seconds: float) -> None:
        """Enter the state of memory, before this step's results, for so many seconds."""
        blocks, memory = self.blocks, self.memory
        held = promised = never_used = unshared = 0
        for request in self.scheduler.running:
            end = self._live[request.request_id].end
            for sequence in request.live_sequences():
                if isinstance(blocks, ReservingManager):
                    allocated = blocks.reserved_slots(sequence.seq_id)
                else:
                    table = blocks.blocks_for(sequence.num_computed_tokens) if sequence.is_attached else 0
                    unshared += table
                    allocated = table * blocks.block_size
                tokens = min(sequence.num_computed_tokens, allocated)
                held += tokens
                # The last token of an output is never fed back, so it takes no slot.
                promised += max(0, min(allocated, end - 1) - tokens)
                never_used += max(0, allocated - max(end - 1, tokens))
        memory.seconds += seconds
        memory.total += seconds * blocks.pool.num_blocks * blocks.block_size
        memory.held += seconds * held
        memory.promised += seconds * promised
        memory.never_used += seconds * never_used
        memory.running += seconds * len(self.scheduler.running)
        if isinstance(blocks, BlockManager):
            memory.blocks += seconds * blocks.pool.num_used
            memory.blocks_unshared += seconds * unshared
