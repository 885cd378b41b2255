"""Scheduler invariants on a fake worker: budgets, order, preemption, and output independent of the schedule."""

from __future__ import annotations

import random

import pytest
from fake_worker import FakeWorker, generate_alone

from paged_backend.kv.block_manager import BlockManager
from paged_backend.request import Request, RequestStatus
from paged_backend.sampling_params import SamplingParams
from paged_backend.sched.output import SchedulerOutput
from paged_backend.sched.scheduler import Scheduler


class Harness:
    """Scheduler and fake worker in a loop, with every invariant checked at each step."""

    def __init__(self, *, num_blocks=64, block_size=8, max_num_seqs=8, max_num_batched_tokens=32) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self.worker = FakeWorker(block_size)
        self.requests: dict[int, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished_order: list[str] = []

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> Request:
        request = Request(
            request_id,
            prompt,
            SamplingParams(max_tokens=max_tokens),
            seed=0,
            max_total_tokens=len(prompt) + max_tokens,
        )
        self.requests[request.sequences[0].seq_id] = request
        self.scheduler.add(request)
        return request

    def step(self) -> SchedulerOutput:
        free_before = self.manager.pool.num_free
        plan = self.scheduler.schedule()
        assert plan.num_scheduled_tokens <= self.scheduler.max_num_batched_tokens
        self.scheduler.check_integrity()
        result = self.worker.execute(plan)
        for seq_id, token_id in zip(result.seq_ids, result.token_ids, strict=True):
            request = self.requests[seq_id]
            sequence = request.sequences[0]
            sequence.token_ids.append(token_id)
            if sequence.num_tokens >= request.max_total_tokens:
                self.finish(request)
        self.scheduler.check_integrity()
        assert plan.scheduled or plan.removed or not self.scheduler.has_work(), f"stuck with {free_before} free"
        return plan

    def finish(self, request: Request) -> None:
        self.outputs[request.request_id] = request.sequences[0].output_token_ids
        self.finished_order.append(request.request_id)
        self.scheduler.finish(request)

    def run(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(length)]


@pytest.mark.parametrize("budget", [8, 9, 32, 4096])
@pytest.mark.parametrize("num_blocks", [13, 20, 400])
def test_output_is_independent_of_the_schedule(budget, num_blocks):
    rng = random.Random(1)
    harness = Harness(num_blocks=num_blocks, max_num_batched_tokens=budget)
    wanted = {}
    for i in range(24):
        prompt = _prompt(rng, rng.choice([1, 7, 8, 9, 16, 40, 60]))
        count = rng.randrange(1, 40)
        wanted[str(i)] = generate_alone(prompt, count)
        harness.add(str(i), prompt, count)
    harness.run()
    assert harness.outputs == wanted
    assert (harness.scheduler.num_preemptions > 0) == (num_blocks < 400)
    assert harness.manager.pool.num_free == num_blocks
    harness.step()
    assert not harness.worker.rows


def test_running_come_first_and_prefill_shares_the_step_with_decodes():
    harness = Harness(max_num_batched_tokens=16)
    harness.add("short", [1, 2, 3], 10)
    harness.step()
    harness.add("long", list(range(40)), 2)
    plan = harness.step()
    assert [(item.num_computed_tokens, item.num_new_tokens, item.samples) for item in plan.scheduled] == [
        (3, 1, True),
        (0, 15, False),
    ]


def test_blocks_are_taken_only_for_scheduled_tokens():
    harness = Harness(max_num_batched_tokens=16)
    harness.add("a", list(range(40)), 2)
    used = []
    for _ in range(3):
        harness.step()
        used.append(harness.manager.pool.num_used)
    assert used == [2, 4, 5]


def test_max_num_seqs_bounds_the_running():
    harness = Harness(max_num_seqs=3)
    for i in range(7):
        harness.add(str(i), [i], 4)
    harness.step()
    assert len(harness.scheduler.running) == 3
    harness.run()
    assert harness.finished_order == [str(i) for i in range(7)]


def test_the_head_of_the_line_lets_nobody_pass():
    harness = Harness(num_blocks=6, max_num_batched_tokens=64)
    harness.add("first", list(range(24)), 8)
    harness.step()
    big = harness.add("big", list(range(32)), 2)
    small = harness.add("small", [1], 2)
    harness.step()
    assert (big.status, small.status) == (RequestStatus.WAITING, RequestStatus.WAITING)
    harness.run()
    assert harness.finished_order[0] == "first"


def test_a_short_request_overtakes_a_long_one_by_finishing_between_its_steps():
    harness = Harness()
    harness.add("long", [1], 50)
    for _ in range(5):
        harness.step()
    harness.add("short", [2], 3)
    harness.run()
    assert harness.finished_order == ["short", "long"]


def test_preemption_takes_the_youngest_and_admits_nobody_in_that_step():
    harness = Harness(num_blocks=4, max_num_batched_tokens=64)
    old = harness.add("old", list(range(15)), 10)
    young = harness.add("young", list(range(16)), 10)
    waiting = harness.add("waiting", [5], 1)
    harness.step()
    assert waiting.status is RequestStatus.WAITING
    plan = harness.step()
    # `old` fits its 16th token; `young` needs a fifth block, and is itself the youngest.
    assert young.status is RequestStatus.PREEMPTED
    assert waiting.status is RequestStatus.WAITING
    assert [item.seq_id for item in plan.scheduled] == [old.sequences[0].seq_id]
    assert plan.removed == [young.sequences[0].seq_id]
    harness.run()
    assert harness.outputs["young"] == generate_alone(list(range(16)), 10)
    assert young.num_preemptions >= 1


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_finishing_early_from_any_state_frees_everything(steps):
    harness = Harness(num_blocks=4, max_num_batched_tokens=16)
    requests = [harness.add(str(i), list(range(15 + i)), 10) for i in range(3)]
    for _ in range(steps):
        harness.step()
    for request in requests:
        if request.status is not RequestStatus.FINISHED:
            harness.finish(request)
    assert harness.manager.pool.num_free == 4
    harness.step()
    assert not harness.worker.rows


def test_scattered_blocks_change_nothing():
    """Shuffle the free list by ordinary traffic first; the outputs must not notice."""
    rng = random.Random(3)
    harness = Harness(num_blocks=64)
    pool = harness.manager.pool
    taken = pool.allocate(64)
    rng.shuffle(taken)
    for block_id in taken:
        pool.release(block_id)
    prompts = [_prompt(rng, 20) for _ in range(6)]
    requests = [harness.add(str(i), prompt, 30) for i, prompt in enumerate(prompts)]
    harness.step()
    table = harness.manager.block_ids(requests[0].sequences[0].seq_id)
    assert table != list(range(table[0], table[0] + len(table)))
    harness.run()
    assert harness.outputs == {str(i): generate_alone(prompt, 30) for i, prompt in enumerate(prompts)}


def test_random_traffic_with_aborts():
    rng = random.Random(5)
    harness = Harness(num_blocks=16, max_num_batched_tokens=24, max_num_seqs=5)
    wanted: dict[str, list[int]] = {}
    live: list[Request] = []
    for i in range(1500):
        if rng.random() < 0.4:
            prompt, count = _prompt(rng, rng.randrange(1, 60)), rng.randrange(1, 40)
            live.append(harness.add(str(i), prompt, count))
            wanted[str(i)] = generate_alone(prompt, count)
        live = [request for request in live if request.status is not RequestStatus.FINISHED]
        if live and rng.random() < 0.2:
            victim = live.pop(rng.randrange(len(live)))
            harness.finish(victim)
            wanted[victim.request_id] = wanted[victim.request_id][: victim.sequences[0].num_output_tokens]
        harness.step()
    harness.run()
    assert harness.outputs == wanted
    assert harness.scheduler.num_preemptions > 0
    assert harness.manager.pool.num_free == 16
