"""Where a step of the CPU decoder goes, kernel by kernel, beside what reading its weights must take.

    python benchmarks/cpu_step.py [--dtype bfloat16] [--tokens 1 8 64] [--context 256]

Times the whole step as the engine runs it, then each kind of call by itself (all layers' calls of that kind in one
program). Their sum may differ from the step: caches are warmer, and nothing waits for the kernel before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
# `python benchmarks/cpu_step.py` puts only this file's folder on the path.
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from paged_backend.model.attention import AttentionMetadata  # noqa: E402
from paged_backend.model.cpu_decoder import CpuDecoder  # noqa: E402
from paged_backend.model.loader import load_model  # noqa: E402
from paged_backend.model_source import DEMO_MODEL, resolve_model  # noqa: E402
from paged_backend.worker.kv_cache import allocate_kv_cache  # noqa: E402

BLOCK_SIZE = 16
NAMES = ("embed", "norm", "qkv", "split", "decode", "prefill", "output", "gate_up", "down")


def decode_batch(sequences: int, context: int) -> AttentionMetadata:
    """`sequences` of `context` tokens, each about to compute its last one, on blocks scattered over the cache."""
    width = -(-context // BLOCK_SIZE)
    tables = 1 + torch.randperm(sequences * width).view(sequences, width).int()
    last = (context - 1) % BLOCK_SIZE
    return AttentionMetadata(
        slot_mapping=tables[:, -1].long() * BLOCK_SIZE + last,
        block_tables=tables,
        seq_lens=torch.full((sequences,), context, dtype=torch.int32),
        query_start_loc=torch.arange(sequences + 1, dtype=torch.int32),
        num_decodes=sequences,
        max_query_len=1,
        max_seq_len=context,
        backend="cpu",
    )


def seconds(work, rounds: int) -> float:
    """Median time of a call."""
    work()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def time_calls(model: CpuDecoder, rounds: int) -> dict[str, float]:
    """Seconds of each kind of call in the step that ran last, by itself."""
    program, spent = model._program, {}
    items = program.items.copy()
    for name in NAMES:
        places = getattr(model, f"_{name}").places
        program.items[:] = 0
        program.items[places] = items[places]
        spent[name] = seconds(lambda: program.run(torch.get_num_threads()), rounds)
    program.items[:] = items
    return spent


def measure(model: CpuDecoder, sequences: int, context: int, rounds: int) -> None:
    """Print one table."""
    shape = model.config.shape
    cache = allocate_kv_cache(shape, sequences * -(-context // BLOCK_SIZE), BLOCK_SIZE, model.dtype, model.device)
    cache.normal_()
    metadata = decode_batch(sequences, context)
    ids = torch.randint(shape.vocab_size, (sequences,))
    positions = torch.full((sequences,), context - 1)
    step = seconds(lambda: model(ids, positions, cache, metadata), rounds)
    hidden = model(ids, positions, cache, metadata).clone()
    head = seconds(lambda: model.compute_logits(hidden), rounds)
    kv = 2 * sequences * context * shape.num_kv_heads * shape.head_dim * shape.num_layers * model.dtype.itemsize
    read = model.num_bytes - shape.vocab_size * model.config.hidden_size * model.dtype.itemsize + kv
    print(f"\n{sequences} sequences of {context} tokens: {1e3 * step:.2f} ms a step, layers and head; ", end="")
    print(f"reads {read / 2**20:.0f} MiB of weights and KV, {read / step / 1e9:.1f} GB/s")
    for name, spent in {**time_calls(model, rounds), "head": head}.items():
        print(f"  {name:8s} {1e3 * spent:8.3f} ms  {100 * spent / step:5.1f} %")


def main() -> None:
    """Print a table for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    parsed = parser.parse_args()
    source = resolve_model(DEMO_MODEL)
    decoder = load_model(source, dtype=getattr(torch, parsed.dtype), device="cpu", max_model_len=8192)
    model = CpuDecoder(decoder, max(512, *parsed.tokens))
    with torch.inference_mode():
        for tokens in parsed.tokens:
            measure(model, tokens, parsed.context, parsed.rounds)


if __name__ == "__main__":
    main()
