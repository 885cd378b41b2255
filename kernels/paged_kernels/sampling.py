"""Choose one token per row: temperature, min-p, top-k, top-p, and a seeded draw, without sorting (Triton-lang).

Contract: `ops.sample`. One program per row. Both filters are thresholds found by bisection: each pass over the row
(which stays in the L2 cache) counts, or weighs, what is above a pivot, and moves the bounds to values that occur, so
that a search ends after as many passes as it takes to tell the values apart (at most 31 for top-k, 41 for top-p).
Weights are integers, so their sums are exact in any order. Knows rows; no requests.
"""

import torch
import triton
import triton.language as tl

UNIT = float(1 << 40)
"""What a probability of 1 weighs."""


@triton.jit
def weight_of(probability):
    return (probability * 1099511627776.0).to(tl.int64)


@triton.jit
def most_likely(logits, vocabulary, BLOCK: tl.constexpr):
    """(maximum, its first place, how many are NaN) of a row."""
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    place = tl.zeros([BLOCK], dtype=tl.int32)
    unknown = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf"))
        unknown += (x != x).to(tl.int32)
        better = x > best
        best = tl.where(better, x, best)
        place = tl.where(better, at, place)
    highest = tl.max(best, 0)
    return highest, tl.min(tl.where(best == highest, place, vocabulary), 0), tl.sum(unknown, 0)


@triton.jit
def top_k_threshold(scores, k, vocabulary, BLOCK: tl.constexpr):
    """The k-th largest of a row of scores <= 0, as the bits of its absolute value: these grow as scores fall."""
    low = 0
    high = 0x7F800000
    while low < high:
        pivot = low + (high - low) // 2
        count = tl.zeros([BLOCK], dtype=tl.int32)
        below = tl.zeros([BLOCK], dtype=tl.int32)
        above = tl.full([BLOCK], 0x7F800000, dtype=tl.int32)
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(scores + at, mask=at < vocabulary, other=float("-inf"))
            bits = tl.abs(x).to(tl.int32, bitcast=True)
            taken = (bits <= pivot) & (at < vocabulary)
            count += taken.to(tl.int32)
            below = tl.maximum(below, tl.where(taken, bits, 0))
            above = tl.minimum(above, tl.where(taken, 0x7F800000, bits))
        if tl.sum(count, 0) >= k:
            high = tl.max(below, 0)
        else:
            low = tl.min(above, 0)
    return low


@triton.jit
def keep(scores, total, min_p, threshold, vocabulary, BLOCK: tl.constexpr):
    """Replace a row's scores by probabilities, 0 where min-p or top-k drop them.

    Returns the sum and the maximum of the weights.
    """
    weight = tl.zeros([BLOCK], dtype=tl.int64)
    heaviest = tl.zeros([BLOCK], dtype=tl.int64)
    # The most likely score is 0.
    floor = min_p * tl.div_rn(total * 0.0 + 1.0, total)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(scores + at, mask=at < vocabulary, other=float("-inf"))
        probability = tl.div_rn(tl.exp(x), tl.zeros_like(x) + total)
        kept = (probability >= floor) & (tl.abs(x).to(tl.int32, bitcast=True) <= threshold)
        probability = tl.where(kept, probability, 0.0)
        tl.store(scores + at, probability, mask=at < vocabulary)
        own = weight_of(probability)
        weight += own
        heaviest = tl.maximum(heaviest, own)
    tl.debug_barrier()
    return tl.sum(weight, 0), tl.max(heaviest, 0)


@triton.jit
def top_p_edge(probabilities, needed, heaviest, vocabulary, BLOCK: tl.constexpr):
    """(lightest weight taken, weight of the heavier ones, how many have exactly that weight).

    The lightest is the largest one such that it and all heavier ones together weigh `needed`.
    """
    low = needed * 0 + 1
    high = heaviest
    while low < high:
        # Rounded up: the pivot is above `low`, so that each pass rules something out.
        pivot = high - (high - low) // 2
        weight = tl.zeros([BLOCK], dtype=tl.int64)
        below = tl.zeros([BLOCK], dtype=tl.int64)
        above = tl.full([BLOCK], 1 << 41, dtype=tl.int64)
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            own = weight_of(tl.load(probabilities + at, mask=at < vocabulary, other=0.0))
            weight += tl.where(own >= pivot, own, 0)
            above = tl.minimum(above, tl.where(own >= pivot, own, 1 << 41))
            below = tl.maximum(below, tl.where(own >= pivot, 0, own))
        if tl.sum(weight, 0) >= needed:
            low = tl.min(above, 0)
        else:
            high = tl.max(below, 0)
    heavier = tl.zeros([BLOCK], dtype=tl.int64)
    equal = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        own = weight_of(tl.load(probabilities + at, mask=at < vocabulary, other=0.0))
        heavier += tl.where(own > low, own, 0)
        equal += (own == low).to(tl.int64)
    return low, tl.sum(heavier, 0), tl.sum(equal, 0)


