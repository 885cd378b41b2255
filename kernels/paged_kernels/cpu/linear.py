"""Linear layers over packed weights (CPU), for any number of rows, with what follows them folded in.

    store      out[t, n] = y            float32
    add        out[t, n] += y           float32: the residual stream
    gated      out[t, n] = silu(gate) * up, in the activations' own type; the weights hold gate and up

where y = a @ weight.T + bias, summed in float32. A work item is one panel of outputs for all rows, so that the weights
are read from memory once however many rows there are; at few rows that reading is all the time there is. Where the rows
are more than a core's own cache holds, all panels go over one group of rows after the other.
"""

from functools import cache

import numpy as np
import torch
from numba import carray

from paged_kernels.cpu.amx import TILE_ROWS, has_tiles
from paged_kernels.cpu.memory import Arena
from paged_kernels.cpu.micro import code_tag, has_wide_registers, load_row
from paged_kernels.cpu.primitives import fetch_add, pointer
from paged_kernels.cpu.products import (
    PANEL_OUTPUTS,
    PANEL_STEP_BYTES,
    ROW_BLOCKS,
    TAG,
    asking_panel_product,
    gate,
    panel_product,
)
from paged_kernels.cpu.runtime import UNBOUNDED, Arguments, compile_kernel
from paged_kernels.cpu.tile_linear import build_tile_linear

LINEAR_ARGUMENTS = Arguments("a weight bias out", "rows rows_per_item panels depth outputs a_row out_row has_bias")
EPILOGUES = ("store", "add", "gated")
_HALF = PANEL_OUTPUTS // 2
_GROUP_BYTES = 384 << 10  # of activations that all panels go over
_GROUP_ROWS = 64  # at least, so that panels are not read too often
_CHUNK_BYTES = 8 << 10  # of a panel, used by all rows while it is in a core's first-level cache and the next comes
_BLOCK_ROWS = 256  # whose sums are kept apart at once
# With so few rows of float32 a core without AVX-512 finds what comes next by itself, sooner than by being asked: what
# it can look ahead is limited by the loads on their way.
_UNASKED_ROWS = 2


