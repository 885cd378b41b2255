"""Memory of systems without paging: one contiguous chunk of KV slots per request, reserved whole at admission.

`ReservingManager` stands where the scheduler expects a `BlockManager`, so the same scheduler drives both; a "block" is
one slot. Chunks come from a buddy allocator, as the PagedAttention paper assumes of Orca, under three policies: how
many slots a request gets for a prompt and an output whose length is not known yet. One sequence per request; nothing
can be shared, swapped or found in a cache. Knows lengths, no tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paged_backend.kv.block_manager import TableChanges, Write

MAX_MODEL_LEN = 2048


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def reserve_max(prompt_tokens: int, output_tokens: int) -> int:
    """Orca (Max): always the model's longest sequence."""
    return MAX_MODEL_LEN


def reserve_pow2(prompt_tokens: int, output_tokens: int) -> int:
    """Orca (Pow2): the output is over-reserved by less than a factor of two."""
    return min(MAX_MODEL_LEN, prompt_tokens + next_power_of_two(output_tokens))


def reserve_oracle(prompt_tokens: int, output_tokens: int) -> int:
    """Orca (Oracle): the true output length, known in advance."""
    return prompt_tokens + output_tokens


class BuddyAllocator:
    """Power-of-two chunks of `num_slots` slots, each aligned to its size; freed buddies merge."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free: dict[int, set[int]] = {1 << order: set() for order in range(num_slots.bit_length())}
        self._sizes: dict[int, int] = {}
        start = 0
        for size in sorted(self._free, reverse=True):
            if num_slots & size:
                self._free[size].add(start)
                start += size

    def allocate(self, num_slots: int) -> int | None:
        """The first slot of a free chunk of at least `num_slots`, lowest address first; None if there is none."""
        wanted = next_power_of_two(num_slots)
        size = wanted
        while size in self._free and not self._free[size]:
            size *= 2
        if size not in self._free:
            return None
        start = min(self._free[size])
        self._free[size].remove(start)
        while size > wanted:
            size //= 2
            self._free[size].add(start + size)
        self._sizes[start] = wanted
        return start

    def free(self, start: int) -> None:
        """Give the chunk that begins at `start` back."""
        size = self._sizes.pop(start)
        while start ^ size in self._free.get(size, ()):
            self._free[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self._free[size].add(start)

    @property
    def num_free(self) -> int:
        """Slots in free chunks of any size."""
        return sum(size * len(starts) for size, starts in self._free.items())

    def check_integrity(self) -> None:
        """Raise AssertionError unless free and allocated chunks tile the slots without a gap or an overlap."""
        chunks = [(start, size) for size, starts in self._free.items() for start in starts]
        end = 0
        for start, size in sorted(chunks + list(self._sizes.items())):
            assert start == end and start % size == 0, f"chunk [{start}, {start + size}) after slot {end}"
            end = start + size
        assert end == self.num_slots


@dataclass
class _Chunk:
    start: int
    reserved: int
    used: int


@dataclass
class SlotCounts:
    """What the scheduler asks of a pool."""

    allocator: BuddyAllocator

    @property
    def num_blocks(self) -> int:
        """All slots."""
        return self.allocator.num_slots

    @property
    def num_free(self) -> int:
        """Slots in no request's chunk; an upper bound of what can be reserved."""
        return self.allocator.num_free


class ReservingManager:
    """A `BlockManager` for the scheduler, without paging.

    Args:
        num_slots: KV slots, one token each.
        reserve: policy; (prompt tokens, output tokens) to slots.
    """

    block_size = 1

    def __init__(self, num_slots: int, reserve: Callable[[int, int], int]) -> None:
        self._allocator = BuddyAllocator(num_slots)
        self._reserve = reserve
        self._expected: dict[int, int] = {}
        self._chunks: dict[int, _Chunk] = {}
        self.pool = SlotCounts(self._allocator)

    def expect(self, seq_id: int, prompt_tokens: int, output_tokens: int) -> None:
        """Announce a sequence: what its policy may know, before it is scheduled."""
        self._expected[seq_id] = self._reserve(prompt_tokens, output_tokens)

    def reserved_slots(self, seq_id: int) -> int:
        """Slots set aside for the sequence, rounding to a chunk not counted; 0 if it is not admitted."""
        return self._chunks[seq_id].reserved if seq_id in self._chunks else 0

    def blocks_for(self, num_tokens: int) -> int:
        """Slots that `num_tokens` tokens fill."""
        return num_tokens

    def block_ids(self, seq_id: int) -> list[int]:
        """The slots that hold the sequence's tokens, in order; consecutive by construction."""
        chunk = self._chunks.get(seq_id)
        return list(range(chunk.start, chunk.start + chunk.used)) if chunk else []

    def start(self, seq_id: int, cached: Sequence[int]) -> None:
        """Begin a sequence; there is never anything cached."""
        assert not cached

    def allocate(self, writes: Sequence[Write]) -> TableChanges | None:
        """Reserve a chunk for each sequence that has none, and enter the tokens; None if there is no chunk."""
        changes = TableChanges()
        begun: list[int] = []
        for write in writes:
            chunk = self._chunks.get(write.seq_id)
            if chunk is None:
                reserved = self._expected[write.seq_id]
                start = self._allocator.allocate(reserved)
                if start is None:
                    for seq_id in begun:
                        self.free(seq_id)
                    return None
                chunk = self._chunks[write.seq_id] = _Chunk(start, reserved, 0)
                begun.append(write.seq_id)
            assert write.end <= chunk.reserved, f"sequence {write.seq_id} outgrows its reservation"
            changes.appended[write.seq_id] = list(range(chunk.start + chunk.used, chunk.start + write.end))
            chunk.used = write.end
        return changes

    def free(self, seq_id: int) -> None:
        """Give a sequence's chunk back; one without any is fine."""
        chunk = self._chunks.pop(seq_id, None)
        if chunk is not None:
            self._allocator.free(chunk.start)

    def check_integrity(self) -> None:
        """Raise AssertionError unless chunks tile the slots and every sequence is inside its own."""
        self._allocator.check_integrity()
        held = sorted((chunk.start, chunk.start + chunk.reserved) for chunk in self._chunks.values())
        for (_, end), (start, _) in itertools.pairwise(held):
            assert end <= start, "two requests share slots"
        assert all(chunk.used <= chunk.reserved for chunk in self._chunks.values())
