"""A decoder's elementwise layers in plain torch."""

import torch
from torch.nn import functional


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool,
    out: torch.Tensor,
    total: torch.Tensor | None,
) -> None:
    """See `ops.rms_norm` and `ops.add_rms_norm`; total: x + residual."""
    if residual is not None and total is not None:
        x = total.copy_(x + residual)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out.copy_((wide * (1.0 + weight.float())).to(x.dtype) if unit_offset else weight * wide.to(x.dtype))


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """See `ops.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    out.copy_(functional.silu(gate) * up)
