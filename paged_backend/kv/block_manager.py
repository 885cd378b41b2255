"""`BlockManager`: the block table of every sequence.

    position  0 ......... 15 | 16 ........ 31 | 32 ...
    table     block_ids[0]   | block_ids[1]   | block_ids[2]     (block_size 16)

A table grows only when a token needs a slot, and is given back whole. The manager knows sequences by id only: no
requests, no tokens, no tensors.
"""

from __future__ import annotations

from collections import Counter

from paged_backend.kv.block_pool import BlockPool


class BlockManager:
    """Block tables over one pool.

    Args:
        num_blocks: usable blocks of the pool.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._tables: dict[int, list[int]] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, seq_id: int) -> list[int]:
        """The sequence's table as a new list; empty for one that holds nothing."""
        return list(self._tables.get(seq_id, ()))

    def allocate(self, seq_id: int, num_tokens: int) -> list[int] | None:
        """Make the table cover positions 0 to `num_tokens` - 1.

        Returns:
            The block ids added (perhaps none), or None, with nothing changed, if too few blocks are free.
        """
        table = self._tables.get(seq_id)
        missing = self.blocks_for(num_tokens) - (len(table) if table else 0)
        if missing <= 0:
            return []
        if missing > self.pool.num_free:
            return None
        added = self.pool.allocate(missing)
        self._tables.setdefault(seq_id, []).extend(added)
        return added

    def free(self, seq_id: int) -> None:
        """Give the whole table back, tail first; a sequence without one is fine."""
        for block_id in reversed(self._tables.pop(seq_id, ())):
            self.pool.release(block_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless reference counts equal the tables that hold each block, and the pool is sound."""
        self.pool.check_integrity()
        held = Counter(block_id for table in self._tables.values() for block_id in table)
        for block_id in range(1, self.pool.num_blocks + 1):
            count = self.pool.ref_count(block_id)
            assert count == held[block_id], f"block {block_id}: {count} references, {held[block_id]} tables hold it"
