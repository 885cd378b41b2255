"""`BlockPool`: all KV blocks of the engine; hands them out, counts references, remembers contents, takes them back.

    in use (ref_count > 0)  --last release-->  free, cached (has a hash)  --evicted-->  in use
             \\---------------last release-->  free, empty  --------------allocated-->  in use

Empty blocks are handed out first, then the cached block that was released longest ago. A cached block can come back
by its content (`lookup`, `touch`); so can one in use, which is how sequences share. Block 0 is the null block: never
handed out, never freed, a harmless target for table positions that hold nothing. The pool knows no sequences;
`BlockManager` does. Every operation is O(1) per block.
"""

from __future__ import annotations

from paged_backend.kv.block import Block, FreeQueue
from paged_backend.kv.block_hash import BlockHash

NULL_BLOCK_ID = 0


class BlockPool:
    """A fixed number of blocks, each in use, free and cached, or free and empty.

    Args:
        num_blocks: usable blocks; ids run from 1 to `num_blocks`, and id 0 is the null block.
    """

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [Block(block_id) for block_id in range(num_blocks + 1)]
        self._empty = FreeQueue(self._blocks[1:])
        self._cached = FreeQueue()
        self._by_hash: dict[BlockHash, Block] = {}
        self.num_evictions = 0

    @property
    def num_blocks(self) -> int:
        """Usable blocks, without the null block."""
        return len(self._blocks) - 1

    @property
    def num_empty(self) -> int:
        """Free blocks whose content is of no use."""
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - self.num_free

    def ref_count(self, block_id: int) -> int:
        """How many tables hold the block."""
        return self._blocks[block_id].ref_count

    def is_hashed(self, block_id: int) -> bool:
        """True when the block can be found by its content; such a block is never written again."""
        return self._blocks[block_id].block_hash is not None

    def is_writable(self, block_id: int) -> bool:
        """True when one table alone holds the block and nobody can find it by its content."""
        block = self._blocks[block_id]
        return block.ref_count == 1 and block.block_hash is None

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, each with one reference; the caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} are free"
        return [self._allocate_one() for _ in range(count)]

    def _allocate_one(self) -> int:
        if len(self._empty):
            block = self._empty.popleft()
        else:
            block = self._cached.popleft()
            self._forget(block)
            self.num_evictions += 1
        block.ref_count = 1
        return block.block_id

    def touch(self, block_id: int) -> None:
        """Add a reference to a block in use or cached."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            assert block.block_hash is not None, f"{block} is empty"
            self._cached.remove(block)
        block.ref_count += 1

    def release(self, block_id: int) -> None:
        """Give up one reference; the last one makes the block free, at the end of its queue."""
        block = self._blocks[block_id]
        assert block_id != NULL_BLOCK_ID and block.ref_count > 0, f"{block} is not in use"
        block.ref_count -= 1
        if block.ref_count == 0:
            (self._empty if block.block_hash is None else self._cached).append(block)

    def register(self, block_id: int, content: BlockHash) -> None:
        """Make a full block in use findable; a content that another block holds already stays with that one."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"{block} is not in use"
        if block.block_hash is None and content not in self._by_hash:
            block.block_hash = content
            self._by_hash[content] = block

    def lookup(self, content: BlockHash) -> int | None:
        """The block that holds the content, in use or cached."""
        block = self._by_hash.get(content)
        return None if block is None else block.block_id

    def reset_cache(self) -> None:
        """Forget all contents: cached blocks become empty, those in use can no longer be found."""
        for block in list(self._by_hash.values()):
            self._forget(block)
            if block.ref_count == 0:
                self._cached.remove(block)
                self._empty.append(block)

    def _forget(self, block: Block) -> None:
        assert block.block_hash is not None
        del self._by_hash[block.block_hash]
        block.block_hash = None

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one state and the hash map says the same."""
        empty = [block.block_id for block in self._empty]
        cached = [block.block_id for block in self._cached]
        queued = set(empty) | set(cached)
        assert len(empty) == len(self._empty) and len(cached) == len(self._cached), "a free queue miscounts"
        assert len(queued) == len(empty) + len(cached), "a block is queued twice"
        assert NULL_BLOCK_ID not in queued, "the null block is free"
        assert self._blocks[NULL_BLOCK_ID].ref_count == 0
        cached_ids = set(cached)
        for block in self._blocks[1:]:
            assert block.ref_count >= 0, f"{block} has a negative reference count"
            assert (block.ref_count == 0) == (block.block_id in queued), f"{block} is in no state or in two"
            if block.ref_count == 0:
                assert (block.block_hash is not None) == (block.block_id in cached_ids), f"{block}: wrong queue"
            if block.block_hash is not None:
                assert self._by_hash.get(block.block_hash) is block, f"{block} cannot be found by its hash"
        assert len(self._by_hash) == sum(block.block_hash is not None for block in self._blocks)
        assert self.num_used + self.num_cached + self.num_empty == self.num_blocks
