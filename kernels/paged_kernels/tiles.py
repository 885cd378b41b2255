"""Triton-lang pieces shared by the attention kernels: pages, and one online-softmax step over a tile of tokens.

Softmax is in base 2: scores are multiplied by scale * log2(e) (Milakov and Gimelshein 2018, as in FlashAttention).
Knows pages and tiles; the kernels decide which rows and tokens meet.

Page ids are fetched one iteration ahead and carried through the loop: a load whose address depends on another
load of the same iteration keeps Triton-lang's software pipeliner from prefetching it. With pages of at least a
tile the carried id is one scalar; with smaller pages it is a vector with one id per token.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634

# Scales of a quantised cache, as a constexpr of the kernels.
SCALES = {"none": 0, "tensor": 1, "token": 2}


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
    acc, row_max, row_sum, q, k_rows, v_rows, k_scales, v_scales, dims, loaded, visible, distances, slopes,
    scale, soft_cap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASK: tl.constexpr,
    SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, QUANTISED: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """One tile into (acc, row_max, row_sum). loaded [TILE]: tokens that exist; visible, distances [BLOCK_M, TILE].

    Both K and V loads are masked: slots past the end may hold NaN, and 0 * NaN is NaN. distances are positions of
    the tokens minus those of the rows; slopes [BLOCK_M] are in base 2. k_scales, v_scales are pointers [TILE].
    """
    k_at = k_rows[None, :] + dims[:, None]
    v_at = v_rows[:, None] + dims[None, :]
    if MASK:
        k = tl.load(k_at, mask=loaded[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=loaded[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM < BLOCK_D:
        k = tl.load(k_at, mask=(dims < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    if QUANTISED:
        k = k.to(q.dtype)
        v = v.to(q.dtype)
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if SCALES == 2:
        k_factor = tl.load(k_scales, mask=loaded, other=0.0)
        scores = scores * k_factor[None, :]
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1) neither overflows into NaN nor needs a library; scale holds 2 / cap.
        scores = soft_cap - 2.0 * soft_cap / (tl.exp2(scores) + 1.0)
    if ALIBI:
        scores += slopes[:, None] * distances
    if MASK:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = new_max
    if MASK:
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that sees nothing yet: no -inf - -inf
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(row_max - base)
    row_sum = row_sum * factor + tl.sum(weights, 1)
    if SCALES == 2:
        v_factor = tl.load(v_scales, mask=loaded, other=0.0)
        if q.dtype == tl.float16:
            # A weight times the scale of large values may be too small for float16; the scaled value is not.
            v = (v.to(tl.float32) * v_factor[:, None]).to(q.dtype)
        else:
            weights = weights * v_factor[None, :]
    acc = tl.dot(weights.to(v.dtype), v, acc * factor[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def start_rows(heads, with_sink, sinks, SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(row_max, row_sum), each [BLOCK_M], before the first tile. A sink is a score that has no value."""
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if SINKS:
        row_max = tl.load(sinks + heads, mask=with_sink, other=float("-inf")) * 1.4426950408889634
        row_sum = tl.where(with_sink, 1.0, 0.0)
    return row_max, row_sum


@triton.jit
def head_slopes(heads, real, slopes, ALIBI: tl.constexpr, BLOCK_M: tl.constexpr):
    """ALiBi slopes [BLOCK_M] in base 2."""
    result = tl.zeros([BLOCK_M], dtype=tl.float32)
    if ALIBI:
        result = tl.load(slopes + heads, mask=real, other=0.0) * 1.4426950408889634
    return result
