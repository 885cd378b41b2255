"""Measures the candidates for each entry of the launch table on this GPU and rewrites the table.

    PYTHONPATH=.:kernels python benchmarks/tune_kernels.py [--only decode] [--file FILE]

Only entries of this GPU's architecture and of 16-bit queries change, and only where a candidate is faster by more than
the noise. Each entry is measured on one problem of its shape class, with pages of 16 and of 64 tokens. Run the compile
gate afterwards (`make test-kernels`): a candidate that spills on another Triton-lang release must not stay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# `python benchmarks/tune_kernels.py` puts only this file's folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.pool import paged_batch
from benchmarks.gpu_report import make_bench
from paged_kernels import launch_table, ops
from paged_kernels.launch_table import TABLE, Settings
from paged_kernels.triton_dispatch import device_of

TABLE_FILE = Path(launch_table.__file__)
BEGIN, END = "# table begins\n", "# table ends\n"
# A candidate must be this much faster than what stands in the table.
_GAIN = 0.97


def candidates(bench: Bench) -> Iterator[Settings]:
    """(tile, warps, stages): all that may be tried."""
    if not bench.on_gpu:
        yield (32, 4, 2)
        return
    for tile in (16, 32, 64, 128):
        for warps in (4, 8):
            for stages in (1, 2, 3, 4):
                yield tile, warps, stages


def problem(bench: Bench, kernel: str, width: int, rows: int, page: int) -> dict[str, Any] | None:
    """A batch whose launches use the entry; None if there is no memory for it."""
    dim = width // bench.dtype.itemsize
    long, many = (16384, 32) if bench.on_gpu else (40, 2)
    group = min(rows, 8)
    if kernel == "decode":
        # Short queries have one variant: eight tokens.
        tokens, group = (1, 8) if rows == 16 else (8, rows // 8)
        batch = paged_batch(bench, (2 * group, 2, dim), page, [long] * many, [tokens] * many)
    else:
        # A chunk of few rows behind a long context, or whole prompts.
        tokens = {16: 9, 64: 60}.get(rows, long // 4)
        group = {16: 1, 64: 1}.get(rows, 4)
        sequences = many if tokens < 100 else max(1, many // 8)
        batch = paged_batch(bench, (2 * group, 2, dim), page, [long // 4] * sequences, [tokens] * sequences)
    if batch is not None and kernel == "prefill+":
        batch["window"] = long // 8
    return batch


def measure(bench: Bench, kernel: str, width: int, rows: int, entry: dict[int, Settings]) -> dict[Settings, float]:
    """Seconds of each candidate, and of what stands in the entry, over both page sizes; what fails is left out."""
    before = entry[rows]
    batches = [problem(bench, kernel, width, rows, page) for page in ((16, 64) if bench.on_gpu else (16,))]
    times = {}
    for settings in dict.fromkeys((before, *candidates(bench))):
        entry[rows] = settings
        try:
            times[settings] = sum(bench.seconds(lambda b=b: ops.paged_attention(**b)) for b in batches if b is not None)
        except Exception as error:  # compilers and launchers refuse in many ways: too much shared memory, for one
            print(f"    {settings}: {str(error).splitlines()[0][:90] if str(error) else type(error).__name__}")
        finally:
            entry[rows] = before
    return times


def tune(bench: Bench, only: Sequence[str]) -> None:
    """Change the table in place."""
    capability, _ = device_of(bench.device)
    for kernel in only or TABLE:
        by_width = TABLE[kernel][launch_table.architecture_of(capability, TABLE[kernel])]
        for width, entry in by_width.items():
            # Wider classes are those of float32, and of heads that no model has.
            if width > 256 * bench.dtype.itemsize or (not bench.on_gpu and width != 128):
                continue
            for rows in entry:
                times = measure(bench, kernel, width, rows, entry)
                best = min(times, key=lambda settings: times[settings])
                chosen = best if times[best] < _GAIN * times[entry[rows]] else entry[rows]
                gain = times[entry[rows]] / times[chosen]
                print(f"{kernel} {width} bytes, {rows} rows: {entry[rows]} -> {chosen} ({gain:.2f}x)", flush=True)
                entry[rows] = chosen


def render() -> str:
    """The table as it stands in its file."""
    lines = ["TABLE: Table = {"]
    for kernel, by_architecture in TABLE.items():
        lines.append(f'    "{kernel}": {{')
        for architecture, by_width in by_architecture.items():
            lines.append(f"        {architecture}: {{")
            for width, by_rows in by_width.items():
                entries = ", ".join(f"{rows}: {settings}" for rows, settings in by_rows.items())
                lines.append(f"            {width}: {{{entries}}},")
            lines.append("        },")
        lines.append("    },")
    return "\n".join([*lines, "}\n"])


def rewrite(path: Path) -> None:
    """Replace what is between the marks."""
    head, rest = path.read_text().split(BEGIN)
    path.write_text(head + BEGIN + render() + END + rest.split(END)[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune and rewrite; returns 0."""
    parser = argparse.ArgumentParser(description="Regenerate the launch table of the attention kernels on this GPU.")
    parser.add_argument("--only", nargs="+", default=[], choices=list(TABLE), help="only these kernels")
    parser.add_argument("--file", type=Path, default=TABLE_FILE, help="the file to rewrite (default: the table's own)")
    parser.add_argument("--toy", action="store_true", help="one tiny shape, also interpreted on a CPU")
    parsed = parser.parse_args(arguments)
    bench = make_bench(parsed.toy)
    with torch.inference_mode():
        tune(bench, parsed.only)
    rewrite(parsed.file)
    print(f"written: {parsed.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
