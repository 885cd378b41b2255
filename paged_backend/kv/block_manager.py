"""`BlockManager`: the block table of every sequence, how tables share blocks, and where they go when swapped out.

    position  0 ......... 15 | 16 ........ 31 | 32 ...
    table     block_ids[0]   | block_ids[1]   | block_ids[2]     (block_size 16)

A table grows only when a token needs a slot. Tables share blocks by `fork` and by cache hits; a block that another
table holds, or that can be found by its content, is copied before it is written. Behind a sliding window table entries
become the null block, so that indices stay positional. The manager knows sequences by id only: no requests, no tokens,
no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paged_backend.kv.block_hash import BlockHash
from paged_backend.kv.block_pool import NULL_BLOCK_ID, BlockPool


class Write(NamedTuple):
    """Positions `start` to `end` - 1 of a sequence are about to be written."""

    seq_id: int
    start: int
    end: int


@dataclass(slots=True)
class TableChanges:
    """What an allocation did to the tables of some sequences.

    Attributes:
        appended: per sequence, block ids added at the table's end.
        replaced: per sequence, (table index, new block id).
        copies: (source block, destination block) whose contents must be copied before the writes.
        nulls: per sequence, how many leading table entries a sliding window has newly made null.
    """

    appended: dict[int, list[int]] = field(default_factory=dict)
    replaced: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    nulls: dict[int, int] = field(default_factory=dict)


class BlockManager:
    """Block tables over one pool on the device and, for swapping, one on the host.

    Args:
        num_blocks: usable blocks of the pool.
        block_size: tokens per block.
        num_host_blocks: usable blocks of the host pool; 0: nothing can be swapped out.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        self.block_size = block_size
        self.num_copies = 0
        self._tables: dict[int, list[int]] = {}
        self._host_tables: dict[int, list[int]] = {}
        # Leading table entries that a sliding window has released.
        self._released: dict[int, int] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, seq_id: int) -> list[int]:
        """The sequence's table as a new list; empty for one that holds nothing."""
        return list(self._tables.get(seq_id, ()))

    # --- growing ---

    def allocate(self, writes: Sequence[Write]) -> TableChanges | None:
        """Make the tables of `writes` ready to be written: grown to their ends, nothing shared where they write.

        All or nothing: returns None, with nothing changed, if too few blocks are free.
        """
        if self._blocks_needed(writes) > self.pool.num_free:
            return None
        changes = TableChanges()
        for write in writes:
            table = self._tables.setdefault(write.seq_id, [])
            missing = self.blocks_for(write.end) - len(table)
            for index in range(write.start // self.block_size, len(table)):
                if not self.pool.is_writable(table[index]):
                    self._copy(write.seq_id, index, changes)
            if missing > 0:
                added = self.pool.allocate(missing)
                table += added
                changes.appended[write.seq_id] = added
        return changes

    def _blocks_needed(self, writes: Sequence[Write]) -> int:
        needed = 0
        writers: dict[int, int] = {}
        for write in writes:
            table = self._tables.get(write.seq_id, ())
            needed += max(0, self.blocks_for(write.end) - len(table))
            for block_id in table[write.start // self.block_size :]:
                writers[block_id] = writers.get(block_id, 0) + 1
        for block_id, count in writers.items():
            # Of those that alone hold a block, the last one to write may keep it.
            keeps = not self.pool.is_hashed(block_id) and self.pool.ref_count(block_id) == count
            needed += count - keeps
        return needed

    def _copy(self, seq_id: int, index: int, changes: TableChanges) -> None:
        """Copy-on-write of one table entry."""
        table = self._tables[seq_id]
        source = table[index]
        (table[index],) = self.pool.allocate(1)
        self.pool.release(source)
        changes.copies.append((source, table[index]))
        changes.replaced.setdefault(seq_id, []).append((index, table[index]))
        self.num_copies += 1

    # --- sharing ---

    def find_cached(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Blocks that hold the longest known beginning of a chain of contents."""
        found = []
        for content in hashes:
            block_id = self.pool.lookup(content)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def start(self, seq_id: int, cached: Sequence[int]) -> None:
        """Begin a sequence's table with cached blocks, sharing them."""
        assert seq_id not in self._tables, f"sequence {seq_id} has a table"
        for block_id in cached:
            self.pool.touch(block_id)
        self._tables[seq_id] = list(cached)

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Let the child share the parent's blocks of the first `num_tokens` tokens."""
        assert child_id not in self._tables, f"sequence {child_id} has a table"
        table = self._tables[parent_id][: self.blocks_for(num_tokens)]
        for block_id in table:
            if block_id != NULL_BLOCK_ID:
                self.pool.touch(block_id)
        self._tables[child_id] = table
        if parent_id in self._released:
            self._released[child_id] = min(self._released[parent_id], len(table))

    def register(self, seq_id: int, hashes: Sequence[BlockHash], first: int) -> None:
        """Make the sequence's full blocks from table index `first` to `len(hashes)` - 1 findable by content."""
        table = self._tables[seq_id]
        for index in range(first, len(hashes)):
            if table[index] != NULL_BLOCK_ID:
                self.pool.register(table[index], hashes[index])

    def reset_cache(self) -> None:
        """Forget the contents of all blocks."""
        self.pool.reset_cache()

    # --- shrinking ---

    def free(self, seq_id: int) -> None:
        """Give a sequence's blocks back, on the device and on the host, tail first; one without any is fine."""
        self._release_table(seq_id)
        for block_id in reversed(self._host_tables.pop(seq_id, ())):
            if block_id != NULL_BLOCK_ID:
                self.host_pool.release(block_id)

    def _release_table(self, seq_id: int) -> None:
        self._released.pop(seq_id, None)
        # Tail first: heads are hit more often, and the block released first is evicted first.
        for block_id in reversed(self._tables.pop(seq_id, ())):
            if block_id != NULL_BLOCK_ID:
                self.pool.release(block_id)

    def release_before(self, seq_id: int, position: int) -> int:
        """Give up the blocks wholly before `position`; returns how many leading table entries are null now, or 0 if
        that has not changed."""
        table = self._tables.get(seq_id, [])
        known = self._released.get(seq_id, 0)
        end = min(max(position, 0) // self.block_size, len(table))
        if end <= known:
            return 0
        for index in reversed(range(known, end)):
            self.pool.release(table[index])
            table[index] = NULL_BLOCK_ID
        self._released[seq_id] = end
        return end

    # --- swapping ---

    def swap_out(self, seq_ids: Sequence[int]) -> list[tuple[int, int]] | None:
        """Move the tables of some sequences to the host, each shared block once.

        Returns:
            (device block, host block) pairs to copy before the device blocks are written again, or None, with nothing
            changed, if the host pool has too few free blocks.
        """
        unique = {b for seq_id in seq_ids for b in self._tables.get(seq_id, ()) if b != NULL_BLOCK_ID}
        if len(unique) > self.host_pool.num_free:
            return None
        moved = self._move(seq_ids, self._tables, self._host_tables, self.host_pool)
        for seq_id in seq_ids:
            for block_id in reversed(self._tables.pop(seq_id, ())):
                if block_id != NULL_BLOCK_ID:
                    self.pool.release(block_id)
        return moved

    def swap_in(self, seq_ids: Sequence[int], reserve: int = 0) -> list[tuple[int, int]] | None:
        """The way back: (host block, device block) pairs to copy before the next step reads them.

        Returns None, with nothing changed, if that would leave fewer than `reserve` device blocks free.
        """
        unique = {b for seq_id in seq_ids for b in self._host_tables.get(seq_id, ()) if b != NULL_BLOCK_ID}
        if len(unique) + reserve > self.pool.num_free:
            return None
        moved = self._move(seq_ids, self._host_tables, self._tables, self.pool)
        for seq_id in seq_ids:
            for block_id in reversed(self._host_tables.pop(seq_id, ())):
                if block_id != NULL_BLOCK_ID:
                    self.host_pool.release(block_id)
        return moved

    @staticmethod
    def _move(
        seq_ids: Sequence[int], source: dict[int, list[int]], target: dict[int, list[int]], pool: BlockPool
    ) -> list[tuple[int, int]]:
        """Rebuild the tables in `target` with new blocks of `pool`, sharing as in `source`."""
        moved: dict[int, int] = {NULL_BLOCK_ID: NULL_BLOCK_ID}
        for seq_id in seq_ids:
            if seq_id not in source:
                continue
            table = []
            for block_id in source[seq_id]:
                if block_id not in moved:
                    (moved[block_id],) = pool.allocate(1)
                elif block_id != NULL_BLOCK_ID:
                    pool.touch(moved[block_id])
                table.append(moved[block_id])
            target[seq_id] = table
        del moved[NULL_BLOCK_ID]
        return list(moved.items())

    # --- checking ---

    def check_integrity(self) -> None:
        """Raise AssertionError unless reference counts equal the tables that hold a block, and the pools are sound."""
        for pool, tables in ((self.pool, self._tables), (self.host_pool, self._host_tables)):
            pool.check_integrity()
            held = Counter(block_id for table in tables.values() for block_id in table)
            for block_id in range(1, pool.num_blocks + 1):
                count = pool.ref_count(block_id)
                assert count == held[block_id], f"block {block_id}: {count} references, {held[block_id]} tables hold it"
        assert not self._tables.keys() & self._host_tables.keys(), "a sequence is on the device and on the host"
        for seq_id, count in self._released.items():
            table = self._tables.get(seq_id) or self._host_tables[seq_id]
            assert all(block_id == NULL_BLOCK_ID for block_id in table[:count])
        for seq_id, table in (*self._tables.items(), *self._host_tables.items()):
            assert NULL_BLOCK_ID not in table[self._released.get(seq_id, 0) :], "a hole in a block table"
