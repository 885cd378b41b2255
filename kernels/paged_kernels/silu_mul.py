"""The gated activation silu(gate) * up (Triton-lang).

Contract: `ops.silu_mul`. One program per (row, piece of it). Knows rows only.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def silu_mul_kernel(gate_up, out, row_stride, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < N
    gate = tl.load(gate_up + row * row_stride + places, mask=inside, other=0.0)
    up = tl.load(gate_up + row * row_stride + N + places, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # exp of a large -gate is infinite, and gate / infinity the zero that is right.
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * N + places, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


def settings(n: int) -> tuple[dict, dict]:
    """(constexpr arguments, compile options) of silu_mul_kernel; the compile gate builds the same."""
    block = min(1024, triton.next_power_of_2(n))
    return {"N": n, "BLOCK": block}, {"num_warps": max(1, block // 256), "enable_fp_fusion": True}


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """See `ops.silu_mul`; arguments are validated there."""
    rows, n = out.shape
    constants, options = settings(n)
    silu_mul_kernel[(rows, triton.cdiv(n, constants["BLOCK"]))](gate_up, out, gate_up.stride(0), **constants, **options)
