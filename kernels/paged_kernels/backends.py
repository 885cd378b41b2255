"""Which backend runs an operation: names, what each can run, and where its functions are.

Triton-lang and numba are imported only when their backend is used. Knows names, devices and dtypes; no operation.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch

BACKENDS = ("triton", "cpu", "reference")

# Where a backend's functions are: a module with all of them.
_MODULES = {
    "triton": "paged_kernels.triton_dispatch",
    "cpu": "paged_kernels.cpu.dispatch",
    "reference": "paged_kernels.reference",
}
_PACKAGES = {"triton": "triton", "cpu": "numba"}
_DTYPES = {
    "triton": (torch.float32, torch.float16, torch.bfloat16),
    "cpu": (torch.float32, torch.bfloat16),
    "reference": (torch.float32, torch.float16, torch.bfloat16),
}


def interpreted() -> bool:
    """Whether Triton-lang kernels run on CPU tensors in this process."""
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "True")


def resolve_backend(requested: str, device: torch.device | str) -> str:
    """The backend to use on a device: `auto` gives `triton` on CUDA and `cpu` on a CPU.

    Raises ValueError for an unknown name, for a backend that cannot run on the device, and when the package
    it needs is not installed.
    """
    kind = torch.device(device).type
    if requested != "auto" and requested not in BACKENDS:
        choices = ", ".join(("auto", *BACKENDS))
        raise ValueError(f"attention_backend {requested!r} is unknown; choose one of {choices}")
    backend = requested
    if requested == "auto":
        backend = "triton" if kind == "cuda" else "cpu"
    if backend == "triton" and kind != "cuda" and not interpreted():
        raise ValueError(
            f"attention_backend 'triton' needs a CUDA device, not {kind!r}; set TRITON_INTERPRET=1 before "
            "starting to run the Triton-lang kernels interpreted, or use 'cpu'"
        )
    if backend == "cpu" and kind != "cpu":
        raise ValueError(f"attention_backend 'cpu' runs on CPU tensors, not on {kind!r}; use 'triton'")
    package = _PACKAGES.get(backend)
    if package and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"attention_backend {backend!r} needs the Python package {package!r}, which is not installed; "
            f"install it (pip install {package}) or use attention_backend 'reference'"
        )
    return backend


@cache
def implementation(name: str, backend: str, dtype: torch.dtype, device: torch.device) -> Callable[..., Any]:
    """The function of that name of a backend; refuses what the backend cannot run.

    Where `cpu` has no kernel for an operation, the reference stands in: plain torch is what there is on a CPU.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; choose one of {', '.join(BACKENDS)}")
    if dtype not in _DTYPES[backend]:
        names = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES[backend])
        raise ValueError(f"backend {backend!r} supports {names}, not {dtype}")
    resolve_backend(backend, device)
    module = importlib.import_module(_MODULES[backend])
    if backend == "cpu" and not hasattr(module, name):
        module = importlib.import_module(_MODULES["reference"])
    return getattr(module, name)


def fail(name: str, problem: str) -> NoReturn:
    """Refuse an argument. Checks run at every layer of every step: call this only once something is wrong."""
    raise ValueError(f"{name}: {problem}")
