"""Vector building blocks of the CPU attention kernels, emitted as LLVM IR.

Numba vectorises simple loops, but not the register-blocked products attention consists of, and it never
vectorises `exp` without SVML. The intrinsics here emit explicit vector types (`<16 x float>`; LLVM splits or
widens them to what the machine has: SSE, AVX2, AVX-512, NEON), so speed does not hang on the auto-vectoriser.

Conventions. Arrays are flat and C-contiguous, addressed by an element offset; `float32` arrays hold values,
`uint16` arrays hold bfloat16 bits (widened on load by a shift of 16). Sizes that shape the code (head_dim,
group) must be compile-time literals. Softmax is in base 2: scores arrive multiplied by log2(e). Nothing here
knows about pages, sequences or threads; `decode.py` and `prefill.py` call it.

The instructions carry their own fast-math flags (contract everywhere, reassoc on horizontal sums). Callers
must not be compiled with numba's `fastmath`: it rewrites the flags of every instruction, and reassociation
would fold away the rounding trick in `_Emit.exp2`.
"""

import itertools
import math
import zlib
from pathlib import Path

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

from paged_kernels.cpu import primitives

PANEL = 16
"""Query rows the prefill kernel handles side by side; the width of the vectors it works in."""

BUILD_TAG = zlib.crc32(Path(__file__).read_bytes(), primitives.BUILD_TAG)
"""Closure constant of every kernel built from this file: numba's disk cache looks only at the file of the
function it compiles, so without it an edit here would leave stale machine code in use."""

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_CONTRACT = ("contract",)
_ROUNDER = float(3 << 22)  # 1.5 * 2**23: adding it leaves the nearest integer in the low mantissa bits
_SMALLEST = -126.0  # 2**x below this is subnormal in float32; taken as zero


def _literal(ty, name):
    if not isinstance(ty, types.IntegerLiteral):
        raise RequireLiteralValue(f"{name} must be a compile-time integer")
    return ty.literal_value


def _chunks(n):
    """Cut n lanes into vectors: (offset, width) with widths 16, 8, 4, 2, 1."""
    out, at = [], 0
    for width in (16, 8, 4, 2, 1):
        while n - at >= width:
            out.append((at, width))
            at += width
    return out


