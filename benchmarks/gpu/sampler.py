"""What follows the logits: sampling with each filter, penalties, log-probabilities; sorting in torch for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.bench import Bench, Result, Row, Table
from paged_kernels import ops

_FILTERS = {
    "greedy": (0.0, 0, 1.0),
    "temperature": (0.8, 0, 1.0),
    "top-k 50": (0.8, 50, 1.0),
    "top-p 0.9": (0.8, 0, 0.9),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9),
}


def rows(bench: Bench) -> Iterator[Row]:
    for count in bench.sizes.batches:
        for name, chosen in _FILTERS.items():
            yield f"sample {name}, {count} rows", lambda n=count, c=chosen: _sample(bench, n, *c)
        for name, make in {"penalties": _penalise, "log-probabilities, top 5": _logprobs}.items():
            yield f"{name}, {count} rows", lambda n=count, m=make: _result(bench, m(bench, n), n)


def _logits(bench: Bench, count: int) -> torch.Tensor:
    return bench.randn(count, bench.sizes.vocabulary, dtype=torch.float32) * 3


def _result(bench: Bench, function: Callable[[], object], count: int) -> Result:
    seconds = bench.seconds(function)
    return {"us": seconds * 1e6, "GB/s of logits": count * bench.sizes.vocabulary * 4 / seconds / 1e9}


def _sample(bench: Bench, count: int, temperature: float, top_k: int, top_p: float) -> Result:
    logits = _logits(bench, count)
    full = {"device": bench.device}
    arguments = (
        torch.full((count,), temperature, **full), torch.full((count,), top_k, **full),
        torch.full((count,), top_p, **full), torch.zeros(count, **full),
        torch.arange(count, **full), torch.arange(count, **full),
    )  # fmt: skip
    result = _result(bench, lambda: ops.sample(logits, *arguments, backend="triton"), count)
    if top_p < 1:
        result["sorting us / ours"] = bench.seconds(lambda: _sorted(logits, temperature, top_p)) * 1e6 / result["us"]
    return result


def _sorted(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """The usual way: sort, cumulative sum, mask, draw."""
    values, order = (logits / temperature).sort(-1, descending=True)
    weights = values.softmax(-1)
    weights = weights.masked_fill(weights.cumsum(-1) - weights > top_p, 0.0)
    return order.gather(-1, weights.multinomial(1))


def _penalise(bench: Bench, count: int) -> Callable[[], object]:
    logits = _logits(bench, count)
    each = min(1000, bench.sizes.vocabulary)
    entry_rows = torch.arange(count).repeat_interleave(each).to(bench.device)
    tokens = torch.stack([torch.randperm(bench.sizes.vocabulary)[:each] for _ in range(count)]).flatten()
    per_row = [torch.full((count,), value, device=bench.device) for value in (1.1, 0.1, 0.1, 0.8)]
    ones = torch.ones(len(entry_rows), device=bench.device)
    tokens = tokens.to(bench.device)
    return lambda: ops.penalise(logits, entry_rows, tokens, ones, *per_row, backend="triton")


def _logprobs(bench: Bench, count: int) -> Callable[[], object]:
    logits = _logits(bench, count)
    tokens = torch.arange(count, device=bench.device)
    return lambda: ops.token_logprobs(logits, tokens, 5, backend="triton")


TABLE = Table("sampler", "After the logits", rows)
