"""Scheduler invariants on a fake worker: budgets, order, preemption, and output independent of the schedule."""

from __future__ import annotations

import random

import pytest
from fake_worker import generate_alone
from scheduler_harness import Harness

from paged_backend.request import Request, RequestStatus


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
        wanted[str(i)] = [generate_alone(prompt, count)]
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
    assert [(item.num_computed_tokens, item.num_new_tokens, bool(item.samples)) for item in plan.scheduled] == [
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
    big = harness.add("big", list(range(100, 132)), 2)
    small = harness.add("small", [1], 2)
    harness.step()
    assert (big.status, small.status) == (RequestStatus.WAITING, RequestStatus.WAITING)
    harness.run()
    assert harness.finished_order[0] == "first"


def test_a_request_of_many_rows_does_not_leave_the_others_idle():
    """It waits for all its rows; others may use them meanwhile, but not for ever."""
    harness = Harness(max_num_seqs=4, num_blocks=200)
    harness.add("long", [1, 2, 3], 60)
    harness.step()
    harness.add("wide", [4, 5], [2] * 4)
    for number in range(12):
        harness.add(f"short {number}", [6, number], 2)
    for _ in range(30):
        harness.step()
    # Three rows are free: the short ones go through them, as many as there are rows, and then the line holds.
    assert harness.finished_order == [f"short {number}" for number in range(4)]
    harness.run()
    assert harness.finished_order[4:6] == ["long", "wide"]


def test_nobody_of_a_lower_class_passes():
    harness = Harness(max_num_seqs=4, num_blocks=200, order="priority")
    harness.add("long", [1, 2, 3], 30, priority=0)
    harness.step()
    harness.add("wide", [4, 5], [2] * 4, priority=1)
    harness.add("later", [6], 2, priority=2)
    harness.run()
    assert harness.finished_order == ["long", "wide", "later"]


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
    young = harness.add("young", list(range(100, 116)), 10)
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
    assert harness.outputs["young"] == [generate_alone(list(range(100, 116)), 10)]
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
    assert harness.outputs == {str(i): [generate_alone(prompt, 30)] for i, prompt in enumerate(prompts)}


def test_random_traffic_with_aborts():
    rng = random.Random(5)
    harness = Harness(num_blocks=16, max_num_batched_tokens=24, max_num_seqs=5)
    wanted: dict[str, list[list[int]]] = {}
    live: list[Request] = []
    for i in range(1500):
        if rng.random() < 0.4:
            prompt, count = _prompt(rng, rng.randrange(1, 60)), rng.randrange(1, 40)
            live.append(harness.add(str(i), prompt, count))
            wanted[str(i)] = [generate_alone(prompt, count)]
        live = [request for request in live if request.status is not RequestStatus.FINISHED]
        if live and rng.random() < 0.2:
            victim = live.pop(rng.randrange(len(live)))
            harness.finish(victim)
            wanted[victim.request_id] = [wanted[victim.request_id][0][: victim.sequences[0].num_output_tokens]]
        harness.step()
    harness.run()
    assert harness.outputs == wanted
    assert harness.scheduler.num_preemptions > 0
    assert harness.manager.pool.num_free == 16


# --- prefix caching ---


def test_the_next_turn_of_a_chat_hits_prompt_and_answer():
    harness = Harness(block_size=8)
    first = harness.add("turn 1", list(range(20)), 12)
    harness.run()
    history = first.sequences[0].token_ids
    computed = harness.worker.num_computed
    second = harness.add("turn 2", [*history, 7, 8, 9], 4)
    harness.run()
    # 31 of the 32 tokens were computed (the last was only sampled): three full blocks of eight.
    assert second.num_cached_tokens == 24
    assert harness.worker.num_computed - computed == 35 - 24 + 3
    assert harness.outputs["turn 2"] == [generate_alone([*history, 7, 8, 9], 4)]


@pytest.mark.parametrize("length", [8, 16, 17, 24])
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_a_fully_cached_prompt_still_computes_its_last_token(length, num_sequences):
    harness = Harness(block_size=8)
    prompt = list(range(length))
    for round_number in range(2):
        request = harness.add(str(round_number), prompt, [5] * num_sequences)
        harness.run()
        assert request.num_cached_tokens == (0 if round_number == 0 else (length - 1) // 8 * 8)
        expected = [generate_alone(prompt, 5, sequence.seed) for sequence in request.sequences]
        assert harness.outputs[str(round_number)] == expected


def test_requests_of_one_step_share_a_prompt():
    harness = Harness(block_size=8, max_num_batched_tokens=64)
    prompt = list(range(20))
    requests = [harness.add(str(i), prompt, 3) for i in range(3)]
    harness.step()
    assert [request.num_cached_tokens for request in requests] == [0, 16, 16]
    assert harness.manager.pool.num_used == 2 + 3
    harness.run()
    assert all(output == [generate_alone(prompt, 3)] for output in harness.outputs.values())


def test_salts_do_not_share():
    harness = Harness(block_size=8)
    prompt = list(range(20))
    hits = []
    for salt in (None, "a", "a", "b", None):
        request = harness.add(f"{len(hits)}", prompt, 3, cache_salt=salt)
        harness.run()
        hits.append(request.num_cached_tokens)
    assert hits == [0, 0, 16, 0, 16]


def test_recycled_blocks_are_cold_again():
    harness = Harness(num_blocks=8, block_size=8)
    prompt = list(range(30))
    cold = harness.add("cold", prompt, 6)
    harness.run()
    for i in range(4):
        harness.add(f"other {i}", [500 + i] * 40, 6)
        harness.run()
    again = harness.add("again", prompt, 6)
    harness.run()
    assert again.num_cached_tokens == cold.num_cached_tokens == 0
    assert harness.outputs["again"] == harness.outputs["cold"]
    assert harness.manager.pool.num_evictions > 0


def test_caching_can_be_reset_and_turned_off():
    harness = Harness()
    for i in range(2):
        request = harness.add(str(i), list(range(20)), 2)
        harness.run()
        harness.scheduler.reset_prefix_cache()
        assert request.num_cached_tokens == 0
        assert harness.manager.pool.num_cached == 0
    off = Harness(enable_prefix_caching=False)
    for i in range(2):
        request = off.add(str(i), list(range(20)), 2)
        off.run()
        assert request.num_cached_tokens == 0
    assert off.manager.pool.num_empty == 64


# --- several sequences ---


def test_siblings_compute_the_prompt_once_and_copy_on_the_first_write():
    harness = Harness(block_size=8)
    prompt = list(range(20))
    request = harness.add("a", prompt, [3, 9, 6, 1], seed=5)
    plan = harness.step()
    assert plan.num_scheduled_tokens == 20
    assert len(plan.scheduled[0].samples) == 4
    assert harness.manager.pool.num_used == 3
    plan = harness.step()
    # One has ended with its first token; of the other three, two copy the partly filled block.
    assert len(plan.copies) == 2
    harness.run()
    limits = (3, 9, 6, 1)
    expected = [generate_alone(prompt, n, s.seed) for n, s in zip(limits, request.sequences, strict=True)]
    assert harness.outputs["a"] == expected
    assert len({tuple(output) for output in harness.outputs["a"]}) == 4
    assert harness.manager.pool.num_used == 0


def _mixed_traffic(harness: Harness, rng: random.Random, count: int) -> dict[str, list[list[int]]]:
    """Requests with one to four sequences and some common beginnings; returns what each must give."""
    beginnings = [_prompt(rng, 24) for _ in range(3)]
    wanted = {}
    for i in range(count):
        prompt = rng.choice(beginnings)[: rng.randrange(25)] + _prompt(rng, rng.randrange(1, 30))
        limits = [rng.randrange(1, 25) for _ in range(rng.choice([1, 1, 1, 2, 4]))]
        request = harness.add(str(i), prompt, limits, seed=i, priority=rng.randrange(3))
        pairs = zip(limits, request.sequences, strict=True)
        wanted[str(i)] = [generate_alone(prompt, n, sequence.seed) for n, sequence in pairs]
    return wanted


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("order", ["fcfs", "priority"])
@pytest.mark.parametrize(("mode", "host"), [("recompute", 0), ("swap", 100), ("swap", 3), ("auto", 100)])
def test_groups_survive_preemption(caching, order, mode, host):
    harness = Harness(
        num_blocks=24,
        num_host_blocks=host,
        enable_prefix_caching=caching,
        order=order,
        preemption_mode=mode,
        recompute_seconds_per_token=1.0,
        swap_seconds_per_block=2.5,
    )
    wanted = _mixed_traffic(harness, random.Random(11), 40)
    harness.run()
    assert harness.outputs == wanted
    scheduler = harness.scheduler
    assert scheduler.num_preemptions > 0
    assert (scheduler.num_swapped_out > 0) == (mode != "recompute")
    assert scheduler.num_swapped_in == scheduler.num_swapped_out
    if mode != "auto":
        assert (scheduler.num_recomputed > 0) == (mode == "recompute" or host == 3)
    assert harness.manager.pool.num_free == 24
    assert harness.manager.host_pool.num_used == 0
    assert (scheduler.prefix_hits > 0) == caching


def test_auto_takes_the_cheaper_way():
    policy = Harness(
        preemption_mode="auto", recompute_seconds_per_token=1.0, swap_seconds_per_block=3.0
    ).scheduler.policy
    assert policy.prefers_swap(num_computed_tokens=13, num_blocks=2)
    assert not policy.prefers_swap(num_computed_tokens=12, num_blocks=2)


# --- policy ---


def test_priority_first_and_arrival_breaks_ties():
    harness = Harness(order="priority", max_num_seqs=1)
    for name, priority in (("c", 5), ("a", 1), ("b", 1), ("d", 9)):
        harness.add(name, [1, 2], 3, priority=priority)
    harness.run()
    assert harness.finished_order == ["a", "b", "c", "d"]
    fcfs = Harness(order="fcfs", max_num_seqs=1)
    for name, priority in (("c", 5), ("a", 1)):
        fcfs.add(name, [1, 2], 3, priority=priority)
    fcfs.run()
    assert fcfs.finished_order == ["c", "a"]


@pytest.mark.parametrize("scarce", [{"max_num_seqs": 2}, {"num_blocks": 5}])
def test_an_urgent_request_preempts_a_running_one(scarce):
    harness = Harness(order="priority", **scarce)
    for i in range(2):
        harness.add(f"slow {i}", [i] * 12, 20, priority=5)
    for _ in range(3):
        harness.step()
    harness.add("equal", [3] * 12, 2, priority=5)
    harness.step()
    assert harness.scheduler.num_preemptions == 0
    harness.add("urgent", [4] * 12, 2, priority=0)
    harness.run()
    assert harness.finished_order[0] == "urgent"
    assert harness.scheduler.num_preemptions > 0
    assert harness.outputs["slow 1"] == [generate_alone([1] * 12, 20)]


def test_a_huge_prompt_leaves_room_in_each_step():
    harness = Harness(max_num_batched_tokens=32, long_prefill_tokens=8, num_blocks=100)
    harness.add("huge", list(range(200)), 2)
    assert harness.step().num_scheduled_tokens == 32
    harness.add("small", [1, 2, 3], 3)
    plan = harness.step()
    assert [item.num_new_tokens for item in plan.scheduled] == [8, 3]
    harness.run()
    assert harness.finished_order == ["small", "huge"]


def test_the_watermark_keeps_blocks_for_those_running():
    harness = Harness(num_blocks=6, watermark_blocks=2, max_num_batched_tokens=64)
    harness.add("a", [1] * 16, 8)
    harness.step()
    waiting = harness.add("b", [2] * 24, 2)
    harness.step()
    assert waiting.status is RequestStatus.WAITING
    harness.run()
    assert harness.scheduler.num_preemptions == 0


# --- sliding window ---


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_sliding_window_bounds_the_blocks_held(mode):
    harness = Harness(num_blocks=13, num_host_blocks=30, block_size=4, sliding_window=16, preemption_mode=mode)
    harness.add("a", list(range(10)), 100)
    harness.run()
    most = 0
    harness.add("b", list(range(50, 60)), 100)
    while harness.scheduler.has_work():
        harness.step()
        most = max(most, harness.manager.pool.num_used)
    assert most <= 16 // 4 + 1
    for i in range(4):
        harness.add(str(i), [i] * (15 + 8 * i), [20, 25, 10])
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    for i in range(4):
        assert [len(output) for output in harness.outputs[str(i)]] == [20, 25, 10]
    assert harness.outputs["b"] == [generate_alone(list(range(50, 60)), 100)]
    assert harness.manager.pool.num_free == 13