def _row_blocks(rows, most=4):
    """Cut rows into nearly equal blocks of at most `most`: (first row, rows)."""
    count = -(-rows // most)
    cuts = [rows * i // count for i in range(count + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(cuts)]


class _Emit:
    """One intrinsic's code generation: pointers, vector loads and stores, arithmetic with the right flags."""

    def __init__(self, context, builder):
        self.context, self.b = context, builder

    def base(self, ty, value):
        """(data pointer, element type is bfloat16 bits) of an array argument."""
        data = self.context.make_array(ty)(self.context, self.b, value=value).data
        return data, ty.dtype == types.uint16

    def i64(self, value):
        return ir.Constant(_I64, value)

    def const(self, value, width):
        vec = ir.VectorType(_F32, width)
        return ir.Constant(vec, [value] * width)

    def iconst(self, value, width):
        return ir.Constant(ir.VectorType(_I32, width), [value] * width)

    def at(self, offset, add):
        return self.b.add(offset, self.i64(add)) if add else offset

    def load(self, base, offset, width):
        """<width x float> at an element offset, widening bfloat16 bits."""
        data, is_bf16 = base
        elem = ir.IntType(16) if is_bf16 else _F32
        ptr = self.b.bitcast(self.b.gep(data, [offset]), ir.VectorType(elem, width).as_pointer())
        vec = self.b.load(ptr, align=2 if is_bf16 else 4)
        if not is_bf16:
            return vec
        wide = self.b.zext(vec, ir.VectorType(_I32, width))
        return self.b.bitcast(self.b.shl(wide, self.iconst(16, width)), ir.VectorType(_F32, width))

    def store(self, base, offset, vec, width):
        """Store floats; to bfloat16 by round to nearest even, NaN kept as a quiet NaN."""
        data, is_bf16 = base
        elem = _F32
        if is_bf16:
            elem = ir.IntType(16)
            bits = self.b.bitcast(vec, ir.VectorType(_I32, width))
            high = self.b.lshr(bits, self.iconst(16, width))
            odd = self.b.and_(high, self.iconst(1, width))
            rounded = self.b.add(self.b.add(bits, self.iconst(0x7FFF, width)), odd)
            rounded = self.b.lshr(rounded, self.iconst(16, width))
            is_nan = self.b.fcmp_unordered("uno", vec, vec)
            high = self.b.select(is_nan, self.b.or_(high, self.iconst(0x40, width)), rounded)
            vec = self.b.trunc(high, ir.VectorType(elem, width))
        ptr = self.b.bitcast(self.b.gep(data, [offset]), ir.VectorType(elem, width).as_pointer())
        self.b.store(vec, ptr, align=2 if is_bf16 else 4)

    def splat(self, scalar, width):
        vec = ir.VectorType(_F32, width)
        one = self.b.insert_element(ir.Constant(vec, ir.Undefined), scalar, ir.Constant(_I32, 0))
        mask = ir.Constant(ir.VectorType(_I32, width), [0] * width)
        return self.b.shuffle_vector(one, ir.Constant(vec, ir.Undefined), mask)

    def scalar(self, base, offset):
        return self.b.load(self.b.gep(base[0], [offset]))

    def fma(self, x, y, acc):
        return self.b.fadd(acc, self.b.fmul(x, y, flags=_CONTRACT), flags=_CONTRACT)

    def max(self, x, y):
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def halves(self, vec, width, combine):
        """Reduce a vector to its first lane by folding halves."""
        undef = ir.Constant(ir.VectorType(_F32, width), ir.Undefined)
        while width > 1:
            width //= 2
            low = ir.Constant(ir.VectorType(_I32, width), list(range(width)))
            high = ir.Constant(ir.VectorType(_I32, width), list(range(width, 2 * width)))
            vec = combine(self.b.shuffle_vector(vec, undef, low), self.b.shuffle_vector(vec, undef, high))
            undef = ir.Constant(ir.VectorType(_F32, width), ir.Undefined)
        return self.b.extract_element(vec, ir.Constant(_I32, 0))

    def hsum(self, vec, width):
        return self.halves(vec, width, lambda x, y: self.b.fadd(x, y))

    def exp2(self, x, width):
        """2**x for x <= 0, exactly 0 below 2**-126 and for -inf, NaN for NaN.

        x = n + r with n the nearest integer; 2**r is its Taylor series to the seventh power (error below
        1e-8 for |r| <= 1/2), and n is added to the exponent field.
        """
        low = self.const(_SMALLEST, width)
        tiny = self.b.fcmp_ordered("<", x, low)
        clamped = self.b.select(tiny, low, x)
        shifted = self.b.fadd(clamped, self.const(_ROUNDER, width))
        r = self.b.fsub(clamped, self.b.fsub(shifted, self.const(_ROUNDER, width)))
        poly = self.const(math.log(2) ** 7 / math.factorial(7), width)
        for k in range(6, -1, -1):
            poly = self.fma(poly, r, self.const(math.log(2) ** k / math.factorial(k), width))
        ints = ir.VectorType(_I32, width)
        n = self.b.shl(self.b.bitcast(shifted, ints), self.iconst(23, width))
        value = self.b.bitcast(self.b.add(self.b.bitcast(poly, ints), n), x.type)
        value = self.b.select(tiny, self.const(0.0, width), value)
        return self.b.select(self.b.fcmp_unordered("uno", x, x), x, value)

    def loop(self, count, carried, body):
        """for i in range(count): carried = body(i, carried); values live in registers after mem2reg."""
        slots = [cgutils.alloca_once_value(self.b, v) for v in carried]
        for slot, value in zip(slots, carried, strict=True):
            self.b.store(value, slot)
        with cgutils.for_range(self.b, count, intp=_I64) as step:
            new = body(step.index, [self.b.load(s) for s in slots])
            for slot, value in zip(slots, new, strict=True):
                self.b.store(value, slot)
        return [self.b.load(s) for s in slots]


@intrinsic(prefer_literal=True)
def load_row(typingctx, dst, dst_off, src, src_off, scale, head_dim):
    """dst[:head_dim] = src[:head_dim] * scale, in float32."""
    lanes = _chunks(_literal(head_dim, "head_dim"))

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        to, frm = emit.base(sig.args[0], args[0]), emit.base(sig.args[2], args[2])
        for at, width in lanes:
            vec = emit.load(frm, emit.at(args[3], at), width)
            vec = builder.fmul(vec, emit.splat(args[4], width))
            emit.store(to, emit.at(args[1], at), vec, width)
        return context.get_dummy_value()

    sig = types.void(dst, types.int64, src, types.int64, types.float32, head_dim)
    return sig, codegen


@intrinsic(prefer_literal=True)
def copy_row(typingctx, dst, dst_off, src, src_off, head_dim):
    """dst[:head_dim] = src[:head_dim], converting between float32 and bfloat16 bits."""
    lanes = _chunks(_literal(head_dim, "head_dim"))

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        to, frm = emit.base(sig.args[0], args[0]), emit.base(sig.args[2], args[2])
        for at, width in lanes:
            vec = emit.load(frm, emit.at(args[3], at), width)
            emit.store(to, emit.at(args[1], at), vec, width)
        return context.get_dummy_value()

    sig = types.void(dst, types.int64, src, types.int64, head_dim)
    return sig, codegen


@intrinsic(prefer_literal=True)
def group_scores(typingctx, s, s_off, s_stride, q, k, k_off, group, head_dim):
    """s[s_off + g * s_stride] = q[g] . k for one key and the `group` query rows that share it.

    s, q: float32 (q packed [group, head_dim]); k: one key row, float32 or bfloat16 bits.
    """
    rows, dim = _literal(group, "group"), _literal(head_dim, "head_dim")
    lanes = _chunks(dim)

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        scores, query, key = (emit.base(sig.args[i], args[i]) for i in (0, 3, 4))
        sums = [{} for _ in range(rows)]
        for at, width in lanes:
            vec = emit.load(key, emit.at(args[5], at), width)
            for g in range(rows):
                row = emit.load(query, emit.i64(g * dim + at), width)
                acc = sums[g].get(width)
                zero = emit.const(0.0, width)
                sums[g][width] = emit.fma(row, vec, zero if acc is None else acc)
        for g in range(rows):
            parts = [emit.hsum(vec, width) for width, vec in sums[g].items()]
            total = parts[0]
            for part in parts[1:]:
                total = builder.fadd(total, part)
            where = builder.add(args[1], builder.mul(args[2], emit.i64(g)))
            builder.store(total, builder.gep(scores[0], [where]))
        return context.get_dummy_value()

    sig = types.void(s, types.int64, types.int64, q, k, types.int64, group, head_dim)
    return sig, codegen


def _accumulate(emit, c, c_off, ldc, a, a_off, a_row, a_col, b, b_off, ldb, depth, shape):
    """C[i, :] += sum over k of A[i, k] * B[k, :], C held in registers; shape = (row, rows, lane, width)."""
    row, rows, lane, width = shape
    builder = emit.b

    def where(i):
        return emit.at(builder.add(c_off, builder.mul(ldc, emit.i64(row + i))), lane)

    def body(k, acc):
        vec = emit.load(b, emit.at(builder.add(b_off, builder.mul(k, ldb)), lane), width)
        a_k = builder.add(a_off, builder.mul(k, a_col))
        out = []
        for i in range(rows):
            a_ik = emit.scalar(a, builder.add(a_k, builder.mul(a_row, emit.i64(row + i))))
            out.append(emit.fma(emit.splat(a_ik, width), vec, acc[i]))
        return out

    start = [emit.load(c, where(i), width) for i in range(rows)]
    for i, vec in enumerate(emit.loop(depth, start, body)):
        emit.store(c, where(i), vec, width)


@intrinsic(prefer_literal=True)
def add_values(typingctx, acc, acc_off, p, p_off, p_row, p_col, v, v_off, v_stride, tokens, rows, head_dim):
    """acc[r, :] += sum over t of p[p_off + r * p_row + t * p_col] * v[t, :], for `rows` rows.

    acc, p: float32 (acc packed [rows, head_dim]); v: `tokens` rows v_stride apart, float32 or bfloat16 bits.
    """
    count, dim = _literal(rows, "rows"), _literal(head_dim, "head_dim")

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        c, a, b = (emit.base(sig.args[i], args[i]) for i in (0, 2, 6))
        for lane, width in _chunks(dim):
            for row, many in _row_blocks(count):
                _accumulate(
                    emit, c, args[1], emit.i64(dim), a, args[3], args[4], args[5],
                    b, args[7], args[8], args[9], (row, many, lane, width),
                )  # fmt: skip
        return context.get_dummy_value()

    n = types.int64
    return types.void(acc, n, p, n, n, n, v, n, n, n, rows, head_dim), codegen


@intrinsic(prefer_literal=True)
def panel_scores(typingctx, s, k, tokens, q, q_off, head_dim):
    """s[t, :] = sum over d of k[t, d] * q[d, :] for the PANEL query rows stored d-major at q_off.

    All float32; s [tokens, PANEL], k [tokens, head_dim], tokens a multiple of 4.
    """
    dim = _literal(head_dim, "head_dim")

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        c, b, a = (emit.base(sig.args[i], args[i]) for i in (0, 3, 1))
        zero = emit.const(0.0, PANEL)
        with cgutils.for_range(builder, builder.sdiv(args[2], emit.i64(4)), intp=_I64) as block:
            t0 = builder.mul(block.index, emit.i64(4))
            k0 = builder.mul(t0, emit.i64(dim))

            def body(d, acc):
                vec = emit.load(b, builder.add(args[4], builder.mul(d, emit.i64(PANEL))), PANEL)
                out = []
                for i in range(4):
                    k_td = emit.scalar(a, emit.at(builder.add(k0, d), i * dim))
                    out.append(emit.fma(emit.splat(k_td, PANEL), vec, acc[i]))
                return out

            for i, vec in enumerate(emit.loop(emit.i64(dim), [zero] * 4, body)):
                where = builder.mul(emit.at(t0, i), emit.i64(PANEL))
                emit.store(c, where, vec, PANEL)
        return context.get_dummy_value()

    return types.void(s, k, types.int64, q, types.int64, head_dim), codegen


def _rebase(emit, m_old, m_new, width):
    """(the maximum to subtract, the factor for what was summed under m_old); -inf on both sides gives 0."""
    empty = emit.b.fcmp_ordered("==", m_new, emit.const(-math.inf, width))
    base = emit.b.select(empty, emit.const(0.0, width), m_new)
    return base, emit.exp2(emit.b.fsub(m_old, base), width)


@intrinsic
def panel_softmax(typingctx, s, tokens, m, norm, alpha, off):
    """One online-softmax step, down the columns: s [tokens, PANEL] scores become weights in place.

    m, norm (running maximum and sum) and alpha (factor for the rows accumulated so far) are float32, PANEL
    entries at `off`.
    """

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        score, mx, ls, al = (emit.base(sig.args[i], args[i]) for i in (0, 2, 3, 4))
        count, off = args[1], args[5]
        m_old = emit.load(mx, off, PANEL)

        def place(t):
            return builder.mul(t, emit.i64(PANEL))

        def top(t, acc):
            return [emit.max(emit.load(score, place(t), PANEL), acc[0])]

        (m_new,) = emit.loop(count, [m_old], top)
        base, factor = _rebase(emit, m_old, m_new, PANEL)

        def weigh(t, acc):
            w = emit.exp2(builder.fsub(emit.load(score, place(t), PANEL), base), PANEL)
            emit.store(score, place(t), w, PANEL)
            return [builder.fadd(acc[0], w)]

        start = builder.fmul(emit.load(ls, off, PANEL), factor)
        (total,) = emit.loop(count, [start], weigh)
        for target, vec in ((mx, m_new), (ls, total), (al, factor)):
            emit.store(target, off, vec, PANEL)
        return context.get_dummy_value()

    return types.void(s, types.int64, m, norm, alpha, types.int64), codegen


@intrinsic
def row_softmax(typingctx, s, s_off, blocks, m, norm, alpha, row):
    """One online-softmax step along a row of 16 * blocks scores at s_off (pad with -inf), in place.

    m, norm, alpha: float32, one entry per row; alpha[row] is the factor for what was accumulated so far.
    """

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        score, mx, ls, al = (emit.base(sig.args[i], args[i]) for i in (0, 3, 4, 5))
        count, row = args[2], args[6]

        def place(t):
            return builder.add(args[1], builder.mul(t, emit.i64(16)))

        def top(t, acc):
            return [emit.max(emit.load(score, place(t), 16), acc[0])]

        m_old = emit.load(mx, row, 1)
        (tops,) = emit.loop(count, [emit.const(-math.inf, 16)], top)
        m_new = emit.max(emit.splat(emit.halves(tops, 16, emit.max), 1), m_old)
        base, factor = _rebase(emit, m_old, m_new, 1)
        base16 = emit.splat(builder.extract_element(base, ir.Constant(_I32, 0)), 16)

        def weigh(t, acc):
            w = emit.exp2(builder.fsub(emit.load(score, place(t), 16), base16), 16)
            emit.store(score, place(t), w, 16)
            return [builder.fadd(acc[0], w)]

        (sums,) = emit.loop(count, [emit.const(0.0, 16)], weigh)
        total = emit.splat(emit.hsum(sums, 16), 1)
        total = emit.fma(emit.load(ls, row, 1), factor, total)
        for target, vec in ((mx, m_new), (ls, total), (al, factor)):
            emit.store(target, row, vec, 1)
        return context.get_dummy_value()

    n = types.int64
    return types.void(s, n, n, m, norm, alpha, n), codegen
