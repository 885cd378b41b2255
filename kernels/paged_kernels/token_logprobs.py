"""Log-probabilities of chosen tokens, their ranks, and the most likely tokens, without sorting (Triton-lang).

Contract: `ops.token_logprobs`. One program per (row, piece of the vocabulary) reads its piece once and leaves its
maximum, its sum of exponentials, how many tokens come before the chosen one, and its best candidates; one program per
row puts these together. A candidate is one 64-bit key that orders by logit and then by id:

    bits 63 .. 32  the float32, mapped to an integer that orders as it does
    bits 30 .. 0   2**31 - 1 - token id
"""

import torch
import triton
import triton.language as tl


@triton.jit
def key_of(x, at, inside):
    # -0.0 and 0.0 are equal and so must be their keys.
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)
    return tl.where(inside, (ordered << 32) | (0x7FFFFFFF - at).to(tl.int64), -0x8000000000000000)


@triton.jit(do_not_specialize=["count"])
def logprobs_piece_kernel(
    logits, tokens, part_max, part_sum, part_ahead, candidates, row_stride, vocabulary, count, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    part = row * tl.num_programs(1) + piece
    at = piece * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    x = tl.load(logits + row * row_stride + at, mask=inside, other=float("-inf"))
    token = tl.maximum(tl.load(tokens + row), 0)
    own = tl.load(logits + row * row_stride + token)
    highest = tl.max(x, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(part_max + part, highest)
    tl.store(part_sum + part, tl.sum(tl.exp(x - base), 0))
    ahead = inside & ((x > own) | ((x == own) & (at < token)))
    tl.store(part_ahead + part, tl.sum(ahead.to(tl.int32), 0))
    keys = key_of(x, at, inside)
    for j in range(0, count):
        best = tl.max(keys, 0)
        tl.store(candidates + part * count + j, best)
        keys = tl.where(keys == best, -0x8000000000000000, keys)


@triton.jit(do_not_specialize=["count", "pieces"])
def logprobs_row_kernel(
    logits, tokens, part_max, part_sum, part_ahead, candidates, logprobs, ranks, top_ids, top_logprobs,
    row_stride, count, pieces, LOWEST: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK_P)
    there = parts < pieces
    maxima = tl.load(part_max + row * pieces + parts, mask=there, other=float("-inf"))
    highest = tl.max(maxima, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    sums = tl.load(part_sum + row * pieces + parts, mask=there, other=0.0)
    log_sum = tl.log(tl.sum(sums * tl.exp(maxima - base), 0))
    ahead = tl.sum(tl.load(part_ahead + row * pieces + parts, mask=there, other=0), 0)
    token = tl.load(tokens + row)
    used = token >= 0
    own = tl.load(logits + row * row_stride + tl.maximum(token, 0))
    tl.store(logprobs + row, tl.where(used, tl.maximum(own - base - log_sum, LOWEST), 0.0))
    tl.store(ranks + row, tl.where(used, ahead + 1, 0).to(tl.int64))
    places = tl.arange(0, BLOCK_C)
    total = pieces * count
    keys = tl.load(candidates + row * total + places, mask=places < total, other=-0x8000000000000000)
    for j in range(0, count):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, -0x8000000000000000, keys)
        ordered = (best >> 32).to(tl.int32)
        x = tl.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
        identity = 0x7FFFFFFF - (best & 0x7FFFFFFF)
        tl.store(top_ids + row * count + j, tl.where(used, identity, 0))
        tl.store(top_logprobs + row * count + j, tl.where(used, tl.maximum(x - base - log_sum, LOWEST), 0.0))


def settings(vocabulary: int, count: int) -> dict[str, tuple[dict, dict]]:
    """(constexpr arguments, compile options) of both kernels; the compile gate builds the same."""
    block = min(4096, max(128, triton.next_power_of_2(vocabulary)))
    pieces = triton.cdiv(vocabulary, block)
    row = {
        "LOWEST": torch.finfo(torch.float32).min,
        "BLOCK_P": triton.next_power_of_2(pieces),
        "BLOCK_C": triton.next_power_of_2(max(1, pieces * count)),
    }
    return {
        "piece": ({"BLOCK": block}, {"num_warps": max(1, block // 512), "enable_fp_fusion": True}),
        "row": (row, {"num_warps": 4 if row["BLOCK_C"] <= 2048 else 8, "enable_fp_fusion": True}),
    }


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    ranks: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> None:
    """See `ops.token_logprobs`; arguments are validated there."""
    rows, vocabulary = logits.shape
    count = top_ids.shape[1]
    chosen = settings(vocabulary, count)
    constants, options = chosen["piece"]
    pieces = triton.cdiv(vocabulary, constants["BLOCK"])
    part_max, part_sum = torch.empty(2, rows, pieces, dtype=torch.float32, device=logits.device)
    part_ahead = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    # One more than needed: a pointer to nothing is no pointer.
    candidates = torch.empty(rows * pieces * count + 1, dtype=torch.int64, device=logits.device)
    logprobs_piece_kernel[(rows, pieces)](
        logits, tokens, part_max, part_sum, part_ahead, candidates, logits.stride(0), vocabulary, count,
        **constants, **options,
    )  # fmt: skip
    constants, options = chosen["row"]
    logprobs_row_kernel[(rows,)](
        logits, tokens, part_max, part_sum, part_ahead, candidates, logprobs, ranks, top_ids, top_logprobs,
        logits.stride(0), count, pieces, **constants, **options,
    )  # fmt: skip
