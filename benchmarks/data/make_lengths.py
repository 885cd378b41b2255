"""Writes the length distributions in this directory: pairs of prompt and output lengths in tokens.

They are synthetic. Of each trace the PagedAttention paper states the mean input and output length (its figure 11); here
both are log-normal, independent of each other, cut off at a limit, and shifted so that the mean after the cut is the
stated one. The widths (`sigma`) are assumptions, made to look like that figure's histograms: many short prompts with a
long tail in ShareGPT, uniformly short ones in Alpaca. For WMT16 the paper states no lengths: those are assumptions too.

    python benchmarks/data/make_lengths.py
"""

from __future__ import annotations

import csv
import math
import random
import statistics
from pathlib import Path

NUM_PAIRS = 500
# name -> (mean, sigma, limit) of the prompts and of the outputs
TRACES = {
    "sharegpt_like": ((161.31, 1.5, 1024), (337.99, 0.9, 1024)),
    "alpaca_like": ((19.31, 0.5, 256), (58.45, 0.9, 512)),
    "wmt_like": ((35.0, 0.5, 256), (45.0, 0.5, 256)),
}


def lengths(mean: float, sigma: float, limit: int) -> list[int]:
    """`NUM_PAIRS` evenly spaced quantiles of a log-normal distribution cut off at `limit`, with the given mean."""
    quantiles = [statistics.NormalDist().inv_cdf((i + 0.5) / NUM_PAIRS) for i in range(NUM_PAIRS)]
    low, high = 0.0, math.log(limit)
    for _ in range(60):
        mu = (low + high) / 2
        values = [min(limit, max(1, round(math.exp(mu + sigma * z)))) for z in quantiles]
        low, high = (mu, high) if statistics.fmean(values) < mean else (low, mu)
    return values


def main() -> None:
    """Write one CSV file per trace."""
    for name, (prompt, output) in TRACES.items():
        prompts, outputs = lengths(*prompt), lengths(*output)
        random.Random(f"{name} pairs").shuffle(outputs)
        pairs = list(zip(prompts, outputs, strict=True))
        random.Random(f"{name} order").shuffle(pairs)
        with (Path(__file__).parent / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["prompt_tokens", "output_tokens"])
            writer.writerows(pairs)
        print(f"{name}: means {statistics.fmean(prompts):.2f} and {statistics.fmean(outputs):.2f} tokens")


if __name__ == "__main__":
    main()
