"""Runs the interpreted tests of the Triton-lang kernels and their compile gate, each in a process of its own.

Those of them that are to run start together, two at a time, since the interpreter keeps one core busy for minutes.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytest.importorskip("triton")

SECONDS = 900
# In parts, so that none takes minutes; a file that no part names would never run.
PARTS = ["test_interpreted.py", "test_operations.py", "test_gpu_report.py"]
GATE = "compile_gate.py"


def run_alone(name: str) -> subprocess.CompletedProcess[str]:
    """Run a file here that is a script, or one in `interpreted/` that holds tests."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "kernels"), str(ROOT), env.get("PYTHONPATH", "")])
    arguments = [str(HERE / name)]
    if name in PARTS:
        env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        arguments = ["-m", "pytest", "-q", str(HERE / "interpreted" / name), "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, check=False, timeout=SECONDS
    )


@pytest.fixture(scope="module")
def runs(request):
    """What each chosen test runs, as futures."""
    mine = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params["name"] for item in mine if hasattr(item, "callspec")]
    pool = ThreadPoolExecutor(2)
    yield {name: pool.submit(run_alone, name) for name in chosen}
    pool.shutdown(cancel_futures=True)


def test_the_parts_are_all_there_is():
    assert sorted(PARTS) == sorted(path.name for path in (HERE / "interpreted").glob("test_*.py"))


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("name", [*PARTS, GATE])
def test_passes(runs, name):
    """Interpreted kernels agree with the reference; every variant compiles without spilling registers."""
    done = runs[name].result()
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
