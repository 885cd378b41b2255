"""How much the host's split rule gives away: its choice against the best of all splits tried."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Result, Row, Table
from benchmarks.gpu.pool import paged_batch
from paged_kernels.arguments import Options
from paged_kernels.decode_attention import decode_attention
from paged_kernels.split_rule import MAX_SPLITS, choose_splits
from paged_kernels.triton_dispatch import device_of

_TRIED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def rows(bench: Bench) -> Iterator[Row]:
    page = bench.sizes.pages[0]
    for name, *heads in bench.sizes.heads[:2]:
        for context in bench.sizes.contexts:
            for batch in bench.sizes.batches:
                yield f"{name} | {batch} x {context}", lambda h=heads, c=context, b=batch: _regret(bench, h, page, c, b)


def _regret(bench: Bench, heads: Any, page: int, context: int, count: int) -> Result:
    batch = paged_batch(bench, tuple(heads), page, [context] * count, [1] * count)
    if batch is None:
        return {"skipped": "larger than the pool"}
    capability, multiprocessors = device_of(bench.device)
    group = heads[0] // heads[1]
    rule = choose_splits(count, heads[1], context, multiprocessors, total_seq_len=count * context, rows=group)
    names = ("query", "k_cache", "v_cache", "block_tables", "seq_lens")
    out = torch.empty_like(batch["query"])

    arguments = [batch[name] for name in names]
    common = {"scale": batch["scale"], "max_query_len": 1, "max_seq_len": context, "options": Options()}

    def run(splits: int) -> float:
        return bench.seconds(
            lambda: decode_attention(*arguments, None, splits=splits, capability=capability, out=out, **common)
        )

    # No more than a split per 128 tokens: half of what the rule allows.
    tried = [s for s in _TRIED if s <= min(MAX_SPLITS, max(1, context // 128))]
    times = {splits: run(splits) for splits in {*tried, rule}}
    best = min(times, key=lambda splits: times[splits])
    return {
        "rule": rule, "best": best, "rule us": times[rule] * 1e6, "best us": times[best] * 1e6,
        "regret %": 100 * (times[rule] / times[best] - 1),
    }  # fmt: skip


TABLE = Table("splits", "Regret of the split rule", rows)
