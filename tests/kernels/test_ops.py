"""The public module: which backend, which arguments are refused, and what importing it costs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import make_batch, make_caches, run

from paged_kernels import backends, ops

SIZES = {"heads": 2, "group": 3, "dim": 64, "page": 16}


@pytest.mark.parametrize(
    ("requested", "device", "expected"),
    [("auto", "cpu", "cpu"), ("cpu", "cpu", "cpu"), ("reference", "cpu", "reference"),
     ("reference", "cuda", "reference")],
)  # fmt: skip
def test_resolve_backend(requested, device, expected):
    assert ops.resolve_backend(requested, device) == expected


def test_resolve_backend_on_cuda():
    pytest.importorskip("triton")
    assert ops.resolve_backend("auto", "cuda") == "triton"
    assert ops.resolve_backend("triton", torch.device("cuda", 1)) == "triton"


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        ops.resolve_backend("triton", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert ops.resolve_backend("triton", "cpu") == "triton"


def test_refused_backends(monkeypatch):
    with pytest.raises(ValueError, match="auto, triton, cpu, reference"):
        ops.resolve_backend("flash", "cpu")
    with pytest.raises(ValueError, match="CPU tensors"):
        ops.resolve_backend("cpu", "cuda")
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'numba', which is not installed"):
        ops.resolve_backend("auto", "cpu")


BAD_ATTENTION = {
    "query": lambda b: b["query"][:, :5],
    "k_cache": lambda b: b["k_cache"].to(torch.float16),
    "v_cache": lambda b: b["v_cache"][:, :1],
    "block_tables": lambda b: b["block_tables"].long(),
    "seq_lens": lambda b: b["seq_lens"].long(),
    "query_start_loc": lambda b: b["query_start_loc"][:-1],
    "num_decodes": lambda b: 3,
    "max_query_len": lambda b: -1,
    "max_seq_len": lambda b: -1,
    "out": lambda b: torch.empty(1, 6, 64),
}


@pytest.mark.parametrize("name", BAD_ATTENTION)
def test_attention_names_the_argument_at_fault(name):
    batch = make_batch([5, 20], [1, 20], **SIZES, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"^{name}: "):
        run(batch, "reference", **{name: BAD_ATTENTION[name](batch)})


@pytest.mark.parametrize("name", ["key", "value", "k_cache", "v_cache", "slot_mapping"])
def test_write_names_the_argument_at_fault(name):
    k_cache, v_cache = make_caches(2, 2, 16, 64, torch.float32)
    rows = torch.zeros(3, 2, 64)
    arguments = {"key": rows, "value": rows, "k_cache": k_cache, "v_cache": v_cache}
    arguments["slot_mapping"] = torch.zeros(3, dtype=torch.int64)
    wrong = torch.zeros(4, dtype=torch.int64) if name == "slot_mapping" else arguments[name].transpose(-1, -2)
    with pytest.raises(ValueError, match=f"^{name}: "):
        ops.write_kv(**{**arguments, name: wrong}, backend="reference")


def test_dtype_a_backend_lacks():
    batch = make_batch([5], [5], **SIZES, dtype=torch.float16)
    with pytest.raises(ValueError, match="'cpu' supports float32, bfloat16"):
        run(batch, "cpu")


def test_import_is_light():
    """Neither compiler is imported before a backend needs it, and nothing of paged_backend ever."""
    code = (
        "import sys, paged_kernels.ops, paged_kernels.reference\n"
        "found = {'numba', 'triton', 'paged_backend', 'kernels'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(root / "kernels")}, check=True)


X = torch.zeros(3, 64)
FLOATS, INTS = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
KEYS = torch.zeros(3, 2, 64)
CACHES = make_caches(4, 2, 16, 64, torch.float32)
BYTES = [c.to(torch.int8) for c in CACHES]
SCALE = torch.tensor(1.0)
REFUSED = [
    # (argument at fault, operation, arguments)
    ("x", ops.rms_norm, (X[:, 0], FLOATS, 1e-5)),
    ("weight", ops.rms_norm, (X, torch.zeros(32), 1e-5)),
    ("residual", ops.add_rms_norm, (X, X[:2], torch.zeros(64), 1e-5)),
    ("gate_up", ops.silu_mul, (X[:, :63],)),
    ("source", ops.copy_blocks, (torch.zeros(2, 3, 4, 5).transpose(2, 3), torch.zeros(2, 3, 5, 4), torch.zeros(1, 2))),
    ("destination", ops.copy_blocks, (torch.zeros(2, 3, 4), torch.zeros(2, 3, 5), torch.zeros(1, 2))),
    ("pairs", ops.copy_blocks, (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.zeros(1, 2))),
    ("k_cache", ops.write_kv_quantised, (KEYS, KEYS, *CACHES, INTS, SCALE, SCALE)),
    ("k_scale", ops.write_kv_quantised, (KEYS, KEYS, *BYTES, INTS, FLOATS, FLOATS)),
    ("v_scale", ops.write_kv_quantised, (KEYS, KEYS, *BYTES, INTS, SCALE, torch.ones(4, 2, 16))),
    ("k_cache", ops.write_kv, (KEYS, KEYS, *BYTES, INTS)),
    ("slot_mapping", ops.write_kv_quantised, (KEYS, KEYS, *BYTES, INTS[:2], SCALE, SCALE)),
    ("query", ops.rope_write_kv, (KEYS[:2], KEYS, KEYS, X[:, :32], X[:, :32], *CACHES, INTS)),
    ("cos", ops.rope_write_kv, (KEYS, KEYS, KEYS, X, X, *CACHES, INTS)),
    ("sin", ops.rope_write_kv, (KEYS, KEYS, KEYS, X[:, :32].clone(), X[:, :16].clone(), *CACHES, INTS)),
    ("logits", ops.sample, (X.half(), FLOATS, INTS, FLOATS, FLOATS, INTS, INTS)),
    ("top_k", ops.sample, (X, FLOATS, FLOATS, FLOATS, FLOATS, INTS, INTS)),
    ("seeds", ops.sample, (X, FLOATS, INTS, FLOATS, FLOATS, INTS[:2], INTS)),
    ("entry_counts", ops.penalise, (X, INTS, INTS, FLOATS[:2], FLOATS, FLOATS, FLOATS, FLOATS)),
    ("temperature", ops.penalise, (X, INTS, INTS, FLOATS, FLOATS, FLOATS, FLOATS, FLOATS.double())),
    ("tokens", ops.token_logprobs, (X, FLOATS, 3)),
    ("count", ops.token_logprobs, (X, INTS, 65)),
]


@pytest.mark.parametrize(
    ("name", "operation", "arguments"), REFUSED, ids=lambda v: getattr(v, "__name__", None) or str(v)[:20]
)
def test_operations_name_the_argument_at_fault(name, operation, arguments):
    with pytest.raises(ValueError, match=f"^{name}: "):
        operation(*arguments, backend="reference")


def test_the_reference_stands_in_on_a_cpu():
    x = torch.randn(3, 64)
    assert torch.equal(ops.silu_mul(x, backend="cpu"), ops.silu_mul(x, backend="reference"))
    with pytest.raises(ValueError, match="'cpu' supports float32, bfloat16"):
        ops.silu_mul(x.half(), backend="cpu")
