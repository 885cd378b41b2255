"""Content hashes of full blocks: H(parent hash, token ids), chained from a root that holds the extra keys.

Two blocks have the same hash only if the tokens in them, all tokens before them and the extra keys are the same (up to
a SHA-256 collision), so a hit needs no comparison of contents. This module knows no blocks and no sequences.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)


def root_hash(extra_keys: Sequence[tuple[str, str]] = ()) -> BlockHash:
    """Where a chain begins: depends on the extra keys, (tag, value) pairs such as `("cache_salt", "tenant-7")`.

    Tags and lengths go into the hash, so that no value of one tag can pass for another tag's, or for two.
    """
    digest = hashlib.sha256(b"paged-backend")
    for text in (part for pair in extra_keys for part in pair):
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return BlockHash(digest.digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of a full block of `token_ids` behind the block (or root) `parent`."""
    return BlockHash(hashlib.sha256(parent + array("q", token_ids).tobytes()).digest())


class HashChain:
    """Hashes of a sequence's full blocks, computed as its tokens become known and never twice.

    Args:
        root: from `root_hash`.
        block_size: tokens per block.
    """

    __slots__ = ("_block_size", "_hashes", "_root")

    def __init__(self, root: BlockHash, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self._hashes: list[BlockHash] = []

    def upto(self, token_ids: list[int], num_tokens: int) -> list[BlockHash]:
        """The hashes of at least all full blocks in the first `num_tokens` of `token_ids`; not to be changed."""
        size, hashes = self._block_size, self._hashes
        for block in range(len(hashes), num_tokens // size):
            parent = hashes[-1] if hashes else self._root
            hashes.append(block_hash(parent, token_ids[block * size : (block + 1) * size]))
        return hashes

    def fork(self, num_tokens: int) -> HashChain:
        """The chain of a sequence that shares the first `num_tokens` tokens."""
        child = HashChain(self._root, self._block_size)
        child._hashes = self._hashes[: num_tokens // self._block_size]
        return child
