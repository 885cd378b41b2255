"""Block copies and swaps, bit for bit, without a model."""

from __future__ import annotations

import pytest
import torch

from paged_backend.errors import PagedBackendError
from paged_backend.worker import block_copy
from paged_backend.worker.block_copy import HostPool, copy_blocks

NUM_BLOCKS = 12


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def cache(request) -> torch.Tensor:
    """[3 layers, 2, null block + 11, 2 heads, 8 tokens, 4]; every bit pattern, NaN included, must survive."""
    generator = torch.Generator().manual_seed(4)
    size = (3, 2, NUM_BLOCKS, 2, 8, 4 * request.param.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(request.param)


@pytest.fixture(params=[1, 700, 64 << 20], ids=lambda size: f"buffer{size}")
def buffer(request, monkeypatch) -> None:
    """Room for less than a block, for some, for all."""
    monkeypatch.setattr(block_copy, "_BUFFER_BYTES", request.param)


def _bits(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8).clone()


@pytest.mark.parametrize(
    "pairs",
    [
        [(1, 2)],
        [(1, 2), (2, 3)],  # a chain
        [(2, 3), (1, 2)],
        [(5, 6), (6, 5)],  # a cycle
        [(4, 7), (4, 8), (4, 9), (11, 4)],  # one source of many, overwritten itself
        [(3, 3)],
    ],
)
@pytest.mark.usefixtures("buffer")
def test_copies_read_before_they_write(cache, pairs):
    before = _bits(cache)
    copy_blocks(cache, pairs)
    expected = before.clone()
    for source, destination in pairs:
        expected[:, :, destination] = before[:, :, source]
    assert torch.equal(_bits(cache), expected)


@pytest.mark.parametrize("hosts", [[1, 2, 3, 4, 5], [5, 3, 4, 1, 8], [9, 7, 5, 3, 1]])
@pytest.mark.usefixtures("buffer")
def test_swap_round_trip(cache, hosts):
    """Out, the device overwritten, and back to other blocks; other blocks stay as they were."""
    before = _bits(cache)
    pool = HostPool(cache, 9)
    sources = [11, 2, 3, 7, 1]
    pool.swap_out(list(zip(sources, hosts, strict=True)))
    assert torch.equal(_bits(cache), before)
    cache[:, :, sources] = 1.5
    expected = _bits(cache)
    destinations = [4, 11, 10, 2, 5]
    pool.swap_in(list(zip(hosts, destinations, strict=True)))
    for source, destination in zip(sources, destinations, strict=True):
        expected[:, :, destination] = before[:, :, source]
    assert torch.equal(_bits(cache), expected)


@pytest.mark.usefixtures("buffer")
def test_swapped_blocks_do_not_disturb_each_other(cache):
    before = _bits(cache)
    pool = HostPool(cache, 4)
    pool.swap_out([(1, 2), (2, 3)])
    pool.swap_out([(3, 1), (4, 4)])
    pool.swap_in([(3, 5), (1, 6)])
    pool.swap_out([(7, 3)])
    pool.swap_in([(2, 8), (3, 9), (4, 10)])
    for source, destination in ((2, 5), (3, 6), (1, 8), (7, 9), (4, 10)):
        assert torch.equal(_bits(cache)[:, :, destination], before[:, :, source])


def test_unused_swap_space_takes_no_memory(cache):
    pool = HostPool(cache, 2**40)
    assert pool._pool is None
    with pytest.raises(PagedBackendError, match="cannot allocate swap space for 1099511627776 blocks"):
        pool.swap_out([(1, 1)])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 1)], "do not exist"),
        ([(1, 0)], "do not exist"),
        ([(1, -1)], "do not exist"),
        ([(NUM_BLOCKS, 1)], "do not exist"),
        ([(1, NUM_BLOCKS)], "do not exist"),
        ([(1, 3), (2, 3)], "twice"),
    ],
)
def test_wrong_ids_are_errors(cache, pairs, message):
    before = _bits(cache)
    pool = HostPool(cache, NUM_BLOCKS - 1)
    for move in (lambda: copy_blocks(cache, pairs), lambda: pool.swap_out(pairs), lambda: pool.swap_in(pairs)):
        with pytest.raises(PagedBackendError, match=message):
            move()
    assert torch.equal(_bits(cache), before)


def test_limits_of_device_and_host_are_their_own(cache):
    pool = HostPool(cache, 2)
    for move in (lambda: pool.swap_out([(1, 3)]), lambda: pool.swap_in([(3, 1)])):
        with pytest.raises(PagedBackendError, match="do not exist"):
            move()
    pool.swap_out([(11, 2)])
    pool.swap_in([(2, 11)])
