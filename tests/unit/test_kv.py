"""Block pool and block tables: states, sharing, copy-on-write, windows, swapping; and content hashes."""

from __future__ import annotations

import random

import pytest

from paged_backend.kv.block import Block, FreeQueue
from paged_backend.kv.block_hash import HashChain, block_hash, root_hash
from paged_backend.kv.block_manager import BlockManager, Write
from paged_backend.kv.block_pool import NULL_BLOCK_ID, BlockPool

ROOT = root_hash()
HASHES = [block_hash(ROOT, [i]) for i in range(20)]


# --- the queue and the pool ---


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


def test_empty_blocks_go_first_then_the_least_recently_used():
    pool = BlockPool(4)
    first, second, third, fourth = pool.allocate(4)
    for block_id, content in ((first, HASHES[0]), (second, HASHES[1]), (third, HASHES[2])):
        pool.register(block_id, content)
    for block_id in (second, fourth, first, third):
        pool.release(block_id)
    assert (pool.num_empty, pool.num_cached) == (1, 3)
    assert pool.allocate(2) == [fourth, second]
    assert pool.num_evictions == 1
    assert pool.lookup(HASHES[1]) is None
    assert pool.lookup(HASHES[0]) == first
    # A touched block is in use, and goes to the end of the queue when it is released again.
    pool.touch(first)
    pool.release(first)
    assert pool.allocate(1) == [third]
    pool.check_integrity()


def test_a_content_has_one_block_and_stays_with_it():
    pool = BlockPool(3)
    first, second, _ = pool.allocate(3)
    pool.register(first, HASHES[0])
    pool.register(second, HASHES[0])
    pool.register(first, HASHES[1])
    assert pool.lookup(HASHES[0]) == first
    assert pool.lookup(HASHES[1]) is None
    assert not pool.is_hashed(second)
    pool.check_integrity()


def test_reset_forgets_cached_and_used_contents():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, HASHES[0])
    pool.register(second, HASHES[1])
    pool.release(first)
    pool.reset_cache()
    assert pool.lookup(HASHES[0]) is pool.lookup(HASHES[1]) is None
    assert (pool.num_empty, pool.num_cached, pool.num_used) == (1, 0, 1)
    pool.check_integrity()


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda pool: setattr(pool._blocks[1], "ref_count", 0),
        lambda pool: setattr(pool._blocks[2], "ref_count", 1),
        lambda pool: setattr(pool._blocks[1], "block_hash", HASHES[5]),
        lambda pool: pool._by_hash.update({HASHES[6]: pool._blocks[3]}),
        lambda pool: setattr(pool._blocks[4], "block_hash", None),
    ],
)
def test_integrity_check_finds_corruption(corrupt):
    pool = BlockPool(4)
    _, second, third, fourth = pool.allocate(4)
    pool.register(fourth, HASHES[0])
    for block_id in (second, third, fourth):
        pool.release(block_id)
    pool.check_integrity()
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()


# --- hashes ---


def test_hash_depends_on_everything_before_and_on_tagged_keys():
    chain = [block_hash(block_hash(ROOT, [1, 2]), [3, 4]), block_hash(block_hash(ROOT, [1, 3]), [3, 4])]
    roots = [
        root_hash(keys)
        for keys in (
            [],
            [("lora", "a")],
            [("cache_salt", "a")],
            [("lora", "a"), ("cache_salt", "b")],
            [("lora", "acache_saltb")],
            [("lora", ""), ("cache_salt", "a")],
            [("loraa", "")],
        )
    ]
    assert len({*chain, *roots}) == len(chain) + len(roots)
    assert root_hash([("lora", "a")]) == root_hash([("lora", "a")])


def test_token_boundaries_cannot_be_confused():
    assert block_hash(ROOT, [1, 23]) != block_hash(ROOT, [12, 3])
    assert block_hash(ROOT, [2**32 + 1, 0]) != block_hash(ROOT, [1, 1])


