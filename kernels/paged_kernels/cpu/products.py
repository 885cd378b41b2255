"""Register-blocked products of activation rows with a packed panel of weights, emitted as LLVM IR.

A panel is the weights of PANEL_OUTPUTS outputs, stored so that the products stream through it once, front to back:

    float32   [k][output]                one multiply-add per weight
    bfloat16  [k / 2][output][2]         pairs along k, the operand layout of AVX512-BF16's dot product

Sums are float32 in registers whatever the inputs are. Without AVX512-BF16 a pair is widened to float32 by a shift and
a mask. A row's sum goes along k in order, so its bits depend neither on the other rows nor on the thread count. Knows
nothing of threads or models; `linear.py` and `prefill.py` call it.
"""

import math
import zlib
from pathlib import Path

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from paged_kernels.cpu.micro import BUILD_TAG, _chunks, _Emit, _literal, has_wide_registers

PANEL_OUTPUTS = 32
"""Outputs per panel: two 16-lane vectors."""

PANEL_STEP_BYTES = 4 * PANEL_OUTPUTS
"""Weights that a step along k multiplies."""

ROW_BLOCKS = (8, 4, 2, 1) if has_wide_registers() else (6, 2, 1)
"""Rows multiplied at a time: enough independent sums to keep the multipliers busy, in registers that suffice."""

TAG = zlib.crc32(Path(__file__).read_bytes(), BUILD_TAG)

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_LANES = 16
_LINE_BYTES = 64


def _register_blocks(rows, half):
    """(rows, vectors of the panel) whose sums are in registers at once, one after the other."""
    # bfloat16 that is widened needs twice the registers for its factors.
    most = 4 if half else 6
    if has_wide_registers() or rows < most:
        return [(range(rows), range(2))]
    return [(range(r, min(rows, r + most)), [v]) for r in range(0, rows, most) for v in range(2)]


def _cast(emit, data, offset, kind):
    """A pointer to elements of another type, from an element offset on."""
    return emit.b.bitcast(emit.b.gep(data, [offset]), kind.as_pointer())


@intrinsic(prefer_literal=True)
def panel_product(typingctx, c, c_off, c_row, more, a, a_off, a_row, panel, panel_off, depth, rows):
    """c[r, :] = sum over k of a[r, k] * panel[k, :], for `rows` rows (a literal of ROW_BLOCKS); added to what is in c
    if `more`.

    c: float32, rows of PANEL_OUTPUTS `c_row` elements apart at c_off. a: rows `a_row` elements apart. panel: one packed
    panel. Offsets and strides count elements of their array: float32, or uint16 for bfloat16 bits; depth, even for the
    latter, counts elements along k.
    """
    count = _literal(rows, "rows")

    def codegen(context, builder, sig, args):
        _emit_product(_Emit(context, builder), sig.args, args, count)
        return context.get_dummy_value()

    n = types.int64
    return types.void(c, n, n, n, a, n, n, panel, n, n, rows), codegen


@intrinsic(prefer_literal=True)
def asking_panel_product(
    typingctx, c, c_off, c_row, more, a, a_off, a_row, panel, panel_off, depth, next_off, pace, rows
):
    """`panel_product` that meanwhile asks for the weights from next_off on: per row and step along k `pace` bytes of
    them, float64. Where the core finds what comes next by itself, that takes loads for nothing."""
    count = _literal(rows, "rows")

    def codegen(context, builder, sig, args):
        _emit_product(_Emit(context, builder), sig.args, args, count, coming=(args[10], args[11]))
        return context.get_dummy_value()

    n = types.int64
    return types.void(c, n, n, n, a, n, n, panel, n, n, n, types.float64, rows), codegen


def _emit_product(emit, kinds, args, count, coming=None):
    """The code of a product of `count` rows; `coming`: offset and pace of what is asked for."""
    builder, half = emit.b, kinds[4].dtype == types.uint16
    out = emit.base(kinds[0], args[0])
    element = _I32 if half else _F32
    step = 2 if half else 1
    activations, panels = emit.base(kinds[4], args[4])[0], emit.base(kinds[7], args[7])[0]
    rows_at = _cast(emit, activations, args[5], element)
    weights = _cast(emit, panels, args[8], ir.VectorType(element, _LANES))
    steps = builder.sdiv(args[9], emit.i64(step))
    row_steps = builder.sdiv(args[6], emit.i64(step))
    starts = [builder.gep(rows_at, [builder.mul(row_steps, emit.i64(r))]) for r in range(count)]
    c_rows = [builder.add(args[1], builder.mul(args[2], emit.i64(r))) for r in range(count)]
    zero, more = emit.const(0.0, _LANES), builder.icmp_signed("!=", args[3], emit.i64(0))
    blocks = _register_blocks(count, half)
    ask = _asking(emit, panels, *coming, steps, count, len(blocks)) if coming else None

    def block(index, rows, vectors):
        def body(k, acc):
            at = builder.mul(k, emit.i64(2))
            pair = [builder.load(builder.gep(weights, [emit.at(at, i)]), align=4) for i in vectors]
            if ask:
                ask(index, k)
            new = []
            for r in rows:
                scalar = emit.splat(builder.load(builder.gep(starts[r], [k]), align=4), _LANES)
                for weight in pair:
                    multiply = emit.pair_products if half else emit.fma
                    new.append(multiply(weight, scalar, acc[len(new)]))
            return new

        places = [emit.at(c_rows[r], i * _LANES) for r in rows for i in vectors]
        start = [builder.select(more, emit.load(out, place, _LANES), zero) for place in places]
        for place, vec in zip(places, emit.loop(steps, start, body), strict=True):
            emit.store(out, place, vec, _LANES)

    for index, (rows, vectors) in enumerate(blocks):
        block(index, rows, vectors)


