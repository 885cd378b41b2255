"""Block pool and block tables: states, counts, and allocation only when a token needs a slot."""

from __future__ import annotations

import random

import pytest

from paged_backend.kv.block import Block, FreeQueue
from paged_backend.kv.block_manager import BlockManager
from paged_backend.kv.block_pool import NULL_BLOCK_ID, BlockPool


def test_free_queue_is_fifo_and_removes_from_the_middle():
    blocks = [Block(i) for i in range(5)]
    queue = FreeQueue(blocks)
    queue.remove(blocks[2])
    assert [queue.popleft().block_id for _ in range(4)] == [0, 1, 3, 4]
    assert len(queue) == 0
    with pytest.raises(AssertionError):
        queue.popleft()
    queue.append(blocks[2])
    with pytest.raises(AssertionError):
        queue.append(blocks[2])


def test_pool_hands_out_each_block_once_and_never_the_null_block():
    pool = BlockPool(8)
    taken = pool.allocate(8)
    assert sorted(taken) == list(range(1, 9))
    assert NULL_BLOCK_ID not in taken
    assert (pool.num_used, pool.num_free) == (8, 0)
    pool.check_integrity()
    for block_id in taken:
        pool.release(block_id)
    assert pool.num_free == 8
    pool.check_integrity()


@pytest.mark.parametrize("block_id", [NULL_BLOCK_ID, 1])
def test_releasing_what_is_not_in_use_is_caught(block_id):
    with pytest.raises(AssertionError):
        BlockPool(4).release(block_id)


def test_integrity_check_finds_a_block_in_two_states():
    pool = BlockPool(4)
    (block_id,) = pool.allocate(1)
    pool._blocks[block_id].ref_count = 0
    with pytest.raises(AssertionError, match="no state or in two"):
        pool.check_integrity()


def test_table_grows_exactly_when_a_token_needs_a_slot():
    manager = BlockManager(num_blocks=4, block_size=8)
    sizes = [len(manager.allocate(7, n) or []) for n in range(1, 26)]
    assert [i + 1 for i, added in enumerate(sizes) if added] == [1, 9, 17, 25]
    assert manager.pool.num_used == 4
    manager.check_integrity()


def test_failed_allocation_changes_nothing():
    manager = BlockManager(num_blocks=4, block_size=8)
    manager.allocate(1, 17)
    before = manager.block_ids(1)
    assert manager.allocate(1, 41) is None
    assert manager.allocate(2, 9) is None
    assert manager.block_ids(1) == before
    assert manager.block_ids(2) == []
    assert manager.pool.num_free == 1
    manager.check_integrity()


def test_free_returns_everything_tail_first():
    manager = BlockManager(num_blocks=3, block_size=8)
    table = manager.allocate(1, 24)
    manager.free(1)
    manager.free(1)
    assert manager.pool.num_free == 3
    assert manager.allocate(2, 24) == table[::-1]


def test_manager_integrity_finds_a_leaked_block():
    manager = BlockManager(num_blocks=3, block_size=8)
    manager.allocate(1, 8)
    del manager._tables[1]
    with pytest.raises(AssertionError, match="1 references, 0 tables"):
        manager.check_integrity()


def test_random_traffic_keeps_integrity():
    rng = random.Random(0)
    manager = BlockManager(num_blocks=50, block_size=4)
    lengths: dict[int, int] = {}
    for _ in range(3000):
        seq_id = rng.randrange(20)
        if rng.random() < 0.3:
            manager.free(seq_id)
            lengths.pop(seq_id, None)
        else:
            target = lengths.get(seq_id, 0) + rng.randrange(1, 12)
            if manager.allocate(seq_id, target) is not None:
                lengths[seq_id] = target
        manager.check_integrity()
        assert manager.pool.num_used == sum(manager.blocks_for(n) for n in lengths.values())