def test_chain_grows_with_the_tokens_and_forks():
    tokens = list(range(20))
    chain = HashChain(ROOT, 4)
    assert len(chain.upto(tokens, 7)) == 1
    hashes = list(chain.upto(tokens, 20))
    assert hashes[0] == block_hash(ROOT, [0, 1, 2, 3])
    assert hashes[4] == block_hash(hashes[3], [16, 17, 18, 19])
    child = chain.fork(10)
    other = tokens[:10] + [99] * 10
    assert child.upto(other, 20)[:2] == hashes[:2]
    assert child.upto(other, 20)[2] != hashes[2]
    assert chain.upto(tokens, 20) == hashes


# --- tables ---


def _grow(manager: BlockManager, seq_id: int, end: int, start: int = 0):
    return manager.allocate([Write(seq_id, start, end)])


def test_table_grows_exactly_when_a_token_needs_a_slot():
    manager = BlockManager(num_blocks=4, block_size=8)
    added = [n for n in range(1, 26) if _grow(manager, 7, n, n - 1).appended]
    assert added == [1, 9, 17, 25]
    assert manager.pool.num_used == 4
    manager.check_integrity()


def test_failed_allocation_changes_nothing():
    manager = BlockManager(num_blocks=4, block_size=8)
    _grow(manager, 1, 17)
    before = manager.block_ids(1)
    assert _grow(manager, 1, 41, 17) is None
    assert manager.allocate([Write(1, 17, 25), Write(2, 0, 1)]) is None
    assert manager.block_ids(1) == before
    assert manager.block_ids(2) == []
    assert manager.pool.num_free == 1
    manager.check_integrity()


def test_free_returns_everything_tail_first():
    manager = BlockManager(num_blocks=3, block_size=8)
    _grow(manager, 1, 24)
    table = manager.block_ids(1)
    manager.free(1)
    manager.free(1)
    assert manager.pool.num_free == 3
    _grow(manager, 2, 24)
    assert manager.block_ids(2) == table[::-1]


def test_manager_integrity_finds_a_leaked_block():
    manager = BlockManager(num_blocks=3, block_size=8)
    _grow(manager, 1, 8)
    del manager._tables[1]
    with pytest.raises(AssertionError, match="1 references, 0 tables"):
        manager.check_integrity()


def test_fork_shares_and_the_first_write_copies():
    manager = BlockManager(num_blocks=8, block_size=8)
    _grow(manager, 1, 20)
    for child in (2, 3):
        manager.fork(1, child, 20)
    assert manager.pool.num_used == 3
    shared = manager.block_ids(1)
    changes = manager.allocate([Write(seq_id, 20, 21) for seq_id in (1, 2, 3)])
    # The last of the three may keep the block.
    assert [source for source, _ in changes.copies] == [shared[2]] * 2
    assert manager.block_ids(3) == shared
    assert changes.replaced == {1: [(2, changes.copies[0][1])], 2: [(2, changes.copies[1][1])]}
    assert manager.block_ids(1)[:2] == manager.block_ids(2)[:2] == shared[:2]
    assert manager.pool.num_used == 5
    manager.check_integrity()
    # Full shared blocks are never copied.
    assert not manager.allocate([Write(seq_id, 24, 25) for seq_id in (1, 2, 3)]).copies


def test_copies_are_all_or_nothing_too():
    manager = BlockManager(num_blocks=4, block_size=8)
    _grow(manager, 1, 20)
    for child in (2, 3):
        manager.fork(1, child, 20)
    assert manager.allocate([Write(seq_id, 20, 21) for seq_id in (1, 2, 3)]) is None
    assert manager.block_ids(1) == manager.block_ids(2) == manager.block_ids(3)
    assert manager.allocate([Write(1, 20, 21)]) is not None
    manager.check_integrity()


