"""Drawing with top-p and min-p on the CPU: exactly the tokens that a sort would keep, in exact proportion."""

import math

import pytest
import torch

from paged_kernels.cpu.draw import UNIT
from paged_kernels.cpu.nucleus import draw_nucleus


def _kept(logits: torch.Tensor, temperature: float, top_p: float, min_p: float) -> torch.Tensor:
    """Weights after both filters, by sorting: int64 [vocabulary]."""
    ratios = torch.exp((logits - logits.max()).double() / temperature) * UNIT
    ratios[ratios < min_p * UNIT] = 0
    weights = ratios.long()
    needed = max(1, math.ceil(top_p * weights.sum().item()))
    order = sorted(range(len(weights)), key=lambda i: (-weights[i].item(), i))
    kept, total = torch.zeros_like(weights), 0
    for i in order:
        if total >= needed:
            break
        kept[i] = weights[i]
        total += weights[i].item()
    return kept


@pytest.mark.parametrize(
    ("top_p", "min_p"), [(0.9, 0.0), (0.3, 0.0), (1e-6, 0.0), (1.0, 0.05), (0.8, 0.02), (0.999, 0.0)]
)
@pytest.mark.parametrize("vocabulary", [1, 7, 16, 300, 4001])
def test_the_draw_falls_into_the_token(vocabulary, top_p, min_p):
    generator = torch.Generator().manual_seed(vocabulary)
    rows = 24
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    chance = torch.rand(rows, generator=generator, dtype=torch.float64)
    temperature = 0.8
    tokens = draw_nucleus(
        logits, logits.amax(-1), torch.full((rows,), temperature), torch.full((rows,), top_p),
        torch.full((rows,), min_p), chance,
    ).tolist()  # fmt: skip
    for row, token in enumerate(tokens):
        kept = _kept(logits[row], temperature, top_p, min_p).double()
        cumulative = (kept / kept.sum()).cumsum(0)
        low = cumulative[token - 1].item() if token else 0.0
        # float32 exponentials move the borders a little, and with them, rarely, who is the last to be kept.
        assert low - 1e-4 <= chance[row].item() <= cumulative[token].item() + 1e-4


def test_of_equal_weights_the_lower_ids_are_kept():
    logits = torch.zeros(200, 10)
    chance = torch.linspace(0, 1 - 1e-9, 200, dtype=torch.float64)
    ones = torch.ones(200)
    tokens = draw_nucleus(logits, torch.zeros(200), ones, ones * 0.35, ones * 0, chance)
    # Four of ten hold 40 %, three would fall short.
    assert sorted(set(tokens.tolist())) == [0, 1, 2, 3]
    assert torch.bincount(tokens).tolist() == [50, 50, 50, 50]


def test_a_row_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 2000, generator=generator) * 2
    chance = torch.rand(40, generator=generator, dtype=torch.float64)
    values = torch.rand(3, 40, generator=generator)
    arguments = [logits, logits.amax(-1), values[0] + 0.2, values[1] * 0.9 + 0.05, values[2] * 0.1, chance]
    together = draw_nucleus(*arguments)
    for row in (0, 17, 39):
        assert draw_nucleus(*(x[row : row + 1].contiguous() for x in arguments))[0] == together[row]


def test_flat_and_broken_rows():
    flat = torch.zeros(2, 50_000)
    chance = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    ones = torch.ones(2)
    assert draw_nucleus(flat, torch.zeros(2), ones, ones * 0.5, ones * 0, chance).tolist() == [0, 24_999]
    broken = torch.full((2, 100), math.nan)
    tokens = draw_nucleus(broken, broken.amax(-1), ones, ones * 0.5, ones * 0, chance)
    assert ((tokens >= 0) & (tokens < 100)).all()
