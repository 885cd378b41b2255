"""`BlockPool`: all KV blocks of the engine; hands them out, counts references, takes them back.

Block 0 is the null block: never handed out, never freed, a harmless target for table positions that hold nothing.
The pool knows no sequences; `BlockManager` does. Every operation is O(1) per block.
"""

from __future__ import annotations

from paged_backend.kv.block import Block, FreeQueue

NULL_BLOCK_ID = 0


class BlockPool:
    """A fixed number of blocks, each either in use (`ref_count` > 0) or in the free queue.

    Args:
        num_blocks: usable blocks; ids run from 1 to `num_blocks`, and id 0 is the null block.
    """

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [Block(block_id) for block_id in range(num_blocks + 1)]
        self._free = FreeQueue(self._blocks[1:])

    @property
    def num_blocks(self) -> int:
        """Usable blocks, without the null block."""
        return len(self._blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - self.num_free

    def ref_count(self, block_id: int) -> int:
        """How many tables hold the block."""
        return self._blocks[block_id].ref_count

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, each with one reference; the caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} are free"
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            block.ref_count = 1
        return [block.block_id for block in taken]

    def release(self, block_id: int) -> None:
        """Give up one reference; the last one makes the block free, at the end of the queue."""
        block = self._blocks[block_id]
        assert block_id != NULL_BLOCK_ID and block.ref_count > 0, f"{block} is not in use"
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free.append(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one state."""
        free_ids = [block.block_id for block in self._free]
        assert len(free_ids) == len(set(free_ids)) == len(self._free), "the free queue counts a block twice"
        assert NULL_BLOCK_ID not in free_ids, "the null block is free"
        queued = set(free_ids)
        for block in self._blocks[1:]:
            assert block.ref_count >= 0, f"{block} has a negative reference count"
            assert (block.ref_count == 0) == (block.block_id in queued), f"{block} is in no state or in two"
        assert self.num_used + self.num_free == self.num_blocks
