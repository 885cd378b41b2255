"""The structure holds: imports follow the layers, files and functions stay small, `kernels` is no package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# What each part may import of the project (itself always). Top-level modules are named without their package.
_BASE = {"errors", "config", "param_checks", "structured_params", "sampling_params", "token_rules"}
_BASE |= {"model_source", "model_files"}
ALLOWED: dict[str, set[str]] = {
    "__init__": {"llm", "sampling_params"},
    "errors": set(),
    "config": {"errors", "param_checks"},
    "param_checks": {"errors"},
    "structured_params": {"errors", "param_checks"},
    "sampling_params": {"errors", "param_checks", "structured_params"},
    "token_rules": set(),
    "model_source": {"errors", "config"},
    "model_files": {"errors", "model_source"},
    "tokenizer": {"errors", "param_checks", "model_source", "model_files"},
    "chat": {"errors", "param_checks", "tokenizer"},
    "structured": _BASE | {"tokenizer"},
    "request": _BASE,
    "kv": _BASE | {"request"},
    "sched": _BASE | {"request", "kv"},
    "model": _BASE | {"paged_kernels"},
    "sampling": _BASE | {"paged_kernels"},
    # Of sched the worker may know only the contract: see test_worker_knows_only_the_plan.
    "worker": _BASE | {"paged_kernels", "model", "sampling", "sched"},
    "engine": _BASE | {"chat", "tokenizer", "structured", "request", "kv", "sched", "worker"},
    "llm": _BASE | {"chat", "engine", "request"},
    # Of model the last two may know only what the files say: see test_model_without_torch.
    "triton_adapter": _BASE | {"model", "chat", "tokenizer", "request", "engine"},
    "server": {"errors", "config", "model_source"},
    "bench": {"errors"},
    "monitor": {"errors"},
    "doctor": _BASE | {"model", "monitor", "server", "tokenizer", "triton_adapter"},
    "cli": {"__init__", "bench", "doctor", "errors", "model_source", "monitor", "server"},
    "paged_kernels": set(),
}
NO_TORCH = _BASE | {
    *("chat", "tokenizer", "structured", "request", "kv", "sched"),
    *("server", "bench", "monitor", "doctor", "cli"),
}


def _sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _part(path: Path) -> str:
    """The part of the project a file belongs to."""
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "kernels":
        return "paged_kernels"
    return relative.parts[1].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Absolute module names a file imports anywhere, functions and TYPE_CHECKING blocks included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "paged_backend")
    return found


def _project_part(module: str) -> str | None:
    names = module.split(".")
    if names[0] == "paged_kernels":
        return "paged_kernels"
    if names[0] != "paged_backend":
        return None
    name = names[1] if len(names) > 1 else "__init__"
    return name if name in ALLOWED else "__init__"


LIBRARY = _sources("paged_backend", "kernels")


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_layers(path):
    part = _part(path)
    assert part in ALLOWED, f"give {part} its place in the layers"
    used = {_project_part(module) for module in _imports(path)} - {None, part}
    if part != "__init__" and any(module != "paged_backend" for module in _imports(path)):
        # `from paged_backend.x import y` names the package too, which says nothing.
        used -= {"__init__"} - ALLOWED[part]
    assert used <= ALLOWED[part], f"{part} must not import {sorted(used - ALLOWED[part])}"


@pytest.mark.parametrize(
    "path", [path for path in LIBRARY if _part(path) in NO_TORCH], ids=lambda path: str(path.relative_to(ROOT))
)
def test_no_torch_below_the_worker(path):
    assert not {module for module in _imports(path) if module.split(".")[0] in ("torch", "triton", "numba")}


def test_worker_knows_only_the_plan():
    for path in _sources("paged_backend/worker"):
        modules = {m for m in _imports(path) if m.startswith("paged_backend.sched")}
        assert modules <= {"paged_backend.sched.output"}, f"{path}: {modules}"


def test_model_without_torch():
    for path in _sources("paged_backend/triton_adapter", "paged_backend/doctor"):
        modules = {m for m in _imports(path) if m.startswith("paged_backend.model.")}
        assert modules <= {"paged_backend.model.config"}, f"{path}: {modules}"
    assert not {m for m in _imports(ROOT / "paged_backend/model/config.py") if m.split(".")[0] == "torch"}


def test_model_shims_import_only_the_adapter():
    for path in _sources("model_repository"):
        ours = {m for m in _imports(path) if m.split(".")[0] in ("paged_backend", "paged_kernels")}
        assert ours
        assert all(m.startswith("paged_backend.triton_adapter") for m in ours), f"{path}: {ours}"


def test_kernels_is_not_a_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    everything = _sources("paged_backend", "kernels", "model_repository", "client_examples", "tests", "benchmarks")
    assert not [path for path in everything if any(m.split(".")[0] == "kernels" for m in _imports(path))]


EVERYTHING = _sources("paged_backend", "kernels", "model_repository", "client_examples", "tests", "benchmarks")


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_small(path):
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            # A longer one says why in its docstring.
            reasoned = "Longer than a screen because" in " ".join((ast.get_docstring(node) or "").split())
            assert length <= MAX_FUNCTION_LINES or reasoned, f"{node.name} has {length} lines"
