"""Draw a token per row among the most likely ones: top-p and min-p by counting, without sorting (CPU).

Weights as in `draw.py`: integers in units of 2**-40 of the most likely token's, so sums are exact. Top-p keeps the
heaviest tokens until they hold the share p; of tokens that weigh the same at the edge, those with the lower ids. What
weighs at most (1 - p) / vocabulary of the whole can never be among them, which leaves few candidates. Their weights are
summed by size (binary exponent and six bits behind it), and only the bucket that the edge falls into is sorted. A work
item is one row.
"""

import math
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import torch
from llvmlite import ir
from numba import carray
from numba.core import cgutils, types
from numba.extending import intrinsic

from paged_kernels.cpu import draw as draw_module
from paged_kernels.cpu.draw import UNIT, emit_weights
from paged_kernels.cpu.micro import _Emit
from paged_kernels.cpu.primitives import fetch_add, pointer
from paged_kernels.cpu.runtime import UNBOUNDED, Arguments, compile_kernel, launch, thread_count

_BUCKET_BITS = 6
# The largest weight is 2**40, of 41 bits.
_NUM_BUCKETS = ((41 - _BUCKET_BITS - 1) << _BUCKET_BITS) + (2 << _BUCKET_BITS)
_TAG = zlib.crc32(Path(__file__).read_bytes(), draw_module.TAG)
_I1, _I64 = ir.IntType(1), ir.IntType(64)
_LANES = 16
_ARGUMENTS = Arguments("logits best temperature top_p min_p chance tokens", "rows vocabulary row_stride")


@intrinsic
def store_weights(typingctx, weights, logits, offset, count, best, factor, floor):
    """weights[i] of logits[offset + i] for `count` logits, 0 where it is below `floor` (float32, in units); returns
    their sum."""

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        data = context.make_array(sig.args[0])(context, builder, value=args[0]).data
        base = emit.base(sig.args[1], args[1])

        def body(width, start):
            vector = ir.VectorType(_I64, width)

            def weigh(i, acc):
                at = builder.add(start, builder.mul(i, emit.i64(width)))
                scaled = emit_weights(emit, base, builder.add(args[2], at), args[4], args[5], width)
                low = builder.fcmp_ordered("<", scaled, emit.splat(args[6], width))
                scaled = builder.select(low, emit.const(0.0, width), scaled)
                value = builder.fptosi(scaled, vector)
                place = builder.bitcast(builder.gep(data, [at]), vector.as_pointer())
                builder.store(value, place, align=8)
                return [builder.add(acc[0], value)]

            return weigh

        def zeros(width):
            return ir.Constant(ir.VectorType(_I64, width), [0] * width)

        wide = builder.sdiv(args[3], emit.i64(_LANES))
        whole = builder.mul(wide, emit.i64(_LANES))
        (sums,) = emit.loop(wide, [zeros(_LANES)], body(_LANES, emit.i64(0)))
        (tail,) = emit.loop(builder.sub(args[3], whole), [zeros(1)], body(1, whole))
        total = builder.extract_element(tail, emit.i64(0))
        for lane in range(_LANES):
            total = builder.add(total, builder.extract_element(sums, emit.i64(lane)))
        return total

    n, f = types.int64, types.float32
    return n(weights, logits, n, n, f, f, f), codegen


@intrinsic
def bit_length(typingctx, value):
    """Bits of a non-negative int64 up to its highest one."""

    def codegen(context, builder, sig, args):
        signature = ir.FunctionType(_I64, [_I64, _I1])
        function = cgutils.get_or_insert_function(builder.module, signature, "llvm.ctlz.i64")
        return builder.sub(ir.Constant(_I64, 64), builder.call(function, [args[0], ir.Constant(_I1, 0)]))

    return types.int64(types.int64), codegen