def _asking(emit, panels, next_off, pace, steps, rows, blocks):
    """What asks for weights in a step: a function of the register block, of so many, and the step along k."""
    builder = emit.b
    first = _cast(emit, panels, next_off, ir.IntType(8))
    share = builder.fmul(pace, ir.Constant(pace.type, rows / blocks))
    stride = builder.add(builder.fptosi(share, _I64), emit.i64(1))

    def ask(block, k):
        place = builder.mul(stride, builder.add(builder.mul(steps, emit.i64(block)), k))
        for line in range(2 if blocks == 1 else 1):
            emit.prefetch(builder.gep(first, [emit.at(place, line * _LINE_BYTES)]))

    return ask


@intrinsic(prefer_literal=True)
def gate(typingctx, c, c_off, count):
    """c[i] = silu(c[i]) * c[count + i] for `count` (a literal) float32 values at c_off."""
    lanes = _chunks(_literal(count, "count"))

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        base = emit.base(sig.args[0], args[0])
        many = _literal(count, "count")
        for at, width in lanes:
            x = emit.load(base, emit.at(args[1], at), width)
            up = emit.load(base, emit.at(args[1], many + at), width)
            zero, one = emit.const(0.0, width), emit.const(1.0, width)
            negative = builder.fcmp_ordered("<", x, zero)
            # exp of what is never positive: it cannot overflow.
            size = builder.select(negative, builder.fsub(zero, x), x)
            decay = emit.exp2(builder.fmul(size, emit.const(-math.log2(math.e), width)), width)
            share = builder.fdiv(builder.select(negative, decay, one), builder.fadd(one, decay))
            emit.store(base, emit.at(args[1], at), builder.fmul(builder.fmul(x, share), up), width)
        return context.get_dummy_value()

    return types.void(c, types.int64, count), codegen


@intrinsic
def normalize(typingctx, out, out_off, x, x_off, weight, size, eps):
    """out[:size] = x[:size] / sqrt(mean(x ** 2) + eps) * weight; x and weight float32, out may be x."""

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        to, source, factors = (emit.base(sig.args[i], args[i]) for i in (0, 2, 4))
        size = args[5]
        wide = builder.sdiv(size, emit.i64(_LANES))
        first = builder.mul(wide, emit.i64(_LANES))
        tail = builder.sub(size, first)

        def squares(width, start):
            def body(i, acc):
                at = builder.add(start, builder.mul(i, emit.i64(width)))
                vec = emit.load(source, builder.add(args[3], at), width)
                return [emit.fma(vec, vec, acc[0])]

            return body

        (sums,) = emit.loop(wide, [emit.const(0.0, _LANES)], squares(_LANES, emit.i64(0)))
        (rest,) = emit.loop(tail, [emit.const(0.0, 1)], squares(1, first))
        total = builder.fadd(emit.hsum(sums, _LANES), builder.extract_element(rest, ir.Constant(_I32, 0)))
        mean = builder.fdiv(total, builder.sitofp(size, _F32))
        root = builder.call(
            cgutils.get_or_insert_function(builder.module, ir.FunctionType(_F32, [_F32]), "llvm.sqrt.f32"),
            [builder.fadd(mean, args[6])],
        )
        scale = builder.fdiv(ir.Constant(_F32, 1.0), root)

        def scaled(width, start):
            def body(i, _):
                at = builder.add(start, builder.mul(i, emit.i64(width)))
                vec = emit.load(source, builder.add(args[3], at), width)
                vec = builder.fmul(builder.fmul(vec, emit.splat(scale, width)), emit.load(factors, at, width))
                emit.store(to, builder.add(args[1], at), vec, width)
                return []

            return body

        emit.loop(wide, [], scaled(_LANES, emit.i64(0)))
        emit.loop(tail, [], scaled(1, first))
        return context.get_dummy_value()

    n = types.int64
    return types.void(out, n, x, n, weight, n, types.float32), codegen


@intrinsic(prefer_literal=True)
def rotate(typingctx, out, out_off, x, x_off, cos, sin, table_off, half):
    """Rotary embedding of one head of 2 * half (a literal) elements; x, cos and sin float32."""
    lanes = _chunks(_literal(half, "half"))

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        to, source, cosines, sines = (emit.base(sig.args[i], args[i]) for i in (0, 2, 4, 5))
        many = _literal(half, "half")
        for at, width in lanes:
            left = emit.load(source, emit.at(args[3], at), width)
            right = emit.load(source, emit.at(args[3], many + at), width)
            cosine = emit.load(cosines, emit.at(args[6], at), width)
            sine = emit.load(sines, emit.at(args[6], at), width)
            first = builder.fsub(builder.fmul(left, cosine), builder.fmul(right, sine))
            second = builder.fadd(builder.fmul(right, cosine), builder.fmul(left, sine))
            emit.store(to, emit.at(args[1], at), first, width)
            emit.store(to, emit.at(args[1], many + at), second, width)
        return context.get_dummy_value()

    n = types.int64
    return types.void(out, n, x, n, cos, sin, n, half), codegen
