"""Triton-lang pieces shared by the kernels that write keys and values: quantising one row per head, and storing it.

The largest values of the types are those of `arguments.QUANTISED_DTYPES`. Knows rows; no slots, no sequences.
"""

import triton
import triton.language as tl

# Adding and subtracting 1.5 * 2**23 rounds a float32 below 2**22 to the nearest integer, halves to even.
ROUND = 12582912.0


@triton.jit
def store_row(
    x, rows, scale, scale_at, inside, real,
    SCALES: tl.constexpr, LARGEST: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    """Store x [heads, dims] at the pointers `rows`, quantised where SCALES says how (`tiles.SCALES`).

    scale: pointer to the one scale (SCALES 1); scale_at: pointers [heads, 1] to each head's own (2), written too.
    """
    if SCALES == 0:
        tl.store(rows, x, mask=inside)
    else:
        wide = x.to(tl.float32)
        if SCALES == 1:
            factor = tl.load(scale)
            wide = tl.div_rn(wide, tl.zeros_like(wide) + factor)
        else:
            largest = tl.max(tl.where(inside, tl.abs(wide), 0.0), 1, keep_dims=True)
            factors = tl.div_rn(largest, tl.zeros_like(largest) + LARGEST)
            factors = tl.where(factors == 0.0, 1.0, factors)
            tl.store(scale_at, factors, mask=real)
            wide = tl.div_rn(wide, tl.zeros_like(wide) + factors)
        # NaN stays NaN in the float types.
        wide = tl.where(wide > LARGEST, LARGEST, tl.where(wide < -LARGEST, -LARGEST, wide))
        if INTEGER:
            wide = (wide + 12582912.0) - 12582912.0
        tl.store(rows, wide.to(rows.dtype.element_ty), mask=inside)
