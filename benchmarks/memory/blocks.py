"""Experiments with blocks: sharing, block size, swapping against recomputing (paper, 6.3, 7.2, 7.3)."""

from __future__ import annotations

from typing import Any

from benchmarks.memory.cost import A100_13B, StepCost
from benchmarks.memory.load import BACKLOG, NAMES, SEED
from benchmarks.memory.report import Experiment, Table, percent
from benchmarks.memory.systems import PAGED, Paged, build
from benchmarks.memory.workload import make_jobs

WIDTHS = (2, 4, 6)
PAPER_SHARING = {
    ("parallel sampling", "alpaca_like"): "6.1-9.8 %",
    ("parallel sampling", "sharegpt_like"): "16.2-30.5 %",
    ("beam search", "alpaca_like"): "37.6-55.2 %",
    ("beam search", "sharegpt_like"): "44.3-66.3 %",
}
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# About 90 % of what block size 16 sustains.
LOADS = {"sharegpt_like": 2.3, "alpaca_like": 53.0}
# More than the pool can take: every run preempts.
PREEMPTING_LOAD = 3.0
SWAP_BLOCK_SIZES = (1, 4, 16, 64, 256)
# Name -> preemption mode and whether copies are made by run of blocks.
MODES = {
    "recompute": ("recompute", True),
    "swap, copy per block": ("swap", False),
    "swap, copy per run": ("swap", True),
    "auto": ("auto", True),
}
PREEMPTED_TOKENS = 256


def shared_blocks(kind: str, trace: str, width: int, count: int) -> dict[str, float]:
    """Blocks saved by sharing, copies made, and integrity checked at the end."""
    field = "beam_width" if kind == "beam search" else "num_sequences"
    simulation = build(PAGED)
    simulation.whole_run = True
    outcome = simulation.run(make_jobs(trace, count, BACKLOG, SEED, **{field: width}))
    simulation.scheduler.check_integrity()
    return {"saved": outcome.memory.saved_by_sharing, "copies": outcome.num_copies / count}


def sharing(scale: float) -> Experiment:
    """Memory saved by sharing blocks among the outputs of a request."""
    counts = {"alpaca_like": max(24, int(80 * scale)), "sharegpt_like": max(8, int(24 * scale))}
    runs = [(kind, trace, width, counts[trace]) for kind, trace in PAPER_SHARING for width in WIDTHS]

    def assemble(results: list[Any]) -> Table:
        rows = []
        for i, (kind, trace) in enumerate(PAPER_SHARING):
            found = results[len(WIDTHS) * i : len(WIDTHS) * (i + 1)]
            saved = [percent(item["saved"]) for item in found]
            copies = "/".join(f"{item['copies']:.0f}" for item in found)
            rows.append([kind, NAMES[trace], *saved, PAPER_SHARING[kind, trace], copies])
        return Table(
            "sharing",
            "3. Blocks saved by sharing, of those needed without",
            ["decoding", "trace", *(f"{width} outputs" for width in WIDTHS), "paper, 2-6", "copies per request"],
            rows,
            [
                "Real forks, copies on write and releases. All outputs of a request have the length of the trace's.",
                "Parallel sampling shares the prompt alone: the more, the longer prompts are beside outputs. The "
                "synthetic ShareGPT-like prompts have a heavier tail than the paper's seem to have.",
                "Beams have made-up probabilities, drawn independently: rivals die sooner than those of a model, whose "
                "beams resemble each other, so more is shared, most of all in long outputs.",
            ],
            {f"{kind} {trace} {width}": item for (kind, trace, width, _), item in zip(runs, results, strict=True)},
        )

    return Experiment([(shared_blocks, run) for run in reversed(runs)], lambda results: assemble(results[::-1]))


def at_block_size(trace: str, block_size: int, count: int) -> dict[str, float]:
    """Latency and waste at a fixed load."""
    outcome = build(PAGED, Paged(block_size=block_size)).run(make_jobs(trace, count, LOADS[trace], SEED))
    return {
        "latency": outcome.normalised_latency,
        "waste": outcome.memory.empty_in_allocated,
        "batched": outcome.memory.mean_running,
    }


