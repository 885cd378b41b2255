"""Translates the options of one attention call into arguments of the Triton-lang kernels. Knows no batch."""

import torch

from paged_kernels.arguments import QUANTISED_DTYPES, Options
from paged_kernels.tiles import LOG2_E, SCALES


def option_constants(
    *,
    window: int = 0,
    soft_cap: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    quantised: bool = False,
    scales: str = "none",
) -> dict[str, int | bool]:
    """Constexpr arguments of both attention kernels; window 0 is none."""
    return {
        "WINDOW": window, "SOFT_CAP": soft_cap, "ALIBI": alibi, "SINKS": sinks, "QUANTISED": quantised,
        "SCALES": SCALES[scales],
    }  # fmt: skip


def constants_of(options: Options, cache_dtype: torch.dtype) -> dict[str, int | bool]:
    """`option_constants` of an actual call."""
    return option_constants(
        window=options.window or 0,
        soft_cap=options.soft_cap is not None,
        alibi=options.alibi_slopes is not None,
        sinks=options.sinks is not None,
        quantised=cache_dtype in QUANTISED_DTYPES,
        scales=options.scales,
    )


def option_arguments(options: Options, scale: float, unused: torch.Tensor) -> tuple:
    """Run-time arguments in the kernels' order: slopes, sinks, k_scale, v_scale, scale, soft_cap, scale strides.

    Scores come out of the kernels in base 2. Without soft-cap they are multiplied by scale * log2(e) at once; with
    one by 2 * scale / cap * log2(e), the argument of tanh's exponential. `unused` stands for tensors not given.
    """
    cap = options.soft_cap
    factor = scale * LOG2_E if cap is None else 2.0 * scale / cap * LOG2_E
    given = [
        unused if tensor is None else tensor
        for tensor in (options.alibi_slopes, options.sinks, options.k_scale, options.v_scale)
    ]
    strides = options.k_scale.stride()[:2] if options.scales == "token" else (0, 0)
    return (*given, factor, 0.0 if cap is None else cap * LOG2_E, *strides)
