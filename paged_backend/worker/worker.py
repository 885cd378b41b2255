"""`Worker`: a model on a device with its KV cache; executes the scheduler's plans.

Decides what the configuration left open (device, number type, block size, number of blocks), loads the weights and
compiles the kernels before the first request. Knows plans and tensors; no requests, queues or text.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import time

import torch

from paged_backend.config import EngineConfig, ModelShape, kv_block_bytes
from paged_backend.errors import ConfigError
from paged_backend.model.config import read_model_config
from paged_backend.model.cpu_decoder import CpuDecoder, Model
from paged_backend.model.loader import load_model
from paged_backend.model_source import resolve_model
from paged_backend.sampling.sampler import warm_up as warm_up_sampling
from paged_backend.sched.output import SchedulerOutput, WorkerOutput
from paged_backend.worker.device import TORCH_DTYPES, resolve_backend, resolve_device, resolve_dtype, use_threads
from paged_backend.worker.kv_cache import (
    allocate_kv_cache,
    available_memory,
    cpu_budget,
    cuda_budget,
    fit_num_blocks,
)
from paged_backend.worker.model_runner import ModelRunner
from paged_backend.worker.profiling import (
    activation_estimate,
    activation_peak,
    recompute_seconds_per_token,
    run_dummy,
    swap_seconds_per_block,
)
from paged_kernels import ops

logger = logging.getLogger(__name__)

_BLOCK_SIZES = {"cpu": 16, "cuda": 64}


class Worker:
    """Loads the configured model and makes it ready to execute steps.

    Args:
        config: as the user wrote it; what is open in it is decided here.

    Attributes:
        shape: the model's dimensions; its sliding window only if sequences can exceed it.
        resolved: the configuration with nothing left open.
        num_host_blocks: usable blocks of the swap space.
        preemption_costs: measured seconds to recompute a token and to move a block to the host or back; 0.0 and 0.0
            where nothing depends on them.

    Raises:
        ConfigError: an argument does not fit this machine or model; memory errors say by how much.
        ModelLoadError, UnsupportedError: see `load_model`.
    """

    def __init__(self, config: EngineConfig) -> None:
        started = time.monotonic()
        source = resolve_model(config.model)
        self._device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, self._device)
        backend = resolve_backend(config.attention_backend, self._device, dtype)
        threads = use_threads(config)
        # Checked against the small files first: a wrong argument should not cost a load.
        read = read_model_config(source)
        partial = config.resolve(
            read.shape,
            device=self._device.type,
            dtype=dtype,
            num_kv_blocks=config.num_kv_blocks or 1,
            block_size=config.block_size or _BLOCK_SIZES[self._device.type],
        )
        partial = dataclasses.replace(partial, attention_backend=backend, num_threads=threads)
        assert partial.max_model_len, "resolve() sets it"
        self.shape: ModelShape = read.for_context(partial.max_model_len).shape
        torch_dtype = TORCH_DTYPES[dtype]
        decoder = load_model(source, dtype=torch_dtype, device=self._device, max_model_len=partial.max_model_len)
        native = backend == "cpu" and CpuDecoder.supports(decoder.config)
        model: Model = CpuDecoder(decoder, partial.max_num_batched_tokens) if native else decoder
        del decoder
        loaded = time.monotonic()
        _warm_up_kernels(model, partial, torch_dtype)
        self.resolved = self._with_blocks(config, partial, model)
        self.num_host_blocks = _host_blocks(self.resolved, self.shape)
        kv_cache = allocate_kv_cache(
            self.shape,
            self.resolved.num_kv_blocks,
            self.resolved.block_size,
            torch_dtype,
            self._device,
            self.resolved.populate_kv_cache,
        )
        run_dummy(model, kv_cache, num_tokens=2, num_seqs=1, backend=backend)
        if self._device.type == "cpu":
            warm_up_sampling()
        self.preemption_costs = (0.0, 0.0)
        if self.num_host_blocks and self.resolved.preemption_mode == "auto":
            self.preemption_costs = (
                recompute_seconds_per_token(model, kv_cache, self.resolved),
                swap_seconds_per_block(kv_cache),
            )
        self._runner: ModelRunner | None = ModelRunner(
            model,
            kv_cache,
            self.resolved.max_num_seqs,
            backend,
            self.num_host_blocks,
            enforce_eager=self.resolved.enforce_eager,
            max_model_len=self.resolved.max_model_len,
        )
        _log_facts(model, self.resolved, self.shape, self._activations, loaded - started, time.monotonic() - loaded)
        if self.num_host_blocks:
            _log_swap_space(self.num_host_blocks, self.preemption_costs, self.resolved, self.shape)

    def execute(self, plan: SchedulerOutput) -> WorkerOutput:
        """Run one step; see `ModelRunner.execute`."""
        if self._runner is None:
            raise ConfigError("the worker is closed")
        return self._runner.execute(plan)

    def close(self) -> None:
        """Release weights and cache; further steps are refused. May be called again."""
        if self._runner is None:
            return
        self._runner = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _with_blocks(self, config: EngineConfig, partial: EngineConfig, model: Model) -> EngineConfig:
        """Fix the number of blocks: as configured, or as memory allows."""
        if self._device.type == "cuda":
            self._activations = activation_peak(model, partial)
            free, total = torch.cuda.mem_get_info(self._device)
            if config.num_kv_blocks is not None:
                return partial
            budget, source = cuda_budget(partial, total=total, used=total - free, peak=self._activations)
        else:
            self._activations = activation_estimate(model, partial)
            available = available_memory()
            if config.num_kv_blocks is not None:
                _check_fits(config.num_kv_blocks, partial, self.shape, available)
                return partial
            budget, source = cpu_budget(partial, available)
        return dataclasses.replace(partial, num_kv_blocks=fit_num_blocks(partial, self.shape, budget, source))


def check_model(config: EngineConfig) -> None:
    """Read the model's own configuration, so that a model which cannot be served is told before anything is loaded.

    Raises:
        ModelLoadError, UnsupportedError: the model is missing, or not one that can be served.
    """
    read_model_config(resolve_model(config.model))


def _check_fits(num_kv_blocks: int, config: EngineConfig, shape: ModelShape, available: int) -> None:
    needed = (num_kv_blocks + 1) * kv_block_bytes(shape, config.block_size, config.dtype)
    if needed > available:
        raise ConfigError(
            f"`num_kv_blocks` = {num_kv_blocks} needs {needed / 2**20:.1f} MiB, {(needed - available) / 2**20:.1f} "
            "MiB more than is available",
            field="num_kv_blocks",
        )


def _host_blocks(config: EngineConfig, shape: ModelShape) -> int:
    """Blocks of the swap space.

    Raises:
        ConfigError: there is not that much memory.
    """
    size = int(config.swap_space * 2**30)
    # Beside the cache, where that is in the same memory: neither is taken before it is used.
    taken = 0
    if config.device == "cpu":
        taken = (config.num_kv_blocks + 1) * kv_block_bytes(shape, config.block_size, config.dtype)
    left = max(0, available_memory() - taken)
    if size > left:
        raise ConfigError(
            f"`swap_space` = {config.swap_space:g} GiB is {(size - left) / 2**20:.1f} MiB more than the available "
            f"memory of {left / 2**20:.1f} MiB",
            field="swap_space",
        )
    return size // kv_block_bytes(shape, config.block_size, config.dtype)


def _warm_up_kernels(model: Model, config: EngineConfig, dtype: torch.dtype) -> None:
    ops.warmup(
        num_q_heads=model.config.num_heads,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        block_size=config.block_size,
        dtype=dtype,
        backend=config.attention_backend,
        window=model.config.sliding_window,
    )


def _log_facts(
    model: Model, config: EngineConfig, shape: ModelShape, activations: int, load_s: float, prepare_s: float
) -> None:
    weights = model.num_bytes
    blocks = config.num_kv_blocks
    tokens = blocks * config.block_size
    cache = (blocks + 1) * kv_block_bytes(shape, config.block_size, config.dtype)
    logger.info(
        "%s: %.1f MiB of %s weights on %s, loaded in %.1f s; activations of up to %.1f MiB; KV cache of %d blocks x %d "
        "tokens = %d tokens, %.1f MiB, room for %.1f requests of %d tokens; attention backend %s, %d threads, prepared "
        "in %.1f s",
        config.model, weights / 2**20, config.dtype, config.device, load_s, activations / 2**20, blocks,
        config.block_size, tokens, cache / 2**20, tokens / config.max_model_len, config.max_model_len,
        config.attention_backend, config.num_threads, prepare_s,
    )  # fmt: skip


def _log_swap_space(blocks: int, costs: tuple[float, float], config: EngineConfig, shape: ModelShape) -> None:
    size = blocks * kv_block_bytes(shape, config.block_size, config.dtype)
    logger.info("swap space of %d blocks, %.1f MiB; preemption mode %s", blocks, size / 2**20, config.preemption_mode)
    if config.preemption_mode == "auto":
        logger.info("recomputing takes %.3f ms a token, swapping %.3f ms a block and way", *(1e3 * c for c in costs))
