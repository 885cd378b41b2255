"""`SchedulerPolicy`: the scheduler's limits and choices, and the rule that says when swapping beats recomputing.

Plain numbers, so that tests and simulations can set them; the engine fills them from its configuration and from what
the worker measured. Knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

PREEMPTION_MODES = ("auto", "recompute", "swap")


@dataclass(frozen=True, slots=True)
class SchedulerPolicy:
    """Limits and choices of a scheduler.

    Args:
        max_num_seqs: sequences running at most.
        max_num_batched_tokens: tokens of one step at most; at least `max_num_seqs`.
        order: `fcfs` or `priority`.
        enable_prefix_caching: find and keep the contents of full blocks.
        preemption_mode: `recompute`, `swap` (where the host pool has room), or `auto`: the cheaper of the two.
        recompute_seconds_per_token, swap_seconds_per_block: measured costs that `auto` compares; a block is counted
            twice, for it travels both ways.
        watermark_blocks: free blocks that an admission must leave to those running, against admitting what must be
            preempted at once.
        long_prefill_tokens: longest chunk of one sequence while others want a share of the step; 0: no limit.
        sliding_window: tokens that a token attends to, itself included; None: all.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    order: str = "fcfs"
    enable_prefix_caching: bool = True
    preemption_mode: str = "recompute"
    recompute_seconds_per_token: float = 0.0
    swap_seconds_per_block: float = 0.0
    watermark_blocks: int = 0
    long_prefill_tokens: int = 0
    sliding_window: int | None = None

    def prefers_swap(self, num_computed_tokens: int, num_blocks: int) -> bool:
        """Whether to preempt by swapping a request with so many computed tokens in so many distinct blocks."""
        if self.preemption_mode != "auto":
            return self.preemption_mode == "swap"
        recompute = num_computed_tokens * self.recompute_seconds_per_token
        return 2 * num_blocks * self.swap_seconds_per_block < recompute
