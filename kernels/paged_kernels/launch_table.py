"""Launch settings of the attention kernels: one plain table by architecture and shape class, and its lookup.

    TABLE[kernel][architecture][head bytes][rows] = (tile, warps, stages)

kernel        decode, prefill; prefill+ is prefill with what takes registers of its own (window, soft-cap, ALiBi,
              a quantised cache, a head dim that is no power of two)
architecture  80, 90, 100: the nearest one not above the GPU's; consumer GPUs use 80 with their smaller shared memory
head bytes    padded head dim * element size of the query, rounded up to a class; a head wider than all uses the last;
              float32 counts twice, since its products take operands from registers
rows          query tokens * heads of one program; a class that is missing (it would spill) uses the next smaller one
tile          tokens of the context per iteration; warps; stages of the software pipeline

`benchmarks/tune_kernels.py` measures the candidates on a GPU and rewrites the table between the two marks. The values
here compile without spilling on every architecture (`tests/kernels/compile_gate.py`); they were not tuned on a GPU.
Knows numbers only: no Triton-lang, no tensors.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Launch(NamedTuple):
    """rows of the score matrix (BLOCK_M), tokens per iteration, warps per program, pipeline stages."""

    rows: int
    tile: int
    warps: int
    stages: int


Settings = tuple[int, int, int]
Table = dict[str, dict[int, dict[int, dict[int, Settings]]]]

# table begins
TABLE: Table = {
    "decode": {
        80: {
            128: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 8, 3)},
            256: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 8, 3)},
            512: {16: (32, 4, 2), 32: (32, 4, 2), 64: (32, 8, 2)},
            1024: {16: (16, 4, 2), 32: (16, 4, 2), 64: (16, 8, 2)},
            2048: {16: (16, 8, 2), 64: (16, 8, 2)},
        },
        90: {
            128: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 8, 3)},
            256: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 8, 3)},
            512: {16: (32, 4, 3), 32: (32, 4, 3), 64: (32, 8, 3)},
            1024: {16: (16, 4, 2), 32: (16, 4, 2), 64: (16, 8, 2)},
            2048: {16: (16, 8, 2), 64: (16, 8, 2)},
        },
        100: {
            128: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 8, 3)},
            256: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 8, 3)},
            512: {16: (32, 4, 3), 32: (32, 4, 3), 64: (32, 8, 3)},
            1024: {16: (16, 4, 2), 32: (16, 4, 2), 64: (16, 8, 2)},
            2048: {16: (16, 8, 2), 64: (16, 8, 2)},
        },
    },
    "prefill": {
        80: {
            128: {16: (64, 4, 3), 64: (64, 8, 3), 128: (64, 8, 3)},
            256: {16: (32, 4, 3), 64: (32, 8, 3), 128: (32, 8, 3)},
            512: {16: (32, 4, 3), 64: (32, 8, 2)},
            1024: {16: (16, 4, 2), 64: (16, 8, 2)},
            2048: {16: (16, 8, 2)},
        },
        90: {
            128: {16: (64, 4, 3), 64: (64, 8, 3), 128: (64, 8, 3)},
            256: {16: (64, 4, 3), 64: (64, 8, 3), 128: (64, 8, 3)},
            512: {16: (32, 4, 3), 64: (32, 8, 3)},
            1024: {16: (16, 4, 2), 64: (16, 8, 2)},
            2048: {16: (16, 8, 2)},
        },
        100: {
            128: {16: (64, 4, 3), 64: (64, 8, 3), 128: (64, 8, 3)},
            256: {16: (64, 4, 3), 64: (64, 8, 3), 128: (64, 8, 3)},
            512: {16: (32, 4, 3), 64: (32, 8, 3)},
            1024: {16: (16, 4, 2), 64: (16, 8, 2)},
            2048: {16: (16, 8, 2)},
        },
    },
    "prefill+": {
        80: {
            128: {16: (64, 4, 3), 64: (64, 8, 3), 128: (64, 8, 3)},
            256: {16: (32, 4, 3), 64: (32, 8, 3)},
            512: {16: (32, 4, 3), 64: (16, 8, 2)},
            1024: {16: (16, 4, 2), 64: (16, 8, 2)},
            2048: {16: (16, 8, 2)},
        },
        90: {
            128: {16: (64, 4, 3), 64: (64, 8, 3), 128: (64, 8, 3)},
            256: {16: (64, 4, 3), 64: (64, 8, 3), 128: (64, 8, 3)},
            512: {16: (32, 4, 3), 64: (32, 8, 3)},
            1024: {16: (16, 4, 2), 64: (16, 8, 2)},
            2048: {16: (16, 8, 2)},
        },
        100: {
            128: {16: (64, 4, 3), 64: (64, 8, 3), 128: (64, 8, 2)},
            256: {16: (64, 4, 3), 64: (64, 8, 3), 128: (64, 8, 3)},
            512: {16: (32, 4, 3), 64: (32, 8, 3)},
            1024: {16: (16, 4, 2), 64: (16, 8, 2)},
            2048: {16: (16, 8, 2)},
        },
    },
}
# table ends

# Bytes of shared memory per program, by compute capability (major), and of consumer GPUs.
_SHARED_MEMORY = {8: 163 << 10, 9: 227 << 10, 10: 227 << 10}
_CONSUMER_SHARED_MEMORY = 99 << 10
_CONSUMER = (86, 87, 89)


def look_up(
    kernel: str,
    *,
    capability: int,
    head_dim: int,
    rows: int,
    element_size: int,
    cache_element_size: int,
    table: Mapping = TABLE,
) -> Launch:
    """The settings for `rows` rows (rounded up to a class, or the largest class there is) of heads of head_dim.

    Stages, then the tile, then the rows shrink until queries, scores and the buffered keys and values fit the shared
    memory of the GPU: a kernel over the limit compiles and then fails at launch.
    """
    block_d = padded_head_dim(head_dim)
    by_width = table[kernel][architecture_of(capability, table[kernel])]
    by_rows = by_width[_round_up(block_d * element_size * (2 if element_size == 4 else 1), by_width)]
    limit = shared_memory(capability)

    def fits(rows: int, tile: int, stages: int) -> bool:
        queries_and_weights = rows * (block_d + tile) * element_size
        return queries_and_weights + 2 * tile * stages * block_d * cache_element_size <= limit

    wanted = _round_up(rows, by_rows)
    for chosen in sorted((c for c in by_rows if c <= wanted), reverse=True):
        tile, warps, stages = by_rows[chosen]
        while stages > 1 and not fits(chosen, tile, stages):
            stages -= 1
        while tile > 16 and not fits(chosen, tile, stages):
            tile //= 2
        if fits(chosen, tile, stages):
            break
    return Launch(chosen, tile, warps, stages)


def shared_memory(capability: int) -> int:
    """Bytes of shared memory that one program may use."""
    if capability in _CONSUMER:
        return _CONSUMER_SHARED_MEMORY
    return _SHARED_MEMORY.get(capability // 10, _CONSUMER_SHARED_MEMORY)


def padded_head_dim(head_dim: int) -> int:
    """BLOCK_D: the power of two, at least 16, that matrix products need."""
    return max(16, 1 << (head_dim - 1).bit_length())


def architecture_of(capability: int, known: Mapping) -> int:
    """The architecture of the table that a GPU uses."""
    # Consumer Blackwell (sm_120) has Ampere's matrix instructions and a small shared memory.
    if capability in _CONSUMER or capability >= 110:
        return min(known)
    return max((a for a in known if a <= capability), default=min(known))


def _round_up(value: int, classes: Mapping) -> int:
    return min((c for c in classes if c >= value), default=max(classes))
