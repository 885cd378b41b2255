"""The memory benchmark: allocators of the baselines, the simulation's bookkeeping, and the shape of its results."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.data import make_lengths
from benchmarks.memory import blocks, load, run
from benchmarks.memory.cost import A100_13B, StepCost
from benchmarks.memory.plots import draw
from benchmarks.memory.report import Table
from benchmarks.memory.reservation import (
    BuddyAllocator,
    ReservingManager,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)
from benchmarks.memory.simulation import Simulation
from benchmarks.memory.systems import PAGED, SYSTEMS, Paged, RateSearch, build
from benchmarks.memory.workload import Job, load_lengths, make_jobs, make_prefixed_jobs, poisson_arrivals
from paged_backend import bench
from paged_backend.errors import ConfigError
from paged_backend.kv.block_manager import BlockManager, Write
from paged_backend.sched.output import ScheduledSequence, SchedulerOutput
from paged_backend.sched.policy import SchedulerPolicy

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("num_slots", [1, 64, 1000, 15728])
def test_buddy_chunks_never_overlap_and_all_come_back(num_slots):
    rng = random.Random(num_slots)
    allocator, held = BuddyAllocator(num_slots), []
    for _ in range(400):
        if held and rng.random() < 0.45:
            allocator.free(held.pop(rng.randrange(len(held))))
        else:
            start = allocator.allocate(rng.randrange(1, max(2, num_slots // 3)))
            held += [] if start is None else [start]
        allocator.check_integrity()
    for start in held:
        allocator.free(start)
    allocator.check_integrity()
    assert allocator.num_free == num_slots
    assert allocator.allocate(1 << (num_slots.bit_length() - 1)) == 0, "freed chunks have not merged"


def test_reservation_policies():
    assert [reserve(100, 25) for reserve in (reserve_max, reserve_pow2, reserve_oracle)] == [2048, 132, 125]
    assert reserve_pow2(1000, 1025) == 2048


def test_a_reservation_is_all_or_nothing():
    manager = ReservingManager(64, reserve_oracle)
    for seq_id in (1, 2, 3):
        manager.expect(seq_id, 20, 12)
    assert manager.allocate([Write(1, 0, 20)]) is not None
    assert manager.pool.num_free == 32
    assert manager.allocate([Write(2, 0, 20), Write(3, 0, 20)]) is None
    assert manager.pool.num_free == 32
    assert manager.block_ids(1) == list(range(20))
    manager.check_integrity()
    manager.free(1)
    assert manager.pool.num_free == 64


def _policy(max_num_seqs: int = 8) -> SchedulerPolicy:
    return SchedulerPolicy(max_num_seqs=max_num_seqs, max_num_batched_tokens=64, enable_prefix_caching=False)


def _small_jobs() -> list[Job]:
    rng = random.Random(0)
    return [Job(t, [0] * rng.randrange(1, 60), rng.randrange(1, 40)) for t in poisson_arrivals(40, 20.0, 0)]


@pytest.mark.parametrize(
    "manager",
    [ReservingManager(500, reserve_oracle), ReservingManager(500, reserve_pow2), BlockManager(30, 8)],
    ids=["oracle", "pow2", "paged"],
)
def test_every_step_of_a_simulation_is_sound_and_nothing_is_left(manager):
    simulation = Simulation(manager, _policy(), StepCost(), check=True, whole_run=True)
    outcome = simulation.run(_small_jobs())
    assert outcome.normalised_latency < float("inf")
    assert manager.pool.num_free == manager.pool.num_blocks
    assert (outcome.num_preemptions > 0) == isinstance(manager, BlockManager), "only paging lets more in than may fit"
    memory = outcome.memory
    assert 0 < memory.held <= memory.held + memory.promised + memory.never_used <= memory.total


def test_slots_are_used_better_from_system_to_system():
    found = [load.saturated(system, "sharegpt_like", 120) for system in SYSTEMS]
    shares = [item["held"] for item in found]
    assert shares == sorted(shares)
    assert shares[0] < 0.3
    assert shares[-1] > 0.9
    assert found[-1]["empty_in_allocated"] < 0.04
    assert [item["running"] for item in found] == sorted(item["running"] for item in found)


def test_a_seed_determines_the_results():
    jobs = make_jobs("alpaca_like", 60, 40.0, 5)
    assert jobs == make_jobs("alpaca_like", 60, 40.0, 5) != make_jobs("alpaca_like", 60, 40.0, 6)
    first, second = (build(PAGED).run(jobs) for _ in range(2))
    assert first == second
    search = [load.saturated("Orca (Oracle)", "alpaca_like", 60) for _ in range(2)]
    assert search[0] == search[1]


@pytest.mark.parametrize("kind", ["parallel sampling", "beam search"])
def test_outputs_of_a_request_share_blocks(kind):
    found = [blocks.shared_blocks(kind, "alpaca_like", width, 10) for width in (2, 4)]
    assert 0 < found[0]["saved"] < found[1]["saved"] < 0.75
    assert all(item["copies"] > 0 for item in found)


def test_beams_are_sound_at_every_step():
    simulation = Simulation(BlockManager(24, 4), _policy(18), StepCost(), check=True)
    outcome = simulation.run([Job(0.0, [0] * 9, 20, beam_width=3) for _ in range(6)])
    assert outcome.num_preemptions > 0
    assert outcome.num_copies > 0
    assert simulation.blocks.pool.num_free == 24


def test_a_common_prefix_is_found_in_the_cache():
    jobs = make_prefixed_jobs("wmt_like", 40, 20.0, 0, prefix_tokens=80)
    assert build(PAGED, Paged(enable_prefix_caching=True)).run(jobs).cached_share > 0.5
    assert build(PAGED).run(jobs).cached_share == 0


def test_the_clock():
    prefill = SchedulerOutput(scheduled=[ScheduledSequence(1, 0, 1000, (1,))], num_scheduled_tokens=1000)
    decode = SchedulerOutput(scheduled=[ScheduledSequence(1, 999, 1, (1,))], num_scheduled_tokens=1)
    contiguous, paged = StepCost(), StepCost(block_size=16)
    assert A100_13B.num_slots == 15728
    assert contiguous.seconds(decode) < paged.seconds(decode) < contiguous.seconds(prefill)
    per_block = StepCost(block_size=16, copies_by_run=False)
    assert paged.swap_seconds([1, 2, 3]) < paged.swap_seconds([1, 3, 5]) == per_block.swap_seconds([1, 2, 3])


def test_the_rate_search_brackets_the_limit():
    search = RateSearch(lambda rate: 0.1 * rate / 7)
    assert search.run(2.0) == pytest.approx(7, rel=0.03)
    assert RateSearch(lambda rate: 0.1 * rate / 7).run(50.0) == pytest.approx(7, rel=0.03)


@pytest.mark.parametrize("trace", make_lengths.TRACES)
def test_lengths_are_what_their_script_makes_and_have_the_stated_means(trace):
    for column, law in enumerate(make_lengths.TRACES[trace]):
        values = [pair[column] for pair in load_lengths(trace)]
        assert sorted(values) == make_lengths.lengths(*law)
        assert statistics.fmean(values) == pytest.approx(law[0], rel=0.001)


def test_the_command_writes_json_and_png(tmp_path):
    numbers, picture = tmp_path / "memory.json", tmp_path / "memory.png"
    command = [sys.executable, "-m", "paged_backend.cli", "bench", "memory", "--only", "slots"]
    command += ["--scale", "0.1", "--json", str(numbers), "--png", str(picture)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "96.3 %" in done.stdout
    tables = json.loads(numbers.read_text())["tables"]
    assert set(tables) == {"slots"}
    assert tables["slots"]["data"][PAGED]["held"] > 0.9
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_recorded_results_can_be_drawn(tmp_path):
    recorded = json.loads((ROOT / "docs" / "memory.json").read_text())["tables"]
    tables = {key: Table(**content) for key, content in recorded.items()}
    assert list(tables) == list(run.EXPERIMENTS)
    draw(tables, tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert all(row[0] in tables["slots"].as_text() for row in tables["slots"].rows)


def test_mistakes_are_found_before_the_runs(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="directory does not exist"):
        run.main(json_path=tmp_path / "no" / "file.json")
    with pytest.raises(ConfigError, match="there are: slots"):
        run.main(only=["speed"])
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"paged-backend\[bench\]"):
        run.main(png_path=tmp_path / "file.png")


def test_outside_a_checkout_the_command_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "paged_backend" / "bench.py"))
    commands = argparse.ArgumentParser().add_subparsers()
    bench.add_bench(commands)
    parsed = commands.choices["bench"].parse_args(["memory"])
    with pytest.raises(ConfigError, match="runs from a checkout"):
        parsed.run(parsed)
