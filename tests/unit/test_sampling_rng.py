"""Philox against its published vectors and against Triton-lang's own generator."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from paged_backend.sampling.rng import philox, uniform

# Random123's known-answer vectors for philox4x32 with 10 rounds: counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]

TRITON_PROGRAM = """
import torch, triton, triton.language as tl

@triton.jit
def draw(out, seed, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, tl.rand(seed, offsets))

out = torch.empty(64)
for seed in (0, 42, 2**40 + 12345):
    draw[(1,)](out, seed, N=64)
    print(*[value.hex() for value in out.double().tolist()])
"""


def _words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint32)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter, key, expected):
    assert philox(_words(counter), _words(key)).tolist() == _words(expected).tolist()


def test_vectorised_equals_one_by_one():
    seeds = np.random.default_rng(0).integers(0, 2**64, 50, dtype=np.uint64)
    positions = np.arange(50)
    together = uniform(seeds, positions)
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(50)]
    assert together.tolist() == alone


def test_uniform_and_uncorrelated():
    draws = uniform(np.repeat(np.arange(100, dtype=np.uint64), 1000), np.tile(np.arange(1000), 100))
    assert draws.dtype == np.float32
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 49 + 5 * np.sqrt(2 * 49)  # chi-square, five sigma
    grid = draws.reshape(100, 1000).astype(np.float64)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02  # successive positions
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02  # neighbouring seeds


def test_all_seed_bits_count():
    seeds = np.array([0, *(1 << bit for bit in range(64))], dtype=np.uint64)
    assert len(set(uniform(seeds, np.full(65, 7)).tolist())) == 65


def test_same_stream_as_triton_lang(tmp_path):
    pytest.importorskip("triton")
    program = tmp_path / "draw.py"
    program.write_text(TRITON_PROGRAM)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=True)
    lines = result.stdout.strip().splitlines()
    assert len(lines) == 3
    for seed, line in zip((0, 42, 2**40 + 12345), lines, strict=True):
        ours = uniform(np.full(64, seed, dtype=np.uint64), np.arange(64)).astype(np.float64)
        assert [float(value).hex() for value in ours] == line.split()
