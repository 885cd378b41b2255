"""What the host decides before a launch: the number of splits, and tile, warps and stages from the table."""

import itertools

import pytest

from paged_kernels.launch_table import TABLE, look_up, padded_head_dim, shared_memory
from paged_kernels.split_rule import MAX_SPLITS, MIN_SPLIT_TOKENS, RESIDENT_PROGRAMS, choose_splits

H200 = 132


def test_no_split_is_short_and_none_is_empty():
    for num_seqs, heads, length in itertools.product(
        (1, 2, 7, 64, 256), (1, 4, 8, 32), (0, 1, 255, 511, 512, 8000, 2**17)
    ):
        splits = choose_splits(num_seqs, heads, length, H200)
        assert 1 <= splits <= MAX_SPLITS
        assert splits == 1 or length // splits >= MIN_SPLIT_TOKENS


def test_one_long_context_fills_the_gpu():
    assert choose_splits(1, 8, 2**17, H200) * 8 >= 2 * H200
    assert choose_splits(1, 1, 2**17, H200) == MAX_SPLITS


@pytest.mark.parametrize("num_seqs", [12, 16, 24])
def test_a_dozen_long_contexts_are_still_split(num_seqs):
    """A threshold on the number of sequences would leave most of the GPU idle here."""
    assert choose_splits(num_seqs, 4, 32_000, H200) * num_seqs * 4 >= H200 * RESIDENT_PROGRAMS * 0.8


def test_full_gpus_and_short_contexts_are_not_split():
    assert choose_splits(256, 8, 2000, H200) == 1
    assert choose_splits(1, 8, 256, H200) == 1
    assert choose_splits(64, 32, 100_000, H200) <= 2
    assert choose_splits(0, 8, 1000, H200) == 1


def test_one_long_context_among_short_ones():
    """Splitting by the longest context alone would see a full GPU and make all wait for one program."""
    lengths = [128_000] + [1000] * 255
    assert choose_splits(256, 8, 128_000, H200, total_seq_len=sum(lengths)) >= 8
    # An estimate that is too high costs nothing but the knowledge.
    assert choose_splits(4, 8, 1000, H200, total_seq_len=10**9) == choose_splits(4, 8, 1000, H200)


def test_more_multiprocessors_never_mean_fewer_splits():
    for num_seqs, length in itertools.product((1, 4, 16), (4000, 64_000)):
        counts = [choose_splits(num_seqs, 8, length, sms) for sms in (16, 64, 132)]
        assert counts == sorted(counts)


SIZES = [(kernel, arch, dim, rows, element, cache)
         for kernel in TABLE for arch in (75, 80, 86, 89, 90, 100, 120)
         for dim in (64, 80, 96, 112, 128, 192, 256) for rows in (1, 17, 64, 200)
         for element, cache in ((2, 2), (2, 1), (4, 4))]  # fmt: skip


def test_settings_exist_and_fit_for_every_size():
    for kernel, arch, dim, rows, element, cache in SIZES:
        launch = look_up(
            kernel, capability=arch, head_dim=dim, rows=rows, element_size=element, cache_element_size=cache
        )
        width = padded_head_dim(dim)
        buffered = 2 * launch.tile * launch.stages * width * cache
        queries = launch.rows * (width + launch.tile) * element
        assert queries + buffered <= shared_memory(arch), (kernel, arch, dim, rows)
        assert launch.tile >= 16 and launch.tile & (launch.tile - 1) == 0


def test_the_nearest_architecture_below_is_used():
    chosen = {
        arch: look_up("prefill", capability=arch, head_dim=128, rows=128, element_size=2, cache_element_size=2)
        for arch in (80, 87, 90, 100, 103)
    }
    assert chosen[103] == chosen[100]
    assert chosen[80].tile == chosen[87].tile == 32  # Ampere's, also on a consumer GPU
    assert chosen[90].tile == 64
