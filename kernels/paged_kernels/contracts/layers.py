"""Contracts of a decoder's elementwise layers. Each rounds where transformers rounds."""

import torch

from paged_kernels.backends import fail, implementation


def _check_rows(name: str, x: torch.Tensor, like: torch.Tensor) -> None:
    if x.dim() not in (2, 3) or x.shape != like.shape:
        fail(name, f"must be [rows, n] or [tokens, heads, n] (here {list(like.shape)}), not {list(x.shape)}")
    if x.stride(-1) != 1:
        fail(name, "last dimension must be contiguous")
    if x.dtype != like.dtype or x.device != like.device:
        fail(name, f"must be {like.dtype} on {like.device}")


def _check_weight(weight: torch.Tensor, x: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype or weight.device != x.device:
        fail("weight", f"must be {x.dtype} [{x.shape[-1]}] on {x.device}")
    if not weight.is_contiguous():
        fail("weight", "must be contiguous")


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: str, unit_offset: bool = False
) -> torch.Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019).

    x: [rows, n] or [tokens, heads, n], strided but for the last dimension. weight: [n] of the same type. Computed in
    float32 and rounded to the type, then multiplied by weight (Llama); with unit_offset the float32 result is
    multiplied by 1 + weight and rounded once (Gemma). Zero rows (padding) give zeros.
    Returns a new contiguous tensor like x. Raises ValueError naming the argument at fault.
    """
    _check_rows("x", x, x)
    _check_weight(weight, x)
    norm = implementation("rms_norm", backend, x.dtype, x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        norm(x, None, weight, eps, unit_offset, out, None)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    backend: str,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(total), total) with total = x + residual, rounded to the type before the norm as in transformers.

    residual: like x. Both results are new contiguous tensors. Otherwise as `rms_norm`.
    """
    _check_rows("x", x, x)
    _check_rows("residual", residual, x)
    _check_weight(weight, x)
    norm = implementation("rms_norm", backend, x.dtype, x.device)
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if x.numel():
        norm(x, residual, weight, eps, unit_offset, out, total)
    return out, total


def silu_mul(gate_up: torch.Tensor, *, backend: str) -> torch.Tensor:
    """silu(gate) * up (Shazeer 2020, SwiGLU): gate_up [rows, 2 * n], the gate first; returns a new [rows, n].

    silu is computed in float32 and rounded to the type before the product. Zero rows (padding) give zeros.
    Raises ValueError naming the argument at fault.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        fail("gate_up", f"must be [rows, 2 * n] with contiguous rows, not {list(gate_up.shape)}")
    activate = implementation("silu_mul", backend, gate_up.dtype, gate_up.device)
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        activate(gate_up, out)
    return out