def block_sizes(scale: float) -> Experiment:
    """The block size's effect on latency and on waste."""
    counts = {"sharegpt_like": max(60, int(250 * scale)), "alpaca_like": max(200, int(900 * scale))}
    runs = [(trace, size, counts[trace]) for trace in counts for size in BLOCK_SIZES]

    def assemble(results: list[Any]) -> Table:
        found = {run[:2]: result for run, result in zip(runs, results, strict=True)}
        rows = []
        for size in BLOCK_SIZES:
            row: list[Any] = [str(size)]
            for trace in counts:
                row += [f"{1e3 * found[trace, size]['latency']:.0f}", percent(found[trace, size]["waste"])]
            rows.append(row)
        columns = [f"{NAMES[trace]}: {what}" for trace in counts for what in ("ms/token", "waste")]
        return Table(
            "block_sizes",
            f"5. Block size, at {LOADS['sharegpt_like']:g} (ShareGPT-like) and {LOADS['alpaca_like']:g} requests/s",
            ["block size", *columns],
            rows,
            [
                "waste: allocated slots that hold no token. The paper finds 16 to 128 best for ShareGPT and 16 to 32 "
                "for Alpaca (figure 18b); here Alpaca's waste grows as there, but hurts only once the pool is full.",
                f"That small blocks are slow to read is an assumption of the clock: each costs as much as "
                f"{A100_13B.tokens_per_block_lookup:g} more tokens.",
            ],
            {f"{trace} {size}": item for (trace, size), item in found.items()},
        )

    return Experiment([(at_block_size, run) for run in runs], assemble)


def preempting(mode: str, block_size: int, count: int) -> dict[str, float]:
    """Latency under more load than the pool takes."""
    preemption_mode, by_run = MODES[mode]
    paged = Paged(block_size=block_size, preemption_mode=preemption_mode, copies_by_run=by_run)
    simulation = build(PAGED, paged)
    outcome = simulation.run(make_jobs("sharegpt_like", count, PREEMPTING_LOAD, SEED))
    return {
        "latency": outcome.normalised_latency,
        "preemptions": outcome.num_preemptions,
        "swapped": simulation.scheduler.num_swapped_out,
    }


def _overheads(block_size: int) -> list[float]:
    """Milliseconds to lose and regain `PREEMPTED_TOKENS` tokens: recomputed, and swapped in both manners."""
    blocks = range(1, 1 + -(-PREEMPTED_TOKENS // block_size))
    swaps = [2 * StepCost(block_size=block_size, copies_by_run=by_run).swap_seconds(blocks) for by_run in (False, True)]
    return [1e3 * seconds for seconds in (StepCost().recompute_seconds(PREEMPTED_TOKENS), *swaps)]


def preemption(scale: float) -> Experiment:
    """Swapping against recomputing."""
    count = max(60, int(200 * scale))
    runs = [(mode, size, count) for size in SWAP_BLOCK_SIZES for mode in MODES]

    def assemble(results: list[Any]) -> Table:
        found = {run[:2]: result for run, result in zip(runs, results, strict=True)}
        rows = []
        for size in SWAP_BLOCK_SIZES:
            latencies = [f"{1e3 * found[mode, size]['latency']:.0f}" for mode in MODES]
            overheads = "/".join(f"{value:.0f}" for value in _overheads(size))
            rows.append([str(size), overheads, *latencies, str(found["recompute", size]["preemptions"])])
        return Table(
            "preemption",
            f"6. Swapping against recomputing (ShareGPT-like, {PREEMPTING_LOAD:g} requests/s)",
            [
                "block size",
                f"ms per {PREEMPTED_TOKENS} tokens",
                *(f"{mode}: ms/token" for mode in MODES),
                "preemptions",
            ],
            rows,
            [
                f"ms per {PREEMPTED_TOKENS} tokens: recomputing / swapping out and in with a copy per block, as the "
                "paper's system does / with a copy per run of consecutive host blocks, as this project's worker does, "
                "if there is one run.",
                "The paper (figure 19): swapping is slow with small blocks, both are alike from 16 to 64, and "
                "recomputing never costs more than 1.2 times as much. A copy per run helps as long as the free host "
                "blocks are not in pieces; with small blocks they soon are. Swaps hold up the step here.",
            ],
            {
                "runs": {f"{mode} {size}": item for (mode, size), item in found.items()},
                "overhead_ms": {str(size): _overheads(size) for size in BLOCK_SIZES},
            },
        )

    return Experiment([(preempting, run) for run in runs], assemble)
