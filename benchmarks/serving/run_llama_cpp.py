"""llama.cpp (`llama-cpp-python`) over its low-level interface: a continuous batcher like its server's.

One KV slot per sequence (`kv_unified` off), float16 KV (its default; it has no float32 path as fast), greedy choice. A
batch holds one token of every sequence that generates and fills up with prompts; llama.cpp computes it in pieces. A
common prefix is computed once and copied into each slot.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version

import llama_cpp
import numpy as np

from benchmarks.serving.drive import drive
from benchmarks.serving.protocol import Options, serve
from benchmarks.serving.stats import Timeline
from benchmarks.serving.workload import Item, Plan

BATCH_TOKENS = 512
_WARNING = 3
# A slot's context is a multiple of this.
_CONTEXT_STEP = 256


@llama_cpp.llama_log_callback
def _log(level: int, text: bytes, _data: object) -> None:
    """Warnings and errors; by default thousands of lines of debugging come with every context."""
    if _WARNING <= level <= _WARNING + 1:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


@dataclass
class _Slot:
    """A sequence: what is to be computed next (`pending`), and how many tokens its cache holds."""

    index: int
    pending: list[int]
    left: int
    length: int = 0


class LlamaCppRunner:
    """See `protocol.Runner`. `options.model` is a GGUF file of the wanted type."""

    def __init__(self, options: Options) -> None:
        llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(options.model.encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {options.model}")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads = options.threads
        self._context = None
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}

    def run(self, plan: Plan) -> list[Timeline]:
        self._open(plan)
        if plan.prefix:
            # The last slot keeps the prefix.
            self._free, self._prefix = deque([plan.concurrency]), 0
            drive(self, Plan([Item(0.0, plan.prefix, 1)], 1))
        self._prefix, self._home = len(plan.prefix), plan.concurrency
        self._free = deque(range(plan.concurrency))
        return drive(self, plan)

    def extras(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._close_context()
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_model_free(self._model)

    def add(self, index: int, item: Item) -> None:
        slot = self._free.popleft()
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_seq_rm(memory, slot, -1, -1)
        if self._prefix:
            llama_cpp.llama_memory_seq_cp(memory, self._home, slot, -1, -1)
        self._running[slot] = _Slot(index, list(item.prompt[self._prefix :]), item.output_tokens, self._prefix)

    def step(self) -> Iterable[tuple[int, int]]:
        sampled = self._fill_batch()
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        return [(self._running[slot].index, self._take(slot, row)) for slot, row in sampled]

    def _open(self, plan: Plan) -> None:
        """A context with a slot for each sequence, and one for the prefix."""
        self._close_context()
        slots = plan.concurrency + (1 if plan.prefix else 0)
        longest = max(len(item.prompt) + item.output_tokens for item in plan.items)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_seq_max = slots
        parameters.n_ctx = slots * -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP
        parameters.n_batch = parameters.n_ubatch = BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {parameters.n_ctx} tokens in {slots} slots")
        self._running: dict[int, _Slot] = {}

    def _close_context(self) -> None:
        if self._context:
            llama_cpp.llama_free(self._context)
            self._context = None

    def _fill_batch(self) -> list[tuple[int, int]]:
        """Sequences that generate first, then prompts in order of arrival; returns (slot, row) of those to sample."""
        batch, count, sampled = self._batch, 0, []
        for slot, state in sorted(self._running.items(), key=lambda pair: (len(pair[1].pending) > 1, pair[1].index)):
            taken = state.pending[: BATCH_TOKENS - count]
            state.pending = state.pending[len(taken) :]
            for token in taken:
                batch.token[count], batch.pos[count] = token, state.length
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = slot
                batch.logits[count] = 0
                state.length += 1
                count += 1
            if taken and not state.pending:
                batch.logits[count - 1] = 1
                sampled.append((slot, count - 1))
        batch.n_tokens = count
        return sampled

    def _take(self, slot: int, row: int) -> int:
        """Choose the sequence's next token; returns that there is one more."""
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        address = ctypes.addressof(logits.contents)
        values = np.frombuffer((ctypes.c_float * self._vocabulary).from_address(address), dtype=np.float32)
        state = self._running[slot]
        state.pending = [int(values.argmax())]
        state.left -= 1
        if not state.left:
            del self._running[slot]
            self._free.append(slot)
        return 1


if __name__ == "__main__":
    serve(LlamaCppRunner, __doc__)
