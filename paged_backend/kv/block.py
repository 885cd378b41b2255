"""`Block`: the bookkeeping of one KV block, and the intrusive queue that free blocks wait in.

A block's id is its index into every layer's cache tensors; this module does not know those, nor who uses a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paged_backend.kv.block_hash import BlockHash


class Block:
    """One KV block: its id, how many tables hold it, the hash of its content if that is findable, and its links
    while it is free."""

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: BlockHash | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, hashed={self.block_hash is not None})"


class FreeQueue:
    """Doubly linked list threaded through the blocks themselves: append, pop and removal from the middle are O(1)."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        # Two sentinels, so that no operation has a special case at an end.
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self._size = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def append(self, block: Block) -> None:
        """Put a block that is in no queue at the end."""
        last = self._tail.prev_free
        assert last is not None and block.next_free is None, f"{block} is queued already"
        last.next_free = block
        block.prev_free = last
        block.next_free = self._tail
        self._tail.prev_free = block
        self._size += 1

    def remove(self, block: Block) -> None:
        """Take a queued block out, wherever it is."""
        before, after = block.prev_free, block.next_free
        assert before is not None and after is not None, f"{block} is not queued"
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self._size -= 1

    def popleft(self) -> Block:
        """Take the block that has waited longest; the queue must not be empty."""
        block = self._head.next_free
        assert block is not None and block is not self._tail, "the free queue is empty"
        self.remove(block)
        return block