class PackedLinear:
    """A weight matrix in the kernels' panel layout (see `products`), with its bias.

    Args:
        weight: [outputs, depth] float32 or bfloat16; depth is even for the latter.
        bias: [outputs] or None.
        gated: the first half of the outputs are gates, the second half what they gate; each panel then holds 16 of
            both, and `outputs` counts pairs.
        arena: where the panels are kept; None: in memory of their own.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False, arena: Arena | None = None
    ) -> None:
        self.outputs, self.depth = weight.shape
        self.gated = gated
        if gated:
            self.outputs //= 2
            weight = _interleaved(weight)
            bias = None if bias is None else _interleaved(bias[:, None])[:, 0]
        self.panels = -(-weight.shape[0] // PANEL_OUTPUTS)
        missing = self.panels * PANEL_OUTPUTS - weight.shape[0]
        if missing:
            weight = torch.cat([weight, weight.new_zeros(missing, self.depth)])
            bias = None if bias is None else torch.cat([bias, bias.new_zeros(missing)])
        step = 2 if weight.dtype == torch.bfloat16 else 1
        panels = weight.view(self.panels, PANEL_OUTPUTS, self.depth // step, step)
        self.weight = (arena or Arena()).copy(panels.transpose(1, 2))
        self.bias = None if bias is None else bias.float()

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self.weight.numel() * self.weight.element_size()

    def fields(self) -> dict:
        """The argument fields that do not change."""
        has_bias = self.bias is not None
        bias = self.bias if has_bias else self.weight
        return {
            "weight": self.weight, "bias": bias, "has_bias": has_bias, "depth": self.depth, "outputs": self.outputs,
            "panels": self.panels,
        }  # fmt: skip

    def plan(self, rows: int) -> tuple[int, int]:
        """(rows per item, items) of a call."""
        most = max(_GROUP_ROWS, _GROUP_BYTES // (self.depth * self.weight.element_size()))
        groups = -(-rows // most)
        per_item = -(-rows // (ROW_BLOCKS[0] * groups)) * ROW_BLOCKS[0]
        return per_item, -(-rows // per_item) * self.panels


def readable_rows(rows: int) -> int:
    """Rows of activations for which there must be memory if the first `rows` are multiplied: products may go by whole
    tiles. What is in the others does not matter."""
    return -(-rows // TILE_ROWS) * TILE_ROWS


def _interleaved(weight: torch.Tensor) -> torch.Tensor:
    """[2 * n, depth], gates first, to alternating groups of 16 gates and 16 of the others, padded to whole groups."""
    count, depth = weight.shape[0] // 2, weight.shape[1]
    groups = -(-count // _HALF)
    parts = weight.new_zeros(2, groups * _HALF, depth)
    parts[:, :count] = weight.view(2, count, depth)
    return parts.view(2, groups, _HALF, depth).transpose(0, 1).reshape(-1, depth)


@cache
def build_linear(element: type, epilogue: str):
    """The kernel for one type of weights and activations and one of EPILOGUES; activations: see `readable_rows`.
    Longer than a screen because the sizes must reach the intrinsics as literals of one function."""
    if element is np.uint16 and has_tiles():
        return build_tile_linear(epilogue, LINEAR_ARGUMENTS)
    tag, width, half, step_bytes = TAG + code_tag(), PANEL_OUTPUTS, _HALF, PANEL_STEP_BYTES
    (most, some), block_rows = ROW_BLOCKS[:2], _BLOCK_ROWS
    chunk = _CHUNK_BYTES // (PANEL_OUTPUTS * np.dtype(element).itemsize)
    unasked = 0 if has_wide_registers() or element is not np.float32 else _UNASKED_ROWS
    gated, add = epilogue == "gated", epilogue == "add"
    out_element = element if gated else np.float32

    def linear(arguments, taken, items):
        """Longer than a screen because the sizes must reach the intrinsics as literals of one function."""
        _ = tag
        args = carray(arguments, 1)[0]
        a = carray(pointer(args.a), UNBOUNDED, element)
        weight = carray(pointer(args.weight), UNBOUNDED, element)
        bias = carray(pointer(args.bias), UNBOUNDED, np.float32)
        out = carray(pointer(args.out), UNBOUNDED, out_element)
        counter = carray(taken, 1)
        plain = carray(pointer(args.out), UNBOUNDED, np.float32)
        block = min(args.rows_per_item, block_rows)
        c = np.empty(block * width, dtype=np.float32)
        asks = args.rows > unasked
        stretch = chunk if asks else args.depth
        done = 0
        while True:
            item = fetch_add(counter, 0)
            if item >= items:
                return done
            done += 1
            group = item // args.panels
            panel = item - group * args.panels
            # Sums that nothing is done to are taken in place.
            direct = not gated and not args.has_bias and (panel + 1) * width <= args.outputs
            sums, row_size = (plain, args.out_row) if direct else (c, width)
            group_end = min(args.rows, (group + 1) * args.rows_per_item)
            for first in range(group * args.rows_per_item, group_end, block):
                end = min(group_end, first + block)
                start = first * args.out_row + panel * width if direct else 0
                for k in range(0, args.depth, stretch):
                    depth, more = min(stretch, args.depth - k), k + (direct and add)
                    at = (panel * args.depth + k) * width
                    # Asked for meanwhile: the chunk that follows, or the panel that is to be taken next.
                    coming = at + depth * width
                    if k + depth == args.depth:
                        coming = counter[0] % args.panels * args.depth * width
                    pace = step_bytes / (end - first)
                    row = first
                    while row < end:
                        to, source, left = start + (row - first) * row_size, row * args.a_row + k, end - row
                        ask = coming + (row - first) * depth * width // (end - first)
                        if not asks:
                            if left >= 2:
                                panel_product(sums, to, row_size, more, a, source, args.a_row, weight, at, depth, 2)
                                row += 2
                            else:
                                panel_product(sums, to, row_size, more, a, source, args.a_row, weight, at, depth, 1)
                                row += 1
                        elif left >= most:
                            asking_panel_product(
                                sums, to, row_size, more, a, source, args.a_row, weight, at, depth, ask, pace, most
                            )
                            row += most
                        elif left >= some:
                            asking_panel_product(
                                sums, to, row_size, more, a, source, args.a_row, weight, at, depth, ask, pace, some
                            )
                            row += some
                        elif left >= 2:
                            asking_panel_product(
                                sums, to, row_size, more, a, source, args.a_row, weight, at, depth, ask, pace, 2
                            )
                            row += 2
                        else:
                            asking_panel_product(
                                sums, to, row_size, more, a, source, args.a_row, weight, at, depth, ask, pace, 1
                            )
                            row += 1
                if direct:
                    continue
                for row in range(first, end):
                    at = (row - first) * width
                    if args.has_bias:
                        for i in range(width):
                            c[at + i] += bias[panel * width + i]
                    if gated:
                        many = min(half, args.outputs - panel * half)
                        where = row * args.out_row + panel * half
                        gate(c, at, half)
                        if many == half:
                            load_row(out, where, c, at, np.float32(1.0), half)
                        else:
                            for i in range(many):
                                load_row(out, where + i, c, at + i, np.float32(1.0), 1)
                    else:
                        many = min(width, args.outputs - panel * width)
                        where = row * args.out_row + panel * width
                        for i in range(many):
                            out[where + i] = c[at + i] + (out[where + i] if add else np.float32(0.0))

    return compile_kernel(linear, LINEAR_ARGUMENTS)
