"""A worker without a model: keeps rows and KV slots as the real one does, and checks every read.

Each slot remembers which token was written at which position. Before a "forward pass" reads a sequence's history, the
fake verifies through the block table that every earlier position still holds that sequence's own token: a block handed
to two owners, a stale table or a skipped position shows at once. The next token is a hash of all tokens so far, so any
two schedules of the same request must generate the same text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from paged_backend.sched.output import SchedulerOutput, WorkerOutput

VOCAB_SIZE = 1000


def next_token(token_ids: list[int]) -> int:
    """The "model": a pure function of all tokens so far."""
    digest = hashlib.sha256(repr(token_ids).encode()).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB_SIZE


def generate_alone(prompt: list[int], count: int) -> list[int]:
    """What `count` greedy tokens after `prompt` must be."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


@dataclass
class _Row:
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class FakeWorker:
    """Executes plans; `slots` maps a slot to the (position, token) written there last."""

    block_size: int
    rows: dict[int, _Row] = field(default_factory=dict)
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)

    def execute(self, plan: SchedulerOutput) -> WorkerOutput:
        """Apply the differences, write and verify the KV slots, and sample."""
        for seq_id in plan.removed:
            del self.rows[seq_id]
        for new in plan.new:
            assert new.seq_id not in self.rows, "a row was created twice"
            self.rows[new.seq_id] = _Row(list(new.token_ids), list(new.block_ids))
        for seq_id, block_ids in plan.new_block_ids.items():
            self.rows[seq_id].block_ids += block_ids
        assert sum(item.num_new_tokens for item in plan.scheduled) == plan.num_scheduled_tokens
        assert len({item.seq_id for item in plan.scheduled}) == len(plan.scheduled)
        # All writes come before all reads, as in one layer of the real forward pass.
        for item in plan.scheduled:
            self._write(item.seq_id, item.num_computed_tokens, item.num_new_tokens)
        output = WorkerOutput([], [])
        for item in plan.scheduled:
            end = item.num_computed_tokens + item.num_new_tokens
            row = self.rows[item.seq_id]
            self._verify(row, end)
            assert item.samples == (end == len(row.token_ids))
            if item.samples:
                row.token_ids.append(next_token(row.token_ids))
                output.seq_ids.append(item.seq_id)
                output.token_ids.append(row.token_ids[-1])
        return output

    def _slot(self, row: _Row, position: int) -> int:
        block_id = row.block_ids[position // self.block_size]
        assert block_id != 0, "the null block was used"
        return block_id * self.block_size + position % self.block_size

    def _write(self, seq_id: int, start: int, count: int) -> None:
        row = self.rows[seq_id]
        assert count > 0
        for position in range(start, start + count):
            self.slots[self._slot(row, position)] = (position, row.token_ids[position])

    def _verify(self, row: _Row, end: int) -> None:
        for position in range(end):
            found = self.slots.get(self._slot(row, position))
            assert found == (position, row.token_ids[position]), f"position {position} holds {found}"
