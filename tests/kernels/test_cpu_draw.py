"""Drawing by temperature on the CPU: the token that the exact integer weights say, whatever the batch."""

import math

import pytest
import torch

from paged_kernels.cpu.draw import UNIT, draw_tokens


def _case(rows: int, vocabulary: int, temperature: float):
    generator = torch.Generator().manual_seed(rows * vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator) * 4
    chance = torch.rand(rows, generator=generator, dtype=torch.float64)
    return logits, logits.amax(-1), torch.full((rows,), temperature), chance


def _expected_interval(logits, temperature, token):
    """Where in the exact cumulative distribution the token lies."""
    cumulative = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
    return (cumulative[token - 1].item() if token else 0.0), cumulative[token].item()


@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("vocabulary", [1, 2, 15, 16, 511, 512, 513, 5000])
def test_the_draw_falls_into_the_token(vocabulary, temperature):
    logits, best, temperatures, chance = _case(40, vocabulary, temperature)
    tokens = draw_tokens(logits, best, temperatures, chance)
    for row, token in enumerate(tokens.tolist()):
        low, high = _expected_interval(logits[row], temperature, token)
        # float32 exponentials move the borders a little.
        assert low - 2e-6 <= chance[row] <= high + 2e-6


def test_ends_of_the_range():
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]]).repeat(2, 1)
    chance = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    tokens = draw_tokens(logits, logits.amax(-1), torch.ones(2), chance)
    assert tokens.tolist() == [1, 2]


def test_a_row_does_not_depend_on_the_others():
    logits, best, temperatures, chance = _case(33, 3000, 0.8)
    together = draw_tokens(logits, best, temperatures, chance)
    for row in (0, 16, 32):
        alone = draw_tokens(*(x[row : row + 1] for x in (logits, best, temperatures, chance)))
        assert alone[0] == together[row]
    strided = torch.zeros(33, 3500)
    strided[:, :3000] = logits
    assert torch.equal(draw_tokens(strided[:, :3000], best, temperatures, chance), together)


def test_weights_of_one_token_apart():
    """What weighs less than a unit beside the best is never drawn."""
    logits = torch.tensor([[0.0, -math.log(UNIT) - 1.0]])
    chance = torch.tensor([1.0 - 2**-53], dtype=torch.float64)
    assert draw_tokens(logits, logits.amax(-1), torch.ones(1), chance).tolist() == [0]


def test_nan_does_no_harm():
    logits = torch.full((3, 1000), math.nan)
    tokens = draw_tokens(logits, logits.amax(-1), torch.ones(3), torch.full((3,), 0.5, dtype=torch.float64))
    assert ((tokens >= 0) & (tokens < 1000)).all()
