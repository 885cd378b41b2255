"""A state machine does to pool, tables and scheduler whatever clients and clocks may do, in any order.

After every action the integrity checks run; the fake worker verifies that each token's history is where the tables
say; and whatever finishes must be what it would have been alone.
"""

from __future__ import annotations

from fake_worker import generate_alone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_harness import Harness

from paged_backend.request import Request, RequestStatus

BLOCK_SIZE = 4
NUM_BLOCKS = 14


class SchedulerMachine(RuleBasedStateMachine):
    """Actions: add, step, abort, reset the cache, fork and drop beams-like sequences; policies vary by run."""

    @initialize(
        host=st.sampled_from([0, 5, 40]),
        caching=st.booleans(),
        order=st.sampled_from(["fcfs", "priority"]),
        mode=st.sampled_from(["recompute", "swap", "auto"]),
        window=st.sampled_from([None, None, 6]),
        watermark=st.integers(0, 2),
        long_prefill=st.sampled_from([0, 3]),
        budget=st.sampled_from([6, 16, 64]),
    )
    def start(self, host, caching, order, mode, window, watermark, long_prefill, budget):
        self.harness = Harness(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_host_blocks=host,
            max_num_seqs=6,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            order=order,
            preemption_mode=mode,
            recompute_seconds_per_token=1.0,
            swap_seconds_per_block=2.0,
            watermark_blocks=watermark,
            long_prefill_tokens=long_prefill,
            sliding_window=window,
        )
        self.expected: dict[str, list[list[int]]] = {}
        self.live: dict[str, Request] = {}

    @rule(
        beginning=st.integers(0, 2),
        length=st.integers(1, 20),
        limits=st.lists(st.integers(1, 12), min_size=1, max_size=3),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, "a"]),
    )
    def add(self, beginning, length, limits, priority, salt):
        prompt = [beginning * 100 + i // 7 for i in range(length)]
        if not self._fits(length, limits):
            return
        name = str(len(self.expected))
        request = self.harness.add(name, prompt, limits, seed=len(name) * 7, priority=priority, cache_salt=salt)
        pairs = zip(limits, request.sequences, strict=True)
        self.expected[name] = [generate_alone(prompt, n, sequence.seed) for n, sequence in pairs]
        self.live[name] = request

    @staticmethod
    def _fits(length: int, limits: list[int]) -> bool:
        """The engine's check at submission: alone, the request fits the pool (windows not counted)."""
        shared = length // BLOCK_SIZE if len(limits) > 1 else 0
        longest = -(-(length + max(limits) - 1) // BLOCK_SIZE)
        return shared + len(limits) * (longest - shared) <= NUM_BLOCKS

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self._unfinished())
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self._unfinished())))
        request = self.live.pop(name)
        self.harness.finish(request)
        self.expected[name] = [
            tokens[: sequence.num_output_tokens]
            for tokens, sequence in zip(self.expected[name], request.sequences, strict=True)
        ]

    @rule()
    def reset_cache(self):
        self.harness.scheduler.reset_prefix_cache()

    def _unfinished(self) -> list[str]:
        return [name for name, request in self.live.items() if request.status is not RequestStatus.FINISHED]

    @invariant()
    def integrity(self):
        if hasattr(self, "harness"):
            self.harness.scheduler.check_integrity()

    @invariant()
    def finished_outputs_are_right(self):
        if hasattr(self, "harness"):
            for name, outputs in self.harness.outputs.items():
                assert outputs == self.expected[name]

    def teardown(self):
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        assert self.harness.outputs == self.expected
        self.harness.step()
        assert not self.harness.worker.rows
        assert self.harness.manager.pool.num_used == 0
        assert self.harness.manager.host_pool.num_used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
