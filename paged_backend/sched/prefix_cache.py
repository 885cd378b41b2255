"""`PrefixCache`: finds a sequence's beginning among the blocks the pool remembers, and makes its full blocks findable.

Knows sequences and the content hashes of their blocks; which blocks survive is the pool's affair.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.kv.block_hash import HashChain, root_hash
from paged_backend.kv.block_manager import BlockManager
from paged_backend.request import Request, Sequence


@dataclass(slots=True)
class _Entry:
    """A sequence's hashes, and how many of its leading blocks the pool has been told."""

    chain: HashChain
    num_registered: int = 0


class PrefixCache:
    """Automatic prefix caching over the block manager's pool.

    Args:
        blocks: the block tables.
        enabled: when false, nothing is found and nothing made findable.
    """

    def __init__(self, blocks: BlockManager, *, enabled: bool) -> None:
        self._blocks = blocks
        self._enabled = enabled
        self._entries: dict[int, _Entry] = {}

    def find(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the sequence's beginning; at least its last known token is left to compute."""
        if not self._enabled:
            return []
        chain = self._entry(sequence).chain
        # A hit on the last token as well would leave nothing to take logits from.
        usable = (sequence.num_tokens - 1) // self._blocks.block_size
        return self._blocks.find_cached(chain.upto(sequence.token_ids, usable * self._blocks.block_size)[:usable])

    def register(self, sequence: Sequence) -> None:
        """Make the sequence's full computed blocks findable.

        Called when a step's tokens are planned: within each layer all keys and values are written before any is read,
        so a block is whole by the time that another sequence of the same step reads it.
        """
        if not self._enabled:
            return
        # A token that is still to be sampled can be planned, but what it is cannot be hashed.
        full = min(sequence.num_computed_tokens, sequence.num_tokens) // self._blocks.block_size
        entry = self._entry(sequence)
        if full > entry.num_registered:
            hashes = entry.chain.upto(sequence.token_ids, full * self._blocks.block_size)
            self._blocks.register(sequence.seq_id, hashes[:full], entry.num_registered)
            entry.num_registered = full

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """The child shares the parent's first `num_tokens` tokens, so their hashes too."""
        if self._enabled:
            chain = self._entry(parent).chain.fork(num_tokens)
            self._entries[child.seq_id] = _Entry(chain, num_tokens // self._blocks.block_size)

    def restart(self, sequence: Sequence) -> None:
        """The sequence has lost its blocks; its hashes stay true."""
        if sequence.seq_id in self._entries:
            self._entries[sequence.seq_id].num_registered = 0

    def forget(self, sequence: Sequence) -> None:
        """The sequence is gone; what the pool remembers of it stays findable."""
        self._entries.pop(sequence.seq_id, None)

    def _entry(self, sequence: Sequence) -> _Entry:
        entry = self._entries.get(sequence.seq_id)
        if entry is None:
            entry = _Entry(HashChain(root_hash(_extra_keys(sequence.request)), self._blocks.block_size))
            self._entries[sequence.seq_id] = entry
        return entry


def _extra_keys(request: Request) -> list[tuple[str, str]]:
    """What, besides tokens, the content of a block depends on."""
    return [] if request.cache_salt is None else [("cache_salt", request.cache_salt)]
