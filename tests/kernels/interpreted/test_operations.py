"""The Triton-lang kernels around attention, interpreted on CPU tensors, against the reference."""

import numpy as np
import pytest
import torch
from operation_cases import check_operation, operation_grid, sampling_case

from paged_backend.sampling.rng import uniform
from paged_backend.sampling.sampler import SamplingBatch
from paged_backend.sampling.sampler import sample as engine_sample
from paged_kernels import ops


@pytest.mark.parametrize(("name", "dtype"), operation_grid(torch.float32, torch.float16), ids=str)
def test_operation(name, dtype):
    check_operation(name, dtype, "cpu", "triton")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_sampling_follows_the_engine(backend):
    """Same filters, same draw: a seed gives the same tokens wherever sampling runs."""
    arguments = sampling_case(40, 300, "cpu", seed=1)
    logits, temperature, top_k, top_p, min_p, seeds, positions = arguments
    batch = SamplingBatch(
        greedy=(temperature <= 0).numpy(), temperature=temperature.numpy(), top_k=top_k.numpy(), top_p=top_p.numpy(),
        min_p=min_p.numpy(), seeds=seeds.numpy().view(np.uint64), positions=positions.numpy(),
    )  # fmt: skip
    expected = torch.from_numpy(engine_sample(logits, batch))
    assert (ops.sample(*arguments, backend=backend) != expected).sum() <= 1


def test_the_reference_draws_the_engines_numbers():
    from paged_kernels.reference.sampling import uniform as reference_uniform

    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 50, dtype=np.uint64)
    positions = rng.integers(0, 2**32, 50)
    own = [reference_uniform(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]
    assert np.array_equal(np.float32(own), uniform(seeds, positions))
