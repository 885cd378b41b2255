"""The systems compared: one scheduler, four ways to keep its memory; and how to find the load that each sustains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.memory.beams import SHARPNESS
from benchmarks.memory.cost import A100_13B, StepCost
from benchmarks.memory.reservation import ReservingManager, reserve_max, reserve_oracle, reserve_pow2
from benchmarks.memory.simulation import Simulation
from paged_backend.kv.block_manager import BlockManager
from paged_backend.sched.policy import SchedulerPolicy

RESERVATIONS = {"Orca (Max)": reserve_max, "Orca (Pow2)": reserve_pow2, "Orca (Oracle)": reserve_oracle}
PAGED = "paged"
SYSTEMS = (*RESERVATIONS, PAGED)
BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2048
# The engine's default: share of the blocks that an admission leaves free.
WATERMARK = 0.01
# Seconds per output token up to which a load counts as sustained: four times what an idle system needs.
LATENCY_LIMIT = 0.1


@dataclass(frozen=True)
class Paged:
    """Settings of the paged system; those of the scheduler are named as in `SchedulerPolicy`."""

    block_size: int = BLOCK_SIZE
    enable_prefix_caching: bool = False
    preemption_mode: str = "recompute"
    copies_by_run: bool = True
    sharpness: float = SHARPNESS

    def build(self) -> Simulation:
        """A fresh system. Its host pool is as large as the device's."""
        num_blocks = A100_13B.num_slots // self.block_size
        cost = StepCost(block_size=self.block_size, copies_by_run=self.copies_by_run)
        policy = SchedulerPolicy(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            enable_prefix_caching=self.enable_prefix_caching,
            preemption_mode=self.preemption_mode,
            recompute_seconds_per_token=cost.recompute_seconds(1),
            swap_seconds_per_block=cost.swap_seconds([0]),
            watermark_blocks=int(WATERMARK * num_blocks),
        )
        blocks = BlockManager(num_blocks, self.block_size, 0 if self.preemption_mode == "recompute" else num_blocks)
        return Simulation(blocks, policy, cost, sharpness=self.sharpness)


def build(system: str, paged: Paged | None = None) -> Simulation:
    """A fresh system by name; `paged` configures the paged one."""
    if system == PAGED:
        return (paged or Paged()).build()
    policy = SchedulerPolicy(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS, enable_prefix_caching=False
    )
    return Simulation(ReservingManager(A100_13B.num_slots, RESERVATIONS[system]), policy, StepCost())


@dataclass
class RateSearch:
    """Finds the highest request rate with a normalised latency within `LATENCY_LIMIT`.

    Args:
        latency_at: normalised latency at a rate; infinite for a run that was given up.
        growth: factor between the rates tried until one is sustained and one is not.
        refinements: bisections between those two.
    """

    latency_at: Callable[[float], float]
    growth: float = 1.2
    refinements: int = 2
    points: dict[float, float] = field(default_factory=dict)

    def run(self, guess: float) -> float:
        """The rate, to within growth ** (1 / 2 ** (refinements + 1)); `points` has all rates tried."""
        low = high = None
        rate = guess
        while low is None or high is None:
            if self._is_sustained(rate):
                low, rate = rate, rate * self.growth
            else:
                high, rate = rate, rate / self.growth
        for _ in range(self.refinements):
            rate = math.sqrt(low * high)
            low, high = (rate, high) if self._is_sustained(rate) else (low, rate)
        return math.sqrt(low * high)

    def _is_sustained(self, rate: float) -> bool:
        self.points[rate] = self.latency_at(rate)
        return self.points[rate] <= LATENCY_LIMIT
