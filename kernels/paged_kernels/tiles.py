"""Triton-lang pieces shared by the attention kernels, and the table of launch settings.

One online-softmax step over a tile of tokens read through the block table. Softmax is in base 2: scores are
multiplied by scale * log2(e). Knows pages and tiles; the kernels decide which rows and tokens meet.

Page ids are fetched one iteration ahead and carried through the loop: a load whose address depends on another
load of the same iteration keeps Triton-lang's software pipeliner from prefetching it. With pages of at least a
tile the carried id is one scalar; with smaller pages it is a vector with one id per token.
"""

import triton
import triton.language as tl

_SHARED_MEMORY = {8: 163 << 10, 9: 227 << 10, 10: 227 << 10}  # per program, by compute capability (major)
_SMALLEST_SHARED_MEMORY = 99 << 10  # consumer GPUs (sm_86, sm_89, sm_120)


@triton.jit
def page_ids(table, t, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Ids of the pages that hold tokens t .. t + TILE; entries for tokens at or past `end` are not read."""
    if PAGE % TILE == 0:
        return tl.load(table + t // PAGE, mask=t < end, other=0)
    else:
        tokens = t + tl.arange(0, TILE)
        return tl.load(table + tokens // PAGE, mask=tokens < end, other=0)


@triton.jit
def token_pointers(cache, ids, t, head, s_block, s_head, s_token, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Pointers [TILE] to the rows of tokens t .. t + TILE of one head. 64-bit from the block id on."""
    tokens = t + tl.arange(0, TILE)
    return cache + (ids.to(tl.int64) * s_block + head * s_head) + (tokens % PAGE) * s_token


@triton.jit
def attend_tile(
    acc, row_max, row_sum, q, k_rows, v_rows, dims, loaded, visible, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASK_LOADS: tl.constexpr, MASK_SCORES: tl.constexpr,
):  # fmt: skip
    """One tile into (acc, row_max, row_sum). loaded [TILE]: tokens that exist; visible [BLOCK_M, TILE].

    Both K and V loads are masked: slots past the end may hold NaN, and 0 * NaN is NaN.
    """
    k_at = k_rows[None, :] + dims[:, None]
    v_at = v_rows[:, None] + dims[None, :]
    if MASK_LOADS:
        k = tl.load(k_at, mask=loaded[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=loaded[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM < BLOCK_D:
        k = tl.load(k_at, mask=(dims < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if MASK_SCORES:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = new_max
    if MASK_SCORES:
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that sees nothing yet: no -inf - -inf
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(row_max - base)
    row_sum = row_sum * factor + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * factor[:, None], input_precision="ieee")
    return acc, new_max, row_sum


def launch_settings(
    *, head_dim: int, block_m: int, element_size: int, capability: int, tile: int, stages: int
) -> tuple[dict, dict]:
    """(BLOCK_D and TILE, num_warps and the other compile options) of an attention kernel.

    The wanted tile and pipeline depth shrink until queries and the buffered keys and values fit the shared
    memory of the GPU generation (capability: 80, 90, ...): a kernel over the limit compiles and then fails
    at launch. Eight warps from 64 rows: with four, the accumulator of some variants spills.
    """
    block_d = padded_head_dim(head_dim)
    limit = _SHARED_MEMORY.get(capability // 10, _SMALLEST_SHARED_MEMORY)
    if capability in (86, 87, 89):
        limit = _SMALLEST_SHARED_MEMORY

    def fits(tile, stages):
        weights = block_m * tile * element_size
        return (block_m + 2 * tile * stages) * block_d * element_size + weights <= limit

    while stages > 1 and not fits(tile, stages):
        stages -= 1
    while tile > 16 and not fits(tile, stages):
        tile //= 2
    options = {"num_warps": 8 if block_m >= 64 else 4, "num_stages": stages, "enable_fp_fusion": True}
    return {"BLOCK_D": block_d, "TILE": tile}, options


def padded_head_dim(head_dim: int) -> int:
    """BLOCK_D: the power of two, at least 16, that matrix products need."""
    return max(16, triton.next_power_of_2(head_dim))
