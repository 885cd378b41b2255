"""RMSNorm, alone or after adding a residual (Triton-lang).

Contract: `ops.rms_norm` and `ops.add_rms_norm`. One program per row, which it reads once. Knows rows only.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, total, eps, heads, x_token, x_head, residual_token, residual_head,
    N: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = row // heads
    head = row % heads
    places = tl.arange(0, BLOCK)
    inside = places < N
    values = tl.load(x + token * x_token + head * x_head + places, mask=inside, other=0.0)
    if RESIDUAL:
        added = tl.load(residual + token * residual_token + head * residual_head + places, mask=inside, other=0.0)
        # Rounded first: the norm is of what the next layer's residual will be.
        values = (values.to(tl.float32) + added.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + row * N + places, values, mask=inside)
    wide = values.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
    w = tl.load(weight + places, mask=inside, other=0.0)
    if UNIT_OFFSET:
        normed = wide * (1.0 + w.to(tl.float32))
    else:
        normed = wide.to(x.dtype.element_ty).to(tl.float32) * w.to(tl.float32)
    tl.store(out + row * N + places, normed.to(x.dtype.element_ty), mask=inside)


def settings(n: int, *, residual: bool, unit_offset: bool) -> tuple[dict, dict]:
    """(constexpr arguments, compile options) of rms_norm_kernel; the compile gate builds the same."""
    block = triton.next_power_of_2(n)
    constants = {"N": n, "BLOCK": block, "RESIDUAL": residual, "UNIT_OFFSET": unit_offset}
    return constants, {"num_warps": max(1, min(16, block // 512)), "enable_fp_fusion": True}


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool,
    out: torch.Tensor,
    total: torch.Tensor | None,
) -> None:
    """See `ops.rms_norm` and `ops.add_rms_norm`; total: x + residual. Both results are contiguous."""
    heads = x.shape[1] if x.dim() == 3 else 1
    added = x if residual is None else residual
    strides = [(t.stride(0), t.stride(1) if t.dim() == 3 else 0) for t in (x, added)]
    constants, options = settings(x.shape[-1], residual=residual is not None, unit_offset=unit_offset)
    rms_norm_kernel[(x.shape[0] * heads,)](
        x, added, weight, out, out if total is None else total, eps, heads, *strides[0], *strides[1],
        **constants, **options,
    )  # fmt: skip
