"""The clock: how long a step would take on the paper's machine, from stated constants.

OPT-13B in fp16 on one A100 with 40 GB, as in the paper's table 1: 26 GB of weights, 12 GB left for the KV cache. A step
reads the weights once or is bound by arithmetic, whichever takes longer; it reads the KV cache of every sequence it
computes; and it has a fixed cost. LLaMA-13B (shared prefixes) has the same sizes. Nothing here was fitted to what the
paper found. Knows plans, no requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paged_backend.sched.output import SchedulerOutput


@dataclass(frozen=True)
class Machine:
    """Model and device.

    Attributes:
        num_parameters, num_layers, hidden_size: of the model.
        bytes_per_element: of weights and KV cache.
        kv_bytes: memory for the KV cache.
        memory_bandwidth: bytes/s reached: 80 % of the data sheet's 1555 GB/s.
        flops: operations/s reached: half of the data sheet's 312 TFLOP/s.
        step_seconds: launching, sampling and bookkeeping, whatever the batch.
        host_bandwidth: bytes/s reached over PCIe 4.0 x16 (32 GB/s nominal).
        copy_seconds: fixed cost of one copy between device and host.
        tokens_per_block_lookup: what following a block table costs a paged kernel per block, in tokens it could have
            read instead. 3.7 makes it 23 % slower than one over contiguous memory at 16 tokens per block: the paper
            measures 20-26 % (section 7.1) and does not say how that depends on the block size.
    """

    num_parameters: float = 13.0e9
    num_layers: int = 40
    hidden_size: int = 5120
    bytes_per_element: int = 2
    kv_bytes: float = 12 * 2**30
    memory_bandwidth: float = 0.8 * 1555e9
    flops: float = 0.5 * 312e12
    step_seconds: float = 0.004
    host_bandwidth: float = 25e9
    copy_seconds: float = 10e-6
    tokens_per_block_lookup: float = 3.7

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.hidden_size * self.bytes_per_element

    @property
    def num_slots(self) -> int:
        """Tokens that the KV cache holds: 15.7 thousand, as in the paper."""
        return int(self.kv_bytes // self.kv_bytes_per_token)


A100_13B = Machine()


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step.

    Args:
        machine: model and device.
        block_size: tokens per block that the attention kernel reads through a table; 0: contiguous memory.
        copies_by_run: one copy per layer for each run of consecutive host blocks, as this project's worker makes them;
            else one for each block, as the paper's system did.
    """

    machine: Machine = A100_13B
    block_size: int = 0
    copies_by_run: bool = True

    def seconds(self, plan: SchedulerOutput) -> float:
        """Duration of the step."""
        machine = self.machine
        history = attended = 0.0
        for item in plan.scheduled:
            end = item.num_computed_tokens + item.num_new_tokens
            history += end
            if item.num_new_tokens > 1:
                attended += item.num_new_tokens * (item.num_computed_tokens + end) / 2
        seconds = machine.step_seconds + self.linear_seconds(plan.num_scheduled_tokens)
        seconds += history * self._slowdown() * machine.kv_bytes_per_token / machine.memory_bandwidth
        seconds += 4 * machine.num_layers * machine.hidden_size * attended / machine.flops
        if plan.swap_out or plan.swap_in:
            seconds += self.swap_seconds(host for _, host in plan.swap_out)
            seconds += self.swap_seconds(host for host, _ in plan.swap_in)
        return seconds

    def linear_seconds(self, num_tokens: int) -> float:
        """All layers but attention, for a batch of so many tokens."""
        machine = self.machine
        read = machine.num_parameters * machine.bytes_per_element / machine.memory_bandwidth
        return max(read, 2 * machine.num_parameters * num_tokens / machine.flops)

    def recompute_seconds(self, num_tokens: int) -> float:
        """Arithmetic of prefilling `num_tokens` again, in steps that read the weights anyway."""
        return 2 * self.machine.num_parameters * num_tokens / self.machine.flops

    def swap_seconds(self, host_blocks: Iterable[int]) -> float:
        """Moving blocks to or from these host blocks, one way."""
        blocks = list(host_blocks)
        machine = self.machine
        if self.copies_by_run:
            pieces = sum(1 for i, block in enumerate(blocks) if i == 0 or block != blocks[i - 1] + 1)
        else:
            pieces = len(blocks)
        moved = len(blocks) * max(self.block_size, 1) * machine.kv_bytes_per_token
        # Keys and values of a layer are separate copies.
        return pieces * 2 * machine.num_layers * machine.copy_seconds + moved / machine.host_bandwidth

    def _slowdown(self) -> float:
        """Time of a kernel that reads through a block table, relative to one over contiguous memory."""
        return 1 + self.machine.tokens_per_block_lookup / self.block_size if self.block_size else 1.0
