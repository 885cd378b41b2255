"""A worker without a model: keeps rows and KV slots as the real one does, and checks every read.

Each slot remembers which token was written at which position. Before a "forward pass" reads a sequence's history, the
fake verifies through the block table that every earlier position still holds that sequence's own token: a block handed
to two owners, a stale table, a forgotten copy or a skipped position shows at once. The next token is a hash of all
tokens so far and of the seed, so any two schedules of the same request must generate the same tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from paged_backend.sched.output import NewSequence, SchedulerOutput, WorkerOutput

VOCAB_SIZE = 1000


def next_token(token_ids: list[int], seed: int = 0) -> int:
    """The "model": a pure function of all tokens so far, and the seed."""
    digest = hashlib.sha256(repr((seed, token_ids)).encode()).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB_SIZE


def generate_alone(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    """What `count` tokens after `prompt` must be."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids, seed))
    return token_ids[len(prompt) :]


@dataclass
class _Row:
    token_ids: list[int]
    block_ids: list[int]
    seed: int


@dataclass
class FakeWorker:
    """Executes plans; `blocks` and `host` map a block to its {offset: (position, token)}.

    With `window`, a token reads only the last so many positions, itself included.
    """

    block_size: int
    window: int | None = None
    rows: dict[int, _Row] = field(default_factory=dict)
    blocks: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    host: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    num_computed: int = 0

    def execute(self, plan: SchedulerOutput) -> WorkerOutput:
        """Apply the differences, write and verify the KV slots, and sample."""
        self._apply(plan)
        assert sum(item.num_new_tokens for item in plan.scheduled) == plan.num_scheduled_tokens
        assert len({item.seq_id for item in plan.scheduled}) == len(plan.scheduled)
        self.num_computed += plan.num_scheduled_tokens
        # All writes come before all reads, as in one layer of the real forward pass.
        written: dict[tuple[int, int], int] = {}
        for item in plan.scheduled:
            self._write(item.seq_id, item.num_computed_tokens, item.num_new_tokens, written)
        output = WorkerOutput([], [])
        for item in plan.scheduled:
            end = item.num_computed_tokens + item.num_new_tokens
            row = self.rows[item.seq_id]
            self._verify(row, item.num_computed_tokens, end)
            assert (item.seq_id in item.samples) == bool(item.samples) == (end == len(row.token_ids))
            prefix = list(row.token_ids)
            for seq_id in item.samples:
                sampling = self.rows[seq_id]
                assert sampling.token_ids == prefix, "a sibling samples from another's logits"
                sampling.token_ids.append(next_token(prefix, sampling.seed))
                output.seq_ids.append(seq_id)
                output.token_ids.append(sampling.token_ids[-1])
        return output

    def _apply(self, plan: SchedulerOutput) -> None:
        for seq_id in plan.removed:
            del self.rows[seq_id]
        assert not (plan.swap_in and plan.swap_out)
        self._copy(plan.swap_out, self.blocks, self.host)
        self._copy(plan.swap_in, self.host, self.blocks)
        self._copy(plan.copies, self.blocks, self.blocks)
        for new in plan.new:
            self._add(new)
        for seq_id, token_ids in plan.new_token_ids.items():
            self.rows[seq_id].token_ids += token_ids
        for seq_id, block_ids in plan.new_block_ids.items():
            self.rows[seq_id].block_ids += block_ids
        for seq_id, entries in plan.replaced_block_ids.items():
            for index, block_id in entries:
                self.rows[seq_id].block_ids[index] = block_id
        for seq_id, count in plan.null_blocks.items():
            self.rows[seq_id].block_ids[:count] = [0] * count

    def _add(self, new: NewSequence) -> None:
        assert new.seq_id not in self.rows, "a row was created twice"
        self.rows[new.seq_id] = _Row(list(new.token_ids), list(new.block_ids), new.seed)

    @staticmethod
    def _copy(pairs: list[tuple[int, int]], source: dict, target: dict) -> None:
        contents = [dict(source.get(src, {})) for src, _ in pairs]
        for (_, dst), content in zip(pairs, contents, strict=True):
            target[dst] = content

    def _write(self, seq_id: int, start: int, count: int, written: dict[tuple[int, int], int]) -> None:
        row = self.rows[seq_id]
        assert count > 0
        for position in range(start, start + count):
            block_id, offset = self._slot(row, position)
            assert written.setdefault((block_id, offset), seq_id) == seq_id, "two sequences write one slot"
            self.blocks.setdefault(block_id, {})[offset] = (position, row.token_ids[position])

    def _slot(self, row: _Row, position: int) -> tuple[int, int]:
        block_id = row.block_ids[position // self.block_size]
        assert block_id != 0, "the null block was used"
        return block_id, position % self.block_size

    def _verify(self, row: _Row, start: int, end: int) -> None:
        first = 0 if self.window is None else max(0, start - self.window + 1)
        for position in range(first, end):
            block_id, offset = self._slot(row, position)
            found = self.blocks.get(block_id, {}).get(offset)
            assert found == (position, row.token_ids[position]), f"position {position} holds {found}"
