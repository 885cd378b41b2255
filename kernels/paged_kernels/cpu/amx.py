"""Products of bfloat16 rows with a packed panel of weights on AMX, emitted as LLVM IR.

AMX multiplies tiles: 16 rows of 32 activations with 16 rows of pairs of weights of 16 outputs, which is the layout of
`products`' panels. Of its eight tiles four hold the float32 sums of 32 rows by 32 outputs, two hold activations, two
weights. A row's sum goes along k in order, 32 at a time, so its bits do not depend on the other rows. Knows nothing of
threads or models; `tile_linear.py` calls it.
"""

import ctypes
import platform
import struct
import sys
import zlib
from functools import cache
from pathlib import Path

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from paged_kernels.cpu import micro
from paged_kernels.cpu.micro import _Emit, _literal
from paged_kernels.cpu.products import PANEL_OUTPUTS, TAG

TILE_ROWS = 16
"""Rows of a tile of activations or sums."""

TILE_DEPTH = 32
"""Elements along k that a tile holds."""

AMX_TAG = zlib.crc32(Path(__file__).read_bytes(), TAG)
"""See `micro.BUILD_TAG`."""

_ROW_BYTES = 64
# Palette 1, no row to start from, then for each of 16 tiles the bytes of its rows, then their number; 8 tiles exist.
_CONFIG = struct.pack("<BB14x16H16B", 1, 0, *([_ROW_BYTES] * 8 + [0] * 8), *([TILE_ROWS] * 8 + [0] * 8))
_FIRST_ACTIVATIONS, _FIRST_WEIGHTS = 4, 6
_AHEAD_BYTES = 8 << 10  # how far ahead of their use weights are asked for
_LINE_BYTES = 64
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_POINTER = _I8.as_pointer()


def has_tiles() -> bool:
    """Whether kernels may use AMX: machine and numba's settings have it, and the system grants it to this process."""
    return micro._may_use("amx-bf16") and _is_granted()


@cache
def _is_granted() -> bool:
    """Ask for the tiles: Linux saves their 8 KiB only for processes that have (`arch_prctl`, since Linux 5.16)."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def _call(builder, name, kinds, values):
    signature = ir.FunctionType(ir.VoidType(), kinds)
    builder.call(cgutils.get_or_insert_function(builder.module, signature, f"llvm.x86.{name}"), values)


def _tile(number):
    return ir.Constant(_I8, number)


@intrinsic
def configure_tiles(typingctx):
    """Give this thread's tiles the shape that `tile_product` needs; until `release_tiles`."""

    def codegen(context, builder, sig, args):
        kind = ir.ArrayType(_I8, len(_CONFIG))
        config = cgutils.global_constant(builder.module, "tile_config", ir.Constant(kind, bytearray(_CONFIG)))
        _call(builder, "ldtilecfg", [_POINTER], [builder.bitcast(config, _POINTER)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def release_tiles(typingctx):
    """Tell the core and the system that nothing is in the tiles any more, so that nobody saves them."""

    def codegen(context, builder, sig, args):
        _call(builder, "tilerelease", [], [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def tile_product(typingctx, c, c_off, a, a_off, a_row, panel, panel_off, depth, next_off, asks, rows):
    """c[r, :] = sum over k of a[r, k] * panel[k, :] for `rows` (a literal, 16 or 32) rows.

    If `asks`, it asks for weights ahead: those of this panel, then those at next_off.

    c: float32, packed rows of PANEL_OUTPUTS at c_off. a: bfloat16 bits, rows `a_row` elements apart at a_off. panel:
    bfloat16 bits, one packed panel at panel_off. depth: elements along k, a multiple of TILE_DEPTH.
    """
    high = _literal(rows, "rows") // TILE_ROWS

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        sums, activations, weights = (
            builder.bitcast(builder.gep(emit.base(sig.args[i], args[i])[0], [args[i + 1]]), _POINTER) for i in (0, 2, 5)
        )
        following = builder.bitcast(builder.gep(emit.base(sig.args[5], args[5])[0], [args[8]]), _POINTER)
        row_bytes = builder.mul(args[4], emit.i64(2))
        panel_bytes = builder.mul(args[7], emit.i64(2 * PANEL_OUTPUTS))
        step_bytes = 2 * PANEL_OUTPUTS * TILE_DEPTH
        places = [(i, j) for i in range(high) for j in range(2)]

        def load(tile, place, stride):
            _call(builder, "tileloadd64", [_I8, _POINTER, _I64], [_tile(tile), place, stride])

        def ask(done):
            ahead = builder.add(done, emit.i64(_AHEAD_BYTES))
            left = builder.sub(ahead, panel_bytes)
            here = builder.icmp_signed("<", left, emit.i64(0))
            place = builder.select(here, builder.gep(weights, [ahead]), builder.gep(following, [left]))
            for line in range(step_bytes // _LINE_BYTES):
                emit.prefetch(builder.gep(place, [emit.i64(line * _LINE_BYTES)]))

        def body(step, _):
            done = builder.mul(step, emit.i64(step_bytes))
            for i in range(high):
                start = builder.gep(activations, [builder.mul(row_bytes, emit.i64(i * TILE_ROWS))])
                load(_FIRST_ACTIVATIONS + i, builder.gep(start, [builder.mul(step, emit.i64(_ROW_BYTES))]), row_bytes)
                for j in range(2):
                    if i == 0:
                        place = builder.gep(weights, [emit.at(done, j * _ROW_BYTES)])
                        load(_FIRST_WEIGHTS + j, place, emit.i64(2 * _ROW_BYTES))
                    tiles = [_tile(n) for n in (2 * i + j, _FIRST_ACTIVATIONS + i, _FIRST_WEIGHTS + j)]
                    _call(builder, "tdpbf16ps", [_I8] * 3, tiles)
            with builder.if_then(args[9]):
                ask(done)
            return []

        for i, j in places:
            _call(builder, "tilezero", [_I8], [_tile(2 * i + j)])
        emit.loop(builder.sdiv(args[7], emit.i64(TILE_DEPTH)), [], body)
        stride = 4 * PANEL_OUTPUTS
        for i, j in places:
            place = builder.gep(sums, [emit.i64(i * TILE_ROWS * stride + j * _ROW_BYTES)])
            values = [_tile(2 * i + j), place, emit.i64(stride)]
            _call(builder, "tilestored64", [_I8, _POINTER, _I64], values)
        return context.get_dummy_value()

    n = types.int64
    return types.void(c, n, a, n, n, panel, n, n, n, types.boolean, rows), codegen
