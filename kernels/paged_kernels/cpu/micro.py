"""Vector building blocks of the CPU attention kernels, emitted as LLVM IR.

Numba vectorises simple loops, but not the register-blocked products attention consists of, and it never
vectorises `exp` without SVML. The intrinsics here emit explicit vector types (`<16 x float>`; LLVM splits or
widens them to what the machine has: SSE, AVX2, AVX-512, NEON), so speed does not hang on the auto-vectoriser.

Conventions. Arrays are flat and C-contiguous, addressed by an element offset; `float32` arrays hold values,
`uint16` arrays hold bfloat16 bits (widened on load by a shift of 16). Sizes that shape the code (head_dim,
rows) must be compile-time literals. Softmax is in base 2: the scale of scores holds log2(e). Nothing here
knows about pages, sequences or threads; `tiles.py`, `products.py` and the kernels call it.

The instructions carry their own fast-math flags (contract everywhere, reassoc on horizontal sums). Callers
must not be compiled with numba's `fastmath`: it rewrites the flags of every instruction, and reassociation
would fold away the rounding trick in `_Emit.exp2`.
"""

import math
import zlib
from pathlib import Path

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

from paged_kernels.cpu import primitives

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


class _BFloat(ir.types._BaseFloatType):
    """LLVM's bfloat, which llvmlite has no name for."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self):
        return "bfloat"


_BFloat._create_instance()


def multiplies_bfloat16() -> bool:
    """Whether the code numba makes may use AVX512-BF16."""
    return _may_use("avx512bf16")


def has_wide_registers() -> bool:
    """Whether it may use AVX-512's 32 registers of 16 lanes. Others hold a quarter: 16 of 8 (AVX2), 32 of 4 (NEON)."""
    return _may_use("avx512f")


def code_tag() -> int:
    """What kernels' machine code depends on besides their text; see BUILD_TAG."""
    return multiplies_bfloat16() + 2 * has_wide_registers()


def _may_use(feature: str) -> bool:
    if numba.config.CPU_FEATURES is not None:
        return f"+{feature}" in numba.config.CPU_FEATURES
    return bool(llvmlite.binding.get_host_cpu_features().get(feature, False))


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
        if is_bf16 and width == 16 and multiplies_bfloat16():
            elem = ir.IntType(16)
            signature = ir.FunctionType(ir.VectorType(_BFloat(), 16), [vec.type])
            name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
            function = cgutils.get_or_insert_function(self.b.module, signature, name)
            vec = self.b.bitcast(self.b.call(function, [vec]), ir.VectorType(elem, 16))
        elif is_bf16:
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

    def prefetch(self, place):
        """See `primitives.emit_prefetch`."""
        primitives.emit_prefetch(self.b, place)

    def splat(self, scalar, width):
        vec = ir.VectorType(scalar.type, width)
        one = self.b.insert_element(ir.Constant(vec, ir.Undefined), scalar, ir.Constant(_I32, 0))
        mask = ir.Constant(ir.VectorType(_I32, width), [0] * width)
        return self.b.shuffle_vector(one, ir.Constant(vec, ir.Undefined), mask)

    def fma(self, x, y, acc):
        return self.b.fadd(acc, self.b.fmul(x, y, flags=_CONTRACT), flags=_CONTRACT)

    def max(self, x, y):
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def pair_products(self, pairs, others, acc):
        """acc + the dot products of 16 pairs of bfloat16 with 16 others; both <16 x i32>."""
        floats = ir.VectorType(_F32, 16)
        if multiplies_bfloat16():
            pair = ir.VectorType(_BFloat(), 32)
            signature = ir.FunctionType(floats, [floats, pair, pair])
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            function = cgutils.get_or_insert_function(self.b.module, signature, name)
            return self.b.call(function, [acc, self.b.bitcast(others, pair), self.b.bitcast(pairs, pair)])
        shift, mask = self.iconst(16, 16), self.iconst(0xFFFF0000, 16)

        def low(pair):
            return self.b.bitcast(self.b.shl(pair, shift), floats)

        def high(pair):
            return self.b.bitcast(self.b.and_(pair, mask), floats)

        return self.fma(high(pairs), high(others), self.fma(low(pairs), low(others), acc))

    def shuffle(self, left, right, places):
        """Elements of two vectors by their places in both, one after the other."""
        return self.b.shuffle_vector(left, right, ir.Constant(ir.VectorType(_I32, len(places)), list(places)))

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
def add_row(typingctx, dst, dst_off, src, src_off, count):
    """dst[:count] += src[:count]; both float32."""
    lanes = _chunks(_literal(count, "count"))

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        to, frm = emit.base(sig.args[0], args[0]), emit.base(sig.args[2], args[2])
        for at, width in lanes:
            place = emit.at(args[1], at)
            vec = builder.fadd(emit.load(to, place, width), emit.load(frm, emit.at(args[3], at), width))
            emit.store(to, place, vec, width)
        return context.get_dummy_value()

    return types.void(dst, types.int64, src, types.int64, count), codegen


def _rebase(emit, m_old, m_new, width):
    """(the maximum to subtract, the factor for what was summed under m_old); -inf on both sides gives 0."""
    empty = emit.b.fcmp_ordered("==", m_new, emit.const(-math.inf, width))
    base = emit.b.select(empty, emit.const(0.0, width), m_new)
    return base, emit.exp2(emit.b.fsub(m_old, base), width)


@intrinsic
def row_softmax(typingctx, s, s_off, blocks, scale, p, p_off, m, norm, alpha, row):
    """One online-softmax step along a row: 16 * blocks scores at s_off, times `scale` (positive), become weights p.

    s: float32 (pad with -inf); p: float32 or bfloat16 bits, may be s. m, norm (running maximum and sum): float32, one
    entry per row; alpha[row] is the factor for what was accumulated so far.
    """

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        score, weight, mx, ls, al = (emit.base(sig.args[i], args[i]) for i in (0, 4, 6, 7, 8))
        count, row = args[2], args[9]
        factor = emit.splat(args[3], 16)

        def place(start, t):
            return builder.add(start, builder.mul(t, emit.i64(16)))

        def top(t, acc):
            return [emit.max(emit.load(score, place(args[1], t), 16), acc[0])]

        m_old = emit.load(mx, row, 1)
        (tops,) = emit.loop(count, [emit.const(-math.inf, 16)], top)
        highest = builder.fmul(emit.splat(emit.halves(tops, 16, emit.max), 1), emit.splat(args[3], 1))
        m_new = emit.max(highest, m_old)
        base, shrink = _rebase(emit, m_old, m_new, 1)
        base16 = emit.splat(builder.extract_element(base, ir.Constant(_I32, 0)), 16)

        def weigh(t, acc):
            scaled = builder.fmul(emit.load(score, place(args[1], t), 16), factor)
            w = emit.exp2(builder.fsub(scaled, base16), 16)
            emit.store(weight, place(args[5], t), w, 16)
            return [builder.fadd(acc[0], w)]

        (sums,) = emit.loop(count, [emit.const(0.0, 16)], weigh)
        total = emit.splat(emit.hsum(sums, 16), 1)
        total = emit.fma(emit.load(ls, row, 1), shrink, total)
        for target, vec in ((mx, m_new), (ls, total), (al, shrink)):
            emit.store(target, row, vec, 1)
        return context.get_dummy_value()

    n, f = types.int64, types.float32
    return types.void(s, n, n, f, p, n, m, norm, alpha, n), codegen
