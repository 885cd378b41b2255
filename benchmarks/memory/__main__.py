"""`python -m benchmarks.memory`: the same as `paged-backend bench memory`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.memory.run import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="benchmarks.memory")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--png", type=Path, metavar="FILE")
    parsed = parser.parse_args()
    raise SystemExit(main(parsed.json, parsed.png))
