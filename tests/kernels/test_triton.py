"""Runs the interpreted tests of the Triton-lang kernels and their compile gate, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytest.importorskip("triton")


def run_alone(arguments, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "kernels"), str(ROOT), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments], env={**env, **environment}, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


# In parts, so that none takes minutes; a file that no part names would never run.
PARTS = ["test_interpreted.py", "test_operations.py", "test_gpu_report.py"]


def test_the_parts_are_all_there_is():
    assert sorted(PARTS) == sorted(path.name for path in (HERE / "interpreted").glob("test_*.py"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", PARTS)
def test_interpreted(part):
    arguments = ["-m", "pytest", "-q", str(HERE / "interpreted" / part), "-p", "no:cacheprovider"]
    run_alone(arguments, TRITON_INTERPRET="1")


@pytest.mark.timeout(900)
def test_every_variant_compiles_without_spilling():
    run_alone([str(HERE / "compile_gate.py")])
