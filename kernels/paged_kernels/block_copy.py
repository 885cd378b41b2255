"""Copy whole KV blocks by a list of (source, destination) pairs (Triton-lang).

Contract: `ops.copy_blocks`. One program per (piece of a block, pair, part): all layers of all pairs in one launch, for
copy-on-write and for gathering blocks into (or scattering them from) a staging buffer. Knows bits; not what they are.
"""

import torch
import triton
import triton.language as tl


# Block counts vary with memory, strides with them: only what is divisible by 16 matters, and triton sees that.
@triton.jit
def block_copy_kernel(
    source, destination, pairs, source_part, source_block, destination_part, destination_block, elements,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2).to(tl.int64)
    origin = tl.load(pairs + 2 * pair)
    target = tl.load(pairs + 2 * pair + 1)
    if (origin >= 0) & (target >= 0):
        piece = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = piece < elements
        values = tl.load(source + part * source_part + origin * source_block + piece, mask=inside)
        tl.store(destination + part * destination_part + target * destination_block + piece, values, mask=inside)


def settings() -> tuple[dict, dict]:
    """(constexpr arguments, compile options) of block_copy_kernel; the compile gate builds the same."""
    return {"BLOCK": 2048}, {"num_warps": 4, "enable_fp_fusion": True}


def copy_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    """See `ops.copy_blocks`; arguments are validated there."""
    elements = source[0, 0].numel()
    constants, options = settings()
    block_copy_kernel[(triton.cdiv(elements, constants["BLOCK"]), pairs.shape[0], source.shape[0])](
        source, destination, pairs, source.stride(0), source.stride(1), destination.stride(0), destination.stride(1),
        elements, **constants, **options,
    )  # fmt: skip
