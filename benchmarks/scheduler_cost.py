"""What a pure decode step costs in the scheduler and in the bookkeeping around it, without a model and without torch.

    python benchmarks/scheduler_cost.py [--profile ROWS]

Times `schedule()` and what follows a step in the engine's loop: one token appended to each sequence and a check for its
end. Sequences begin at different offsets, so each step fills its share of blocks. The budget: 1 ms at 256 sequences.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from pathlib import Path

# `python benchmarks/scheduler_cost.py` puts only this file's folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paged_backend.kv.block_manager import BlockManager
from paged_backend.request import Request, Sequence
from paged_backend.sampling_params import SamplingParams
from paged_backend.sched.policy import SchedulerPolicy
from paged_backend.sched.scheduler import Scheduler

NUM_SEQUENCES = (1, 16, 64, 256, 1024)
BLOCK_SIZE = 16
PROMPT_TOKENS = 256
MAX_TOKENS = 100_000


class DecodeLoop:
    """A scheduler with `num_sequences` requests, all past their prompts."""

    def __init__(self, num_sequences: int, num_steps: int, *, prefix_caching: bool) -> None:
        per_sequence = (PROMPT_TOKENS + BLOCK_SIZE + num_steps) // BLOCK_SIZE + 2
        policy = SchedulerPolicy(
            max_num_seqs=num_sequences,
            max_num_batched_tokens=num_sequences * (PROMPT_TOKENS + BLOCK_SIZE),
            enable_prefix_caching=prefix_caching,
        )
        self.scheduler = Scheduler(BlockManager(num_sequences * per_sequence, BLOCK_SIZE), policy)
        self.requests = []
        self.sequences: dict[int, Sequence] = {}
        for index in range(num_sequences):
            prompt = [index] * (PROMPT_TOKENS + index % BLOCK_SIZE)
            request = Request(
                str(index), prompt, SamplingParams(max_tokens=MAX_TOKENS), seed=0, max_total_tokens=MAX_TOKENS
            )
            self.requests.append(request)
            self.sequences[request.sequences[0].seq_id] = request.sequences[0]
            self.scheduler.add(request)
        self.step()

    def step(self) -> int:
        """One step; returns how many sequences got a token."""
        count = 0
        for item in self.scheduler.schedule().scheduled:
            for seq_id in item.samples:
                sequence = self.sequences[seq_id]
                sequence.append(count)
                if sequence.num_tokens >= sequence.request.max_total_tokens:
                    self.scheduler.finish(sequence.request)
                count += 1
        return count

    def finish(self) -> None:
        """End all requests."""
        for request in self.requests:
            self.scheduler.finish(request)


def measure(num_sequences: int, *, prefix_caching: bool) -> tuple[float, float, float]:
    """Median wall and CPU time of a decode step, and the cost of finishing one request, in milliseconds."""
    num_steps = max(32, min(400, 40_000 // num_sequences))
    loop = DecodeLoop(num_sequences, num_steps, prefix_caching=prefix_caching)
    times, cpu_times = [], []
    for _ in range(num_steps):
        started, cpu_started = time.perf_counter(), time.thread_time()
        count = loop.step()
        cpu_times.append(time.thread_time() - cpu_started)
        times.append(time.perf_counter() - started)
        assert count == num_sequences
    started = time.perf_counter()
    loop.finish()
    finish = (time.perf_counter() - started) / num_sequences
    return 1e3 * statistics.median(times), 1e3 * statistics.median(cpu_times), 1e3 * finish


def profile(num_sequences: int) -> None:
    """Print where the time goes, by function."""
    loop = DecodeLoop(num_sequences, 100, prefix_caching=True)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(100):
        loop.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(16)


def main() -> None:
    """Print the table, or a profile."""
    parser = argparse.ArgumentParser(description="Cost of scheduling and bookkeeping per decode step.")
    parser.add_argument("--profile", type=int, metavar="ROWS", help="profile a decode step of so many sequences")
    parsed = parser.parse_args()
    if parsed.profile:
        profile(parsed.profile)
        return
    print("sequences  prefix cache  median ms  CPU ms  us per sequence  growth  finish us per request")
    for prefix_caching in (True, False):
        before: tuple[int, float] | None = None
        for count in NUM_SEQUENCES:
            median, cpu, finish = measure(count, prefix_caching=prefix_caching)
            # Below 1: cheaper than in proportion to the number of sequences.
            growth = f"{median / before[1] / (count / before[0]):.2f}" if before else "-"
            cache = "on" if prefix_caching else "off"
            per_sequence = 1e3 * median / count
            print(
                f"{count:9d}  {cache:>12}  {median:9.3f}  {cpu:6.3f}  {per_sequence:15.2f}  {growth:>6}"
                f"  {1e3 * finish:21.1f}"
            )
            before = (count, median)
    print("growth: cost relative to the row above, divided by the growth in sequences (1.00: linear)")


if __name__ == "__main__":
    main()