@triton.jit
def draw(probabilities, target, lightest, equals, surplus, vocabulary, BLOCK: tl.constexpr):
    """The first place where the running sum of what is kept exceeds `target`.

    Kept is what weighs more than `lightest`, and the first `equals` of those that weigh as much; all of these unless
    there is a surplus.
    """
    running = target * 0
    seen = target * 0
    place = vocabulary * 0 - 1
    for start in range(0, vocabulary, BLOCK):
        if place < 0:
            at = start + tl.arange(0, BLOCK)
            own = weight_of(tl.load(probabilities + at, mask=at < vocabulary, other=0.0))
            if surplus:
                equal = (own == lightest).to(tl.int64)
                late = (equal > 0) & (seen + tl.cumsum(equal, 0) > equals)
                own = tl.where(late, 0, own)
                seen += tl.sum(equal, 0)
            own = tl.where(own >= lightest, own, 0)
            weight = tl.sum(own, 0)
            if running + weight > target:
                place = start + tl.sum((running + tl.cumsum(own, 0) <= target).to(tl.int32), 0)
            running += weight
    return place


@triton.jit(do_not_specialize_on_alignment=["scratch"])
def sample_kernel(
    logits, temperatures, top_k, top_p, min_p, seeds, positions, scratch, out, row_stride, vocabulary,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    scratch += row * vocabulary
    best, place, unknown = most_likely(logits, vocabulary, BLOCK)
    temperature = tl.load(temperatures + row)
    token = place
    if (unknown > 0) | (tl.abs(best) == float("inf")):
        token = -1
    elif temperature > 0:
        sums = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf")) - best
            x = tl.div_rn(x, tl.zeros_like(x) + temperature)
            sums += tl.exp(x)
            tl.store(scratch + at, x, mask=at < vocabulary)
        tl.debug_barrier()
        threshold = 0x7F800000
        k = tl.load(top_k + row)
        if (k > 0) & (k < vocabulary):
            threshold = top_k_threshold(scratch, k, vocabulary, BLOCK)
        total, heaviest = keep(scratch, tl.sum(sums, 0), tl.load(min_p + row), threshold, vocabulary, BLOCK)
        share = tl.load(top_p + row)
        lightest = total * 0
        equals = total * 0
        surplus = False
        if share < 1.0:
            needed = tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
            lightest, heavier, equal = top_p_edge(scratch, needed, heaviest, vocabulary, BLOCK)
            equals = tl.minimum((needed - heavier + lightest - 1) // lightest, equal)
            surplus = equal > equals
            total = heavier + equals * lightest
        chance = tl.rand(tl.load(seeds + row), tl.load(positions + row).to(tl.uint32))
        target = tl.minimum((chance.to(tl.float64) * total.to(tl.float64)).to(tl.int64), total - 1)
        token = draw(scratch, target, lightest, equals, surplus, vocabulary, BLOCK)
    tl.store(out + row, token.to(tl.int64))


def settings(vocabulary: int) -> tuple[dict, dict]:
    """(constexpr arguments, compile options) of sample_kernel; the compile gate builds the same."""
    block = min(4096, max(128, triton.next_power_of_2(vocabulary)))
    return {"BLOCK": block}, {"num_warps": max(4, block // 256), "enable_fp_fusion": False}


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `ops.sample`; arguments are validated there."""
    rows, vocabulary = logits.shape
    constants, options = settings(vocabulary)
    scratch = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    sample_kernel[(rows,)](
        logits, temperature, top_k, top_p, min_p, seeds, positions, scratch, out, logits.stride(0), vocabulary,
        **constants, **options,
    )  # fmt: skip
