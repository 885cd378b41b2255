"""Draw a token per row by its temperature alone (CPU): the softmax, its running sum and the search in one pass.

Each token weighs exp((logit - best) / temperature), cut to a multiple of 2**-40, as in the sampler's general way: sums
of integers are exact, so a row's token depends neither on the order of summation nor on the other rows. A work item is
one row; its weights are summed by blocks, and only the block that the draw falls into is looked at token by token.
"""

import math
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import torch
from llvmlite import ir
from numba import carray
from numba.core import types
from numba.extending import intrinsic

from paged_kernels.cpu.micro import BUILD_TAG, _Emit
from paged_kernels.cpu.primitives import fetch_add, pointer
from paged_kernels.cpu.runtime import UNBOUNDED, Arguments, compile_kernel, launch, thread_count

UNIT = float(1 << 40)
_BLOCK = 512
_LANES = 16
PARALLEL_LOGITS = 1 << 16  # below this, waking threads costs more than the work
TAG = zlib.crc32(Path(__file__).read_bytes(), BUILD_TAG)
_I64 = ir.IntType(64)
_ARGUMENTS = Arguments("logits best temperature chance tokens", "rows vocabulary row_stride")


def emit_weights(emit, base, at, best, factor, width):
    """2 ** ((logit - best) * factor) * UNIT of `width` logits, as float32; 0 for NaN."""
    vec = emit.b.fsub(emit.load(base, at, width), emit.splat(best, width))
    ratio = emit.exp2(emit.b.fmul(vec, emit.splat(factor, width)), width)
    # Rows with NaN are refused elsewhere; here they must only do no harm.
    is_number = emit.b.fcmp_ordered("ord", ratio, ratio)
    ratio = emit.b.select(is_number, ratio, emit.const(0.0, width))
    return emit.b.fmul(ratio, emit.const(UNIT, width))


@intrinsic
def sum_weights(typingctx, logits, offset, count, best, factor):
    """Sum over logits[offset : offset + count] of int(2 ** ((logit - best) * factor) * UNIT); none exceeds best."""

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        base = emit.base(sig.args[0], args[0])

        def body(width, start):
            def weigh(i, acc):
                at = builder.add(start, builder.mul(i, emit.i64(width)))
                scaled = emit_weights(emit, base, at, args[3], args[4], width)
                return [builder.add(acc[0], builder.fptosi(scaled, ir.VectorType(_I64, width)))]

            return weigh

        def zeros(width):
            return ir.Constant(ir.VectorType(_I64, width), [0] * width)

        wide = builder.sdiv(args[2], emit.i64(_LANES))
        whole = builder.mul(wide, emit.i64(_LANES))
        (sums,) = emit.loop(wide, [zeros(_LANES)], body(_LANES, args[1]))
        rest = builder.sub(args[2], whole)
        (tail,) = emit.loop(rest, [zeros(1)], body(1, builder.add(args[1], whole)))
        total = builder.extract_element(tail, emit.i64(0))
        for lane in range(_LANES):
            total = builder.add(total, builder.extract_element(sums, emit.i64(lane)))
        return total

    n = types.int64
    return n(logits, n, n, types.float32, types.float32), codegen


@cache
def _build():
    tag, block = TAG, _BLOCK
    log2_e = np.float32(math.log2(math.e))

    def draw(arguments, taken, items):
        _ = tag
        args = carray(arguments, 1)[0]
        logits = carray(pointer(args.logits), UNBOUNDED, np.float32)
        best = carray(pointer(args.best), args.rows, np.float32)
        temperature = carray(pointer(args.temperature), args.rows, np.float32)
        chance = carray(pointer(args.chance), args.rows, np.float64)
        tokens = carray(pointer(args.tokens), args.rows, np.int64)
        counter = carray(taken, 1)
        blocks = (args.vocabulary + block - 1) // block
        sums = np.empty(blocks, dtype=np.int64)
        done = 0
        while True:
            row = fetch_add(counter, 0)
            if row >= items:
                return done
            done += 1
            start, top = row * args.row_stride, best[row]
            factor = log2_e / temperature[row]
            total = np.int64(0)
            for i in range(blocks):
                count = min(block, args.vocabulary - i * block)
                sums[i] = sum_weights(logits, start + i * block, count, top, factor)
                total += sums[i]
            target = min(np.int64(chance[row] * total), total - 1)
            at = np.int64(0)
            while at < blocks - 1 and sums[at] <= target:
                target -= sums[at]
                at += 1
            token = at * block
            while token < args.vocabulary - 1:
                weight = sum_weights(logits, start + token, 1, top, factor)
                if weight > target:
                    break
                target -= weight
                token += 1
            tokens[row] = token

    return compile_kernel(draw, _ARGUMENTS)


def draw_tokens(
    logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, chance: torch.Tensor
) -> torch.Tensor:
    """A token per row, with the probabilities softmax(logits / temperature).

    Args:
        logits: float32 [R, vocabulary], rows contiguous.
        best: float32 [R], the rows' maxima.
        temperature: float32 [R], positive.
        chance: float64 [R] in [0, 1): where in the cumulative distribution the draw falls.

    Returns:
        int64 [R].
    """
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    record = _ARGUMENTS.pack(
        logits=logits, best=best, temperature=temperature, chance=chance, tokens=tokens,
        rows=rows, vocabulary=vocabulary, row_stride=logits.stride(0),
    )  # fmt: skip
    threads = thread_count() if rows * vocabulary >= PARALLEL_LOGITS else 1
    launch(_build(), record, rows, min(threads, rows))
    return tokens
