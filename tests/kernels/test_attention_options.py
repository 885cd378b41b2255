"""Options of paged attention: the reference against their definition, what `cpu` does with them, what is refused."""

import pytest
import torch
from kernel_cases import check_attention, run
from option_cases import E4M3, E5M2, INT8, attend_by_definition, option_batch

SMALL = (8, 16, 2, torch.float32)
OPTIONS = [
    {"soft_cap": 0.5}, {"alibi": True}, {"sinks": True}, {"window": 5, "sinks": True, "alibi": True, "soft_cap": 2.0},
    {"cache": (E4M3, "tensor")}, {"cache": (E5M2, "token")}, {"cache": (INT8, "token"), "window": 9},
    {"cache": (INT8, "tensor"), "alibi": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reference_is_the_definition(options):
    batch = option_batch(*SMALL, options)
    torch.testing.assert_close(run(batch, "reference").double(), attend_by_definition(batch), atol=5e-6, rtol=2e-5)


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
def test_cpu_computes_them_too(options):
    check_attention(option_batch(*SMALL, options), "cpu")


WRONG = {
    "soft_cap": lambda b: {"soft_cap": 0.0},
    "alibi_slopes": lambda b: {"alibi_slopes": torch.ones(3)},
    "sinks": lambda b: {"sinks": torch.ones(4, dtype=torch.float64)},
    "v_scale": lambda b: {"v_scale": None},
    "k_scale": lambda b: {"k_scale": torch.ones(4)},
    "k_cache": lambda b: {"k_scale": None, "v_scale": None},
    "num_short": lambda b: {"num_short": 1},
    "total_seq_len": lambda b: {"total_seq_len": -1},
}


@pytest.mark.parametrize("name", WRONG)
def test_the_option_at_fault_is_named(name):
    batch = option_batch(*SMALL, {"cache": (INT8, "token")})
    with pytest.raises(ValueError, match=f"^{name}: "):
        run(batch, "reference", **WRONG[name](batch))
