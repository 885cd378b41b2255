"""Trial runs of a loaded model: what the largest step takes in memory, and what recomputing and swapping cost in time.

Knows models and tensors; the numbers are used elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from paged_backend.config import EngineConfig
from paged_backend.model.attention import AttentionMetadata
from paged_backend.model.cpu_decoder import Model
from paged_backend.sampling.logprobs import token_logprobs
from paged_backend.sampling.sampler import SamplingBatch, sample
from paged_backend.worker.block_copy import HostPool
from paged_backend.worker.kv_cache import allocate_kv_cache

# Tokens and blocks of a timed trial: enough to be typical, few enough to start soon.
_TRIAL_TOKENS = {"cpu": 48, "cuda": 512}
_TRIAL_BLOCKS = 8


def activation_peak(model: Model, config: EngineConfig) -> int:
    """Bytes the largest step takes beside weights and cache, measured on a GPU."""
    tiny = allocate_kv_cache(model.config.shape, 1, config.block_size, model.dtype, model.device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    logits = run_dummy(
        model,
        tiny.zero_(),  # sampling refuses the NaN that uninitialised memory could lead to
        num_tokens=config.max_num_batched_tokens,
        num_seqs=config.max_num_seqs,
        backend=config.attention_backend,
    )
    tokens = sample(logits, _costliest_sampling(len(logits)))
    token_logprobs(logits, tokens, config.max_logprobs)
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device) - before
    torch.cuda.empty_cache()
    return peak


def activation_estimate(model: Model, config: EngineConfig) -> int:
    """Bytes the largest step takes beside weights and cache on a CPU, where nobody counts them: the tensors alive at
    once in the widest place, which is the feed-forward part of a layer or the logits."""
    dims, itemsize = model.config, model.dtype.itemsize
    tokens, rows = config.max_num_batched_tokens, config.max_num_seqs
    # The residual, its norm and the output; gate and up in one matrix, and their product.
    feed_forward = tokens * (3 * dims.hidden_size + 3 * dims.intermediate_size) * itemsize
    # Logits as computed, in float32, and a working copy of the sampler's.
    logits = tokens * dims.hidden_size * itemsize + rows * dims.vocab_size * (itemsize + 4 + 4)
    return max(feed_forward, logits)


def recompute_seconds_per_token(model: Model, kv_cache: torch.Tensor, config: EngineConfig) -> float:
    """Measured time of a prefill per token; the cache is not changed."""
    count = min(_TRIAL_TOKENS[kv_cache.device.type], config.max_num_batched_tokens)

    def prefill() -> None:
        run_dummy(model, kv_cache, num_tokens=count, num_seqs=1, backend=config.attention_backend)

    return _seconds(prefill, kv_cache.device) / count


def swap_seconds_per_block(kv_cache: torch.Tensor) -> float:
    """Measured time of moving a block to the host or back; the cache keeps its contents."""
    count = min(_TRIAL_BLOCKS, kv_cache.shape[2] - 1)
    pool = HostPool(kv_cache, count)
    pairs = [(block_id, block_id) for block_id in range(1, count + 1)]
    pool.swap_out(pairs)

    def there_and_back() -> None:
        pool.swap_out(pairs)
        pool.swap_in(pairs)

    return _seconds(there_and_back, kv_cache.device) / (2 * count)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """The shorter of two runs' times, after one that is not counted."""
    times = []
    for _ in range(3):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()  # not inference mode: what a model allocates here it may use again
def run_dummy(model: Model, kv_cache: torch.Tensor, *, num_tokens: int, num_seqs: int, backend: str) -> torch.Tensor:
    """Logits of a step of `num_tokens` tokens and `num_seqs` sampled rows, which writes nothing into the cache.

    All of them read the first block (the null block), so sequences are cut to what a block holds.
    """
    device, block_size = kv_cache.device, kv_cache.shape[4]
    num_seqs = max(num_seqs, -(-num_tokens // block_size))
    lengths = [num_tokens // num_seqs + (i < num_tokens % num_seqs) for i in range(num_seqs)]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.zeros(num_seqs + 1, dtype=torch.int32, device=device)
    starts[1:] = seq_lens.cumsum(0)
    metadata = AttentionMetadata(
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        block_tables=torch.zeros(num_seqs, 1, dtype=torch.int32, device=device),
        seq_lens=seq_lens,
        query_start_loc=starts,
        num_decodes=0,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        backend=backend,
    )
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    hidden = model(ids, ids, kv_cache, metadata)
    return model.compute_logits(hidden[:num_seqs])


def _costliest_sampling(rows: int) -> SamplingBatch:
    """Parameters that take the sampler's widest paths: a small k would spare it most of the vocabulary."""
    return SamplingBatch(
        greedy=np.zeros(rows, dtype=bool),
        temperature=np.ones(rows, dtype=np.float32),
        top_k=np.zeros(rows, dtype=np.int64),
        top_p=np.full(rows, 0.9, dtype=np.float32),
        min_p=np.full(rows, 0.01, dtype=np.float32),
        seeds=np.zeros(rows, dtype=np.uint64),
        positions=np.zeros(rows, dtype=np.int64),
    )
