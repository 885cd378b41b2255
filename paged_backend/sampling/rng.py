"""Counter-based randomness: one uniform number as a pure function of (seed, position).

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) with the 64-bit seed as key and
the position as counter, first output word, mapped to a float as Triton-lang does: `uniform(seed, position)` is the
number `tl.rand(seed, position)` gives in a kernel, so sampling may move into one without changing any output.
There is no state: what a sequence draws depends on nothing but its own seed and length.
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 10
_MULTIPLIER_A, _MULTIPLIER_B = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_A, _WEYL_B = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
# The float32 just below 2**-31: keeps the largest result under 1 after rounding.
_SCALE = np.float32(4.6566127342e-10)


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10.

    Args:
        counter: uint32 [..., 4].
        key: uint32 [..., 2].

    Returns:
        uint32 [..., 4].
    """
    # 64-bit lanes hold 32-bit words, so that products keep their high halves.
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    for _ in range(_ROUNDS):
        product_a, product_b = c0 * _MULTIPLIER_A, c2 * _MULTIPLIER_B
        c0, c2 = (product_b >> _SHIFT) ^ c1 ^ k0, (product_a >> _SHIFT) ^ c3 ^ k1
        c1, c3 = product_b & _LOW, product_a & _LOW
        k0, k1 = (k0 + _WEYL_A) & _LOW, (k1 + _WEYL_B) & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1): float32 [n] from `seeds` uint64 [n] and `positions` integers [n] below 2**32."""
    seeds = np.asarray(seeds, dtype=np.uint64)
    counter = np.zeros((*seeds.shape, 4), dtype=np.uint32)
    counter[..., 0] = positions
    key = np.stack([seeds & _LOW, seeds >> _SHIFT], axis=-1).astype(np.uint32)
    word = philox(counter, key)[..., 0].view(np.int32)
    # Folding the negative half onto the positive one leaves 31 uniform bits.
    return np.where(word < 0, -1 - word, word).astype(np.float32) * _SCALE
