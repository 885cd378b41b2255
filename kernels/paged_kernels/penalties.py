"""Penalties of tokens that a sequence holds already, and temperature (Triton-lang).

Contract: `ops.penalise`. One kernel copies the scores to float32, divided by the temperature; a second one computes
the few entries that are penalised from the original scores, so that neither order nor repetition matters.
Knows rows and entries; no sequences.
"""

import torch
import triton
import triton.language as tl

_HIGHEST = torch.finfo(torch.float32).max


@triton.jit
def temperature_kernel(logits, temperature, out, row_stride, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < vocabulary
    divisor = tl.load(temperature + row)
    scores = tl.load(logits + row * row_stride + places, mask=inside).to(tl.float32)
    if divisor > 0:
        scores = tl.div_rn(scores, tl.zeros_like(scores) + divisor)
    tl.store(out + row * vocabulary + places, scores, mask=inside)


@triton.jit(do_not_specialize=["entries"])
def penalty_kernel(
    logits, entry_rows, entry_tokens, entry_counts, repetition, frequency, presence, temperature, out,
    row_stride, vocabulary, entries, HIGHEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(entry_rows + entry, mask=entry < entries, other=-1)
    used = row >= 0
    token = tl.load(entry_tokens + entry, mask=used, other=0)
    count = tl.load(entry_counts + entry, mask=used, other=0.0)
    before = tl.load(logits + row * row_stride + token, mask=used, other=0.0).to(tl.float32)
    factor = tl.load(repetition + row, mask=used, other=1.0)
    after = tl.where(before > 0, tl.div_rn(before, factor), before * factor)
    after -= tl.load(frequency + row, mask=used, other=0.0) * count
    after -= tl.where(count > 0, tl.load(presence + row, mask=used, other=0.0), 0.0)
    after = tl.minimum(tl.maximum(after, -HIGHEST), HIGHEST)
    # What is not finite (NaN included) shows a broken model, and stays.
    after = tl.where(tl.abs(before) <= HIGHEST, after, before)
    divisor = tl.load(temperature + row, mask=used, other=1.0)
    after = tl.where(divisor > 0, tl.div_rn(after, tl.where(divisor > 0, divisor, 1.0)), after)
    tl.store(out + row * vocabulary + token, after, mask=used)


def settings() -> dict[str, tuple[dict, dict]]:
    """(constexpr arguments, compile options) of both kernels; the compile gate builds the same."""
    # No fused multiply-add: results are those of the reference, bit for bit.
    return {
        "temperature": ({"BLOCK": 1024}, {"num_warps": 4, "enable_fp_fusion": False}),
        "penalty": ({"HIGHEST": _HIGHEST, "BLOCK": 128}, {"num_warps": 4, "enable_fp_fusion": False}),
    }


def penalise(
    logits: torch.Tensor,
    entry_rows: torch.Tensor,
    entry_tokens: torch.Tensor,
    entry_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    temperature: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `ops.penalise`; out is contiguous."""
    rows, vocabulary = logits.shape
    constants, options = settings()["temperature"]
    temperature_kernel[(rows, triton.cdiv(vocabulary, constants["BLOCK"]))](
        logits, temperature, out, logits.stride(0), vocabulary, **constants, **options
    )
    entries = entry_rows.shape[0]
    if entries == 0:
        return
    constants, options = settings()["penalty"]
    penalty_kernel[(triton.cdiv(entries, constants["BLOCK"]),)](
        logits, entry_rows, entry_tokens, entry_counts, repetition, frequency, presence, temperature, out,
        logits.stride(0), vocabulary, entries, **constants, **options,
    )  # fmt: skip
