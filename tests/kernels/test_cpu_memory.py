"""Memory on huge pages: pieces keep what is put into them, apart from each other."""

import pytest
import torch

from paged_kernels.cpu import memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_has_the_shape_and_is_zero(dtype):
    made = memory.empty((3, 0, 5), dtype)
    assert made.shape == (3, 0, 5)
    made = memory.empty((300, 7, 1111), dtype)
    assert (made.shape, made.dtype, made.is_contiguous()) == ((300, 7, 1111), dtype, True)
    assert not made.any()
    made.fill_(1)
    assert made.sum(dtype=torch.float64) == made.numel()


def test_too_much_is_a_memory_error():
    with pytest.raises(MemoryError):
        memory.empty((1 << 60,), torch.float32)


def test_pieces_lie_apart():
    arena = memory.Arena()
    sources = [
        torch.randn(n, 3).to(dtype) for n, dtype in ((5, torch.float32), (1, torch.bfloat16), (77, torch.float32))
    ]
    sources.append(torch.randn(32 << 20))  # more than what is left of a region
    copies = [arena.copy(source) for source in sources]
    copies.append(arena.copy(sources[0].T))
    for copy, source in zip(copies, [*sources, sources[0].T], strict=True):
        assert torch.equal(copy, source)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0
    del arena, sources
    assert copies[1].isfinite().all()  # a piece keeps its region
