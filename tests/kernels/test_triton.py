"""Runs the interpreted tests of the Triton-lang kernels and their compile gate, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytest.importorskip("triton")


def run_alone(arguments, **environment):
    kernels = str(HERE.parents[1] / "kernels")
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    env["PYTHONPATH"] = os.pathsep.join([kernels, env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments], env={**env, **environment}, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["float32", "not float32"])
def test_interpreted(part):
    arguments = ["-m", "pytest", "-q", str(HERE / "interpreted"), "-k", part, "-p", "no:cacheprovider"]
    run_alone(arguments, TRITON_INTERPRET="1")


@pytest.mark.timeout(900)
def test_every_variant_compiles_without_spilling():
    run_alone([str(HERE / "compile_gate.py")])