def test_a_findable_block_is_copied_even_by_its_only_holder():
    manager = BlockManager(num_blocks=4, block_size=8)
    _grow(manager, 1, 8)
    manager.register(1, [HASHES[0]], 0)
    (before,) = manager.block_ids(1)
    changes = _grow(manager, 1, 8, 5)
    assert changes.copies == [(before, manager.block_ids(1)[0])]
    assert manager.find_cached([HASHES[0]]) == [before]
    manager.check_integrity()


def test_cached_prefix_is_the_longest_unbroken_run():
    manager = BlockManager(num_blocks=8, block_size=8)
    _grow(manager, 1, 32)
    manager.register(1, HASHES[:4], 0)
    table = manager.block_ids(1)
    manager.free(1)
    assert manager.pool.num_cached == 4
    assert manager.find_cached([*HASHES[:2], HASHES[9], HASHES[3]]) == table[:2]
    manager.start(2, table[:2])
    assert (manager.pool.num_used, manager.pool.num_cached) == (2, 2)
    manager.check_integrity()


def test_tails_are_evicted_before_heads():
    manager = BlockManager(num_blocks=4, block_size=8)
    _grow(manager, 1, 32)
    manager.register(1, HASHES[:4], 0)
    manager.free(1)
    _grow(manager, 2, 16)
    assert len(manager.find_cached(HASHES[:4])) == 2


def test_window_release_keeps_indices_positional_and_spares_the_sharers():
    manager = BlockManager(num_blocks=8, block_size=8)
    _grow(manager, 1, 30)
    manager.fork(1, 2, 30)
    table = manager.block_ids(1)
    assert manager.release_before(1, 17) == 2
    assert manager.release_before(1, 5) == 0
    assert manager.block_ids(1) == [0, 0, *table[2:]]
    assert manager.block_ids(2) == table
    assert manager.pool.num_used == 4
    manager.check_integrity()
    manager.fork(1, 3, 30)
    manager.free(2)
    assert manager.pool.num_used == 2
    for seq_id in (1, 3):
        manager.free(seq_id)
    assert manager.pool.num_free == 8
    manager.check_integrity()


def test_swap_moves_each_shared_block_once_and_keeps_the_sharing():
    manager = BlockManager(num_blocks=8, block_size=8, num_host_blocks=4)
    _grow(manager, 1, 20)
    manager.fork(1, 2, 20)
    manager.release_before(2, 8)
    table = manager.block_ids(1)
    out = manager.swap_out([1, 2])
    assert sorted(source for source, _ in out) == sorted(table)
    assert (manager.pool.num_used, manager.host_pool.num_used) == (0, 3)
    manager.check_integrity()
    assert manager.swap_in([1, 2], reserve=6) is None
    back = dict(manager.swap_in([1, 2], reserve=5))
    assert set(back) == {host for _, host in out}
    assert manager.block_ids(2) == [0, *manager.block_ids(1)[1:]]
    assert (manager.pool.num_used, manager.host_pool.num_used) == (3, 0)
    manager.check_integrity()


def test_swap_out_needs_room_on_the_host():
    manager = BlockManager(num_blocks=8, block_size=8, num_host_blocks=2)
    _grow(manager, 1, 20)
    before = manager.block_ids(1)
    assert manager.swap_out([1]) is None
    assert manager.block_ids(1) == before
    manager.check_integrity()


def test_freeing_a_swapped_sequence_frees_the_host():
    manager = BlockManager(num_blocks=8, block_size=8, num_host_blocks=4)
    _grow(manager, 1, 20)
    manager.swap_out([1])
    manager.free(1)
    assert manager.host_pool.num_free == 4
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
            start = lengths.get(seq_id, 0)
            target = start + rng.randrange(1, 12)
            if _grow(manager, seq_id, target, start) is not None:
                lengths[seq_id] = target
        manager.check_integrity()
        assert manager.pool.num_used == sum(manager.blocks_for(n) for n in lengths.values())
