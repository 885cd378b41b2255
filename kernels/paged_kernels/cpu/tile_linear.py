"""Linear layers in bfloat16 on a machine with AMX: `linear`'s contract, products by tiles of 16 rows.

A work item is one panel of outputs for a group of rows, as there. With few rows the tiles hold rows that nobody asked
for: reading the weights is all the time there is then, and a row's bits are the same among few as among many.
"""

import zlib
from functools import cache
from pathlib import Path

import numpy as np
from numba import carray

from paged_kernels.cpu.amx import AMX_TAG, TILE_DEPTH, TILE_ROWS, asking_tile_product, configure_tiles, release_tiles
from paged_kernels.cpu.micro import add_row, code_tag, copy_row, load_row
from paged_kernels.cpu.primitives import fetch_add, pointer
from paged_kernels.cpu.products import PANEL_OUTPUTS, gate, panel_product
from paged_kernels.cpu.runtime import UNBOUNDED, Arguments, compile_kernel

_TAG = zlib.crc32(Path(__file__).read_bytes(), AMX_TAG)
_BLOCK_ROWS = 256  # whose sums are kept apart at once


@cache
def build_tile_linear(epilogue: str, arguments: Arguments):
    """The kernel for one of `linear.EPILOGUES` and its argument record.

    It reads activations in whole tiles: memory must be there for the rows that fill up the last one. Longer than a
    screen because of what `tile_linear` in it says.
    """
    tag, width, half, high = _TAG + code_tag(), PANEL_OUTPUTS, PANEL_OUTPUTS // 2, TILE_ROWS
    two_high = 2 * TILE_ROWS
    block_rows, tile_depth = _BLOCK_ROWS, TILE_DEPTH
    gated, add = epilogue == "gated", epilogue == "add"
    out_element = np.uint16 if gated else np.float32

    def tile_linear(record, taken, items):
        """Longer than a screen because the sizes must reach the intrinsics as literals of one function."""
        _ = tag
        args = carray(record, 1)[0]
        a = carray(pointer(args.a), UNBOUNDED, np.uint16)
        weight = carray(pointer(args.weight), UNBOUNDED, np.uint16)
        bias = carray(pointer(args.bias), UNBOUNDED, np.float32)
        out = carray(pointer(args.out), UNBOUNDED, out_element)
        counter = carray(taken, 1)
        block = min((args.rows_per_item + high - 1) // high * high, block_rows)
        c = np.empty(block * width, dtype=np.float32)
        whole = args.depth // tile_depth * tile_depth
        size = args.depth * width
        configure_tiles(high)
        done = 0
        while True:
            item = fetch_add(counter, 0)
            if item >= items:
                release_tiles(high)
                return done
            done += 1
            group = item // args.panels
            panel = item - group * args.panels
            start = panel * size
            group_end = min(args.rows, (group + 1) * args.rows_per_item)
            for first in range(group * args.rows_per_item, group_end, block):
                end = min(group_end, first + block)
                row = first
                while row < end:
                    # The first rows' products wait for the weights, the others find them in the core's caches.
                    asks = row == group * args.rows_per_item
                    # Asked for after this panel: the one that is to be taken next.
                    coming = counter[0] % args.panels * size
                    to, source = (row - first) * width, row * args.a_row
                    if end - row > high:
                        asking_tile_product(
                            c, to, width, 0, a, source, args.a_row, weight, start, whole, coming, asks, two_high
                        )
                        row += two_high
                    else:
                        asking_tile_product(
                            c, to, width, 0, a, source, args.a_row, weight, start, whole, coming, asks, high
                        )
                        row += high
                left = args.depth - whole
                for row in range(first, end):
                    at = (row - first) * width
                    if left:
                        source = row * args.a_row + whole
                        panel_product(c, at, width, 1, a, source, args.a_row, weight, start + whole * width, left, 1)
                    if args.has_bias:
                        add_row(c, at, bias, panel * width, width)
                    if gated:
                        many = min(half, args.outputs - panel * half)
                        where = row * args.out_row + panel * half
                        gate(c, at, half)
                        if many == half:
                            load_row(out, where, c, at, np.float32(1.0), half)
                        else:
                            for i in range(many):
                                load_row(out, where + i, c, at + i, np.float32(1.0), 1)
                        continue
                    many = min(width, args.outputs - panel * width)
                    where = row * args.out_row + panel * width
                    if many < width:
                        for i in range(many):
                            out[where + i] = c[at + i] + (out[where + i] if add else np.float32(0.0))
                    elif add:
                        add_row(out, where, c, at, width)
                    else:
                        copy_row(out, where, c, at, width)

    return compile_kernel(tile_linear, arguments)
