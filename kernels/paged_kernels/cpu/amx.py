"""Products of bfloat16 rows with a packed panel of weights on AMX, emitted as LLVM IR.

AMX multiplies tiles: 16 rows of 32 activations with 16 rows of pairs of weights of 16 outputs, which is the layout of
`products`' panels. Of its eight tiles four hold the float32 sums of 32 rows by 32 outputs, two hold activations, two
weights. A row's sum goes along k in order, 32 at a time, so its bits do not depend on the other rows. Knows nothing of
threads or models; `tile_linear.py` and `prefill.py` call it.
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
from paged_kernels.cpu.products import PANEL_OUTPUTS, TAG, _emit_product

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
_COLUMN_BYTES = 2 * PANEL_OUTPUTS  # of a panel, per element along k
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


def _is_whole(rows):
    """Whether so many rows at a time (a literal) are tiles' and not `panel_product`'s."""
    return _literal(rows, "rows") % TILE_ROWS == 0


@intrinsic(prefer_literal=True)
def configure_tiles(typingctx, rows):
    """Give this thread's tiles the shape that products of so many `rows` need, until `release_tiles`; none if
    `block_product` takes no tiles for them."""
    is_whole = _is_whole(rows)

    def codegen(context, builder, sig, args):
        if is_whole:
            kind = ir.ArrayType(_I8, len(_CONFIG))
            config = cgutils.global_constant(builder.module, "tile_config", ir.Constant(kind, bytearray(_CONFIG)))
            _call(builder, "ldtilecfg", [_POINTER], [builder.bitcast(config, _POINTER)])
        return context.get_dummy_value()

    return types.void(rows), codegen


@intrinsic(prefer_literal=True)
def release_tiles(typingctx, rows):
    """Tell the core and the system that nothing is in the tiles any more, so that nobody saves them."""
    is_whole = _is_whole(rows)

    def codegen(context, builder, sig, args):
        if is_whole:
            _call(builder, "tilerelease", [], [])
        return context.get_dummy_value()

    return types.void(rows), codegen


@intrinsic(prefer_literal=True)
def block_product(typingctx, c, c_off, c_row, more, a, a_off, a_row, panel, panel_off, depth, rows):
    """`panel_product`, by tiles if `rows` (a literal) is 16 or 32; depth is then a multiple of TILE_DEPTH."""
    count, is_whole = _literal(rows, "rows"), _is_whole(rows)

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        (_emit_tiles if is_whole else _emit_product)(emit, sig.args, args, count)
        return context.get_dummy_value()

    n = types.int64
    return types.void(c, n, n, n, a, n, n, panel, n, n, rows), codegen


@intrinsic(prefer_literal=True)
def asking_tile_product(
    typingctx, c, c_off, c_row, more, a, a_off, a_row, panel, panel_off, depth, next_off, asks, rows
):
    """`block_product` by tiles that, if `asks`, asks for weights ahead: those of this panel, then those at next_off."""
    count = _literal(rows, "rows")

    def codegen(context, builder, sig, args):
        _emit_tiles(_Emit(context, builder), sig.args, args, count, coming=(args[10], args[11]))
        return context.get_dummy_value()

    n = types.int64
    return types.void(c, n, n, n, a, n, n, panel, n, n, n, types.boolean, rows), codegen


def _emit_tiles(emit, kinds, args, count, coming=None):
    """The code of a product of `count` rows, 16 or 32; `coming`: offset of what is asked for, and whether."""
    builder, high = emit.b, count // TILE_ROWS

    def start(array, offset):
        return builder.bitcast(builder.gep(emit.base(kinds[array], args[array])[0], [offset]), _POINTER)

    sums, activations, weights = start(0, args[1]), start(4, args[5]), start(7, args[8])
    sum_bytes, row_bytes = builder.mul(args[2], emit.i64(4)), builder.mul(args[6], emit.i64(2))
    ask = _asking(emit, weights, start(7, coming[0]), builder.mul(args[9], emit.i64(_COLUMN_BYTES))) if coming else None
    places = [(i, j) for i in range(high) for j in range(2)]

    def tile_row(base, stride, i):
        return builder.gep(base, [builder.mul(stride, emit.i64(i * TILE_ROWS))])

    def load(tile, place, stride):
        _call(builder, "tileloadd64", [_I8, _POINTER, _I64], [_tile(tile), place, stride])

    def body(step, _):
        done = builder.mul(step, emit.i64(_COLUMN_BYTES * TILE_DEPTH))
        for i in range(high):
            row = tile_row(activations, row_bytes, i)
            load(_FIRST_ACTIVATIONS + i, builder.gep(row, [builder.mul(step, emit.i64(_ROW_BYTES))]), row_bytes)
            for j in range(2):
                if i == 0:
                    place = builder.gep(weights, [emit.at(done, j * _ROW_BYTES)])
                    load(_FIRST_WEIGHTS + j, place, emit.i64(2 * _ROW_BYTES))
                tiles = [_tile(n) for n in (2 * i + j, _FIRST_ACTIVATIONS + i, _FIRST_WEIGHTS + j)]
                _call(builder, "tdpbf16ps", [_I8] * 3, tiles)
        if ask:
            with builder.if_then(coming[1]):
                ask(done)
        return []

    def place_of(i, j):
        return builder.gep(tile_row(sums, sum_bytes, i), [emit.i64(j * _ROW_BYTES)])

    with builder.if_else(builder.icmp_signed("!=", args[3], emit.i64(0))) as (added, fresh):
        with added:
            for i, j in places:
                load(2 * i + j, place_of(i, j), sum_bytes)
        with fresh:
            for i, j in places:
                _call(builder, "tilezero", [_I8], [_tile(2 * i + j)])
    emit.loop(builder.sdiv(args[9], emit.i64(TILE_DEPTH)), [], body)
    for i, j in places:
        values = [_tile(2 * i + j), place_of(i, j), sum_bytes]
        _call(builder, "tilestored64", [_I8, _POINTER, _I64], values)


def _asking(emit, weights, following, panel_bytes):
    """What asks for weights in a step along k: a function of the bytes of the panel before it."""
    builder = emit.b

    def ask(done):
        ahead = builder.add(done, emit.i64(_AHEAD_BYTES))
        left = builder.sub(ahead, panel_bytes)
        here = builder.icmp_signed("<", left, emit.i64(0))
        place = builder.select(here, builder.gep(weights, [ahead]), builder.gep(following, [left]))
        for line in range(_COLUMN_BYTES * TILE_DEPTH // _LINE_BYTES):
            emit.prefetch(builder.gep(place, [emit.i64(line * _LINE_BYTES)]))

    return ask
