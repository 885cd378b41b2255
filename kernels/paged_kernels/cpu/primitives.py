"""Addresses, atomic counters and waiting: what kernels and the threads that run them need beneath numba, as LLVM IR.

Arrays are flat and C-contiguous. Knows no arithmetic and no kernels.
"""

import platform
import zlib
from pathlib import Path

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

BUILD_TAG = zlib.crc32(Path(__file__).read_bytes())
"""See `micro.BUILD_TAG`, which includes it."""

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


@intrinsic
def fetch_add(typingctx, counter, index):
    """Atomically add one to counter[index] (int64) and return what it was; orders the memory around it.

    Work items are taken with it, and the worker that finishes the last part of a result learns so.
    """

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, value=args[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [args[1]]), ir.Constant(_I64, 1), "acq_rel")

    return types.int64(counter, types.int64), codegen


@intrinsic
def call_kernel(typingctx, address, record, counter, items):
    """Call a compiled kernel, `int64 (void *, void *, int64)`, with addresses of its record and its counter."""

    def codegen(context, builder, sig, args):
        pointer = ir.IntType(8).as_pointer()
        signature = ir.FunctionType(_I64, [pointer, pointer, _I64])
        function = builder.inttoptr(args[0], signature.as_pointer())
        pointers = [builder.inttoptr(args[i], pointer) for i in (1, 2)]
        return builder.call(function, [*pointers, args[3]])

    n = types.int64
    return n(n, n, n, n), codegen


@intrinsic
def add_done(typingctx, counter, index, count):
    """Atomically add to counter[index] (int64), after everything before it."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, value=args[0]).data
        builder.atomic_rmw("add", builder.gep(data, [args[1]]), args[2], "acq_rel")
        return context.get_dummy_value()

    return types.void(counter, types.int64, types.int64), codegen


@intrinsic
def read_done(typingctx, counter, index):
    """counter[index] (int64) as it is now, before everything after it."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, value=args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "acquire", 8)

    return types.int64(counter, types.int64), codegen


@intrinsic
def relax(typingctx):
    """Tell the core that this is a waiting loop."""

    def codegen(context, builder, sig, args):
        machine, nothing = platform.machine(), ir.VoidType()
        if machine in ("x86_64", "AMD64"):
            name, kinds, values = "llvm.x86.sse2.pause", [], []
        elif machine in ("aarch64", "arm64"):
            name, kinds, values = "llvm.aarch64.hint", [_I32], [ir.Constant(_I32, 1)]
        else:
            return context.get_dummy_value()
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(nothing, kinds), name)
        builder.call(function, values)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typingctx):
    """Let another thread have the core."""

    def codegen(context, builder, sig, args):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def pointer(typingctx, address):
    """An address as a typeless pointer, for `numba.carray`."""

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


def emit_prefetch(builder, place):
    """Code that asks for the cache line at a pointer to come into the core's second-level cache; never faults.

    Not into the first: a core has only some twenty lines on their way there at a time, which is far from what memory
    can deliver (measured on Zen 4, reading scattered blocks: 14 GB/s that way and without prefetching, 23 GB/s so).
    """
    ptr = builder.bitcast(place, ir.IntType(8).as_pointer())
    fnty = ir.FunctionType(ir.VoidType(), [ptr.type, _I32, _I32, _I32])
    fn = cgutils.get_or_insert_function(builder.module, fnty, "llvm.prefetch.p0")
    builder.call(fn, [ptr] + [ir.Constant(_I32, v) for v in (0, 2, 1)])