@cache
def _build():
    """The kernel. Longer than a screen because of what `draw` in it says."""
    tag, bits, num_buckets, unit = _TAG, _BUCKET_BITS, _NUM_BUCKETS, np.float32(UNIT)
    log2_e = np.float32(math.log2(math.e))

    def draw(arguments, taken, items):
        """Longer than a screen because numba's disk cache cannot key on a closure that holds another compiled
        function."""
        _ = tag
        args = carray(arguments, 1)[0]
        logits = carray(pointer(args.logits), UNBOUNDED, np.float32)
        best = carray(pointer(args.best), args.rows, np.float32)
        temperature = carray(pointer(args.temperature), args.rows, np.float32)
        top_p = carray(pointer(args.top_p), args.rows, np.float32)
        min_p = carray(pointer(args.min_p), args.rows, np.float32)
        chance = carray(pointer(args.chance), args.rows, np.float64)
        tokens = carray(pointer(args.tokens), args.rows, np.int64)
        counter = carray(taken, 1)
        size = args.vocabulary
        weights = np.empty(size, dtype=np.int64)
        candidates = np.empty(size, dtype=np.int64)
        edge = np.empty(size, dtype=np.int64)
        sums = np.empty(num_buckets, dtype=np.int64)
        done = 0
        while True:
            row = fetch_add(counter, 0)
            if row >= items:
                return done
            done += 1
            factor = log2_e / temperature[row]
            total = store_weights(weights, logits, row * args.row_stride, size, best[row], factor, min_p[row] * unit)
            needed = max(1, np.int64(math.ceil(np.float64(top_p[row]) * total)))
            # Tokens of at most this weight together hold no more than what may be left out.
            light = (total - needed) // size
            count = 0
            for i in range(size):
                if weights[i] > light:
                    candidates[count] = i
                    count += 1
            lightest, equal, kept = np.int64(1), size, total
            if needed < total:
                sums[:] = 0
                for c in range(count):
                    weight = weights[candidates[c]]
                    shift = max(0, bit_length(weight) - bits - 1)
                    sums[(shift << bits) + (weight >> shift)] += weight
                bucket, kept = num_buckets - 1, np.int64(0)
                while bucket > 0 and kept + sums[bucket] < needed:
                    kept += sums[bucket]
                    bucket -= 1
                many = 0
                for c in range(count):
                    weight = weights[candidates[c]]
                    shift = max(0, bit_length(weight) - bits - 1)
                    if (shift << bits) + (weight >> shift) == bucket:
                        edge[many] = weight
                        many += 1
                ordered = np.sort(edge[:many])
                last = many
                while last > 0 and kept < needed:
                    last -= 1
                    kept += ordered[last]
                lightest, equal = ordered[last], np.int64(0)
                while last < many and ordered[last] == lightest:
                    equal += 1
                    last += 1
            target = min(np.int64(chance[row] * kept), kept - 1)
            token = np.int64(0)
            for c in range(count):
                weight = weights[candidates[c]]
                if weight < lightest or (weight == lightest and equal == 0):
                    continue
                equal -= weight == lightest
                token = candidates[c]
                if weight > target:
                    break
                target -= weight
            tokens[row] = token

    return compile_kernel(draw, _ARGUMENTS)


def draw_nucleus(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    chance: torch.Tensor,
) -> torch.Tensor:
    """A token per row of those that min-p, then top-p keep, with probabilities in proportion to softmax(logits /
    temperature).

    Args:
        logits, best, temperature, chance: as for `draw_tokens`.
        top_p: float32 [R] in (0, 1]. min_p: float32 [R] in [0, 1].

    Returns:
        int64 [R].
    """
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    record = _ARGUMENTS.pack(
        logits=logits, best=best, temperature=temperature, top_p=top_p, min_p=min_p, chance=chance, tokens=tokens,
        rows=rows, vocabulary=vocabulary, row_stride=logits.stride(0),
    )  # fmt: skip
    threads = thread_count() if rows * vocabulary >= draw_module.PARALLEL_LOGITS else 1
    launch(_build(), record, rows, min(threads, rows))
    return tokens
