"""The CPU linear layers against double precision, and what they promise: bits that depend on a row alone."""

import pytest
import torch

from paged_kernels.cpu import micro
from paged_kernels.cpu.linear import LINEAR_ARGUMENTS, PackedLinear, build_linear, readable_rows
from paged_kernels.cpu.runtime import element_type, launch

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# outputs, depth: whole panels and parts, one panel and several.
SIZES = pytest.mark.parametrize(("outputs", "depth"), [(1, 2), (31, 6), (32, 34), (50, 64), (96, 578)])


def _run(
    packed: PackedLinear, a: torch.Tensor, out: torch.Tensor, epilogue: str, threads: int = 1, build=build_linear
) -> torch.Tensor:
    rows_per_item, items = packed.plan(len(a))
    # What fills up the last tile must not matter.
    padded = torch.full((readable_rows(len(a)), a.shape[1]), float("nan"), dtype=a.dtype)
    padded[: len(a)] = a
    record = LINEAR_ARGUMENTS.pack(
        **packed.fields(),
        a=padded,
        out=out,
        rows=len(a),
        rows_per_item=rows_per_item,
        a_row=padded.stride(0),
        out_row=out.stride(0),
    )
    launch(build(element_type(a.dtype), epilogue), record, items, threads)
    return out


def _case(outputs: int, depth: int, rows: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(outputs * 1000 + depth + rows)
    weight = torch.randn(outputs, depth, generator=generator).to(dtype)
    a = torch.randn(rows, depth, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    return weight, a, bias


@DTYPES
@SIZES
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 13, 31])
def test_store_and_add(outputs, depth, rows, dtype):
    weight, a, bias = _case(outputs, depth, rows, dtype)
    expected = a.double() @ weight.double().T
    tolerance = {"rtol": 1e-5, "atol": 2e-5 * depth**0.5}
    # Beyond the outputs nothing may be written.
    out = torch.full((rows, outputs + 3), 7.0)
    _run(PackedLinear(weight), a, out, "store", threads=2)
    torch.testing.assert_close(out[:, :outputs].double(), expected, **tolerance)
    assert (out[:, outputs:] == 7.0).all()
    out.fill_(7.0)
    _run(PackedLinear(weight, bias), a, out, "add")
    torch.testing.assert_close(out[:, :outputs].double(), 7.0 + expected + bias.double(), **tolerance)
    assert (out[:, outputs:] == 7.0).all()


@DTYPES
@pytest.mark.parametrize("epilogue", ["store", "add", "gated"])
def test_many_rows_go_by_groups(epilogue, dtype):
    """More rows than are worked on before the next panel; groups are whole but for the last."""
    weight, a, bias = _case(100, 1200, 333, dtype)
    gated = epilogue == "gated"
    out = torch.zeros(333, 50 if gated else 100, dtype=dtype if gated else torch.float32)
    packed = PackedLinear(weight, bias if gated else None, gated=gated)
    assert packed.plan(333)[1] > packed.panels
    _run(packed, a, out, epilogue, threads=2)
    for row in (0, 127, 128, 200, 332):
        alone = _run(packed, a[row : row + 1], torch.zeros_like(out[:1]), epilogue)
        assert torch.equal(alone[0], out[row])


@DTYPES
def test_deep_products_go_by_chunks(dtype):
    """More along k than the cache holds of a panel, and more rows than are worked on at a time."""
    weight, a, _ = _case(33, 9000, 300, dtype)
    out = _run(PackedLinear(weight), a, torch.empty(300, 33), "store", threads=2)
    torch.testing.assert_close(out.double(), a.double() @ weight.double().T, rtol=1e-5, atol=5e-3)


@DTYPES
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("outputs", "depth", "rows"), [(1, 2, 1), (16, 32, 5), (23, 18, 9), (64, 64, 8)])
def test_gated(outputs, depth, rows, with_bias, dtype):
    weight, a, bias = _case(2 * outputs, depth, rows, dtype)
    both = a.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    expected = torch.nn.functional.silu(both[:, :outputs]) * both[:, outputs:]
    out = torch.full((rows, outputs + 2), 7.0, dtype=dtype)
    _run(PackedLinear(weight, bias if with_bias else None, gated=True), a, out, "gated", threads=2)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(out[:, :outputs].double(), expected, **tolerance)
    assert (out[:, outputs:] == 7.0).all()


def test_gates_far_from_zero():
    """silu of large values of either sign neither overflows nor loses its sign."""
    a = torch.tensor([[1.0]])
    gates = torch.tensor([-1e4, -100.0, -88.0, -1.0, 0.0, 1.0, 100.0, 1e4])
    out = torch.empty(1, 8)
    _run(PackedLinear(torch.cat([gates, torch.ones(8)])[:, None], gated=True), a, out, "gated")
    torch.testing.assert_close(out[0], torch.nn.functional.silu(gates.double()).float(), rtol=1e-6, atol=1e-30)


@DTYPES
def test_bits_depend_on_the_row_alone(dtype):
    weight, a, _ = _case(96, 130, 29, dtype)
    packed = PackedLinear(weight)
    together = _run(packed, a, torch.empty(29, 96), "store", threads=2)
    for row in (0, 8, 27, 28):
        alone = _run(packed, a[row : row + 1], torch.empty(1, 96), "store")
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("features", [(), ("avx512f",)])
@DTYPES
def test_with_fewer_instructions(dtype, features, monkeypatch):
    """What machines without AVX512-BF16, or without AVX-512, use gives the same up to rounding."""
    weight, a, _ = _case(50, 66, 23, dtype)
    monkeypatch.setattr(micro, "_may_use", lambda feature: feature in features)
    out = _run(PackedLinear(weight), a, torch.empty(23, 50), "store", build=build_linear.__wrapped__)
    torch.testing.assert_close(out.double(), a.double() @ weight.double().T, rtol=1e-5, atol=2e-4)
