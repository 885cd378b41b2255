"""`DecodeGraphs`: decode steps captured once as CUDA graphs and replayed, so that the host launches one thing a step.

A graph is fixed in its shapes and in everything the host decides. So a step of N sequences runs in the graph of the
next larger size, padded with sequences of length 0 (slot -1: nothing is written), and kernels that are split by the
longest context are captured for lengths in powers of two. Inputs are copied into buffers that all graphs share. Graphs
are captured when they are first needed; they share one memory pool, so a step's logits are valid until the next step.

Knows batches and tensors; not which steps are decode steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from paged_backend.model.attention import AttentionMetadata
from paged_backend.model.cpu_decoder import Model

# Batches up to the largest are padded to the next of these; beyond it steps run eagerly.
GRAPH_SIZES = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16))
_SHORTEST_CONTEXT = 512

Step = Callable[[], torch.Tensor]


class DecodeGraphs:
    """Replays decode steps of up to `max_num_seqs` sequences.

    Args:
        model: a loaded decoder.
        kv_cache: as for `Decoder.forward`.
        max_num_seqs: sequences in one step at most.
        max_model_len: longest context in tokens.
        backend: attention backend.
        capture: makes a step that can be repeated from a function that runs it once.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: torch.Tensor,
        *,
        max_num_seqs: int,
        max_model_len: int,
        backend: str,
        capture: Callable[[Step], Step] | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._backend = backend
        self._max_model_len = max_model_len
        self._capture = capture or CudaCapture()
        self._sizes = [size for size in GRAPH_SIZES if size <= max_num_seqs]
        count, device = self._sizes[-1], kv_cache.device
        width = -(-max_model_len // kv_cache.shape[4])
        self._input_ids = torch.zeros(count, dtype=torch.int64, device=device)
        self._positions = torch.zeros(count, dtype=torch.int64, device=device)
        self._slots = torch.full((count,), -1, dtype=torch.int64, device=device)
        self._lens = torch.zeros(count, dtype=torch.int32, device=device)
        self._tables = torch.zeros(count, width, dtype=torch.int32, device=device)
        self._starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        self._steps: dict[tuple[int, int], Step] = {}

    def fits(self, num_seqs: int) -> bool:
        """Whether a decode step of so many sequences has a graph."""
        return 0 < num_seqs <= self._sizes[-1]

    def run(
        self,
        input_ids: np.ndarray,
        positions: np.ndarray,
        slot_mapping: np.ndarray,
        seq_lens: np.ndarray,
        block_tables: torch.Tensor,
    ) -> torch.Tensor:
        """Logits of a decode step: float32 [N, vocabulary], valid until the next one.

        Args:
            input_ids, positions, slot_mapping: int64 [N].
            seq_lens: int32 [N].
            block_tables: int32 [N, columns], on the device.
        """
        count, longest = len(input_ids), int(seq_lens.max())
        size = next(size for size in self._sizes if size >= count)
        for buffer, values, padding in (
            (self._input_ids, input_ids, 0),
            (self._positions, positions, 0),
            (self._slots, slot_mapping, -1),
            (self._lens, seq_lens, 0),
        ):
            buffer[:count].copy_(torch.from_numpy(values), non_blocking=True)
            buffer[count:size] = padding
        columns = min(block_tables.shape[1], self._tables.shape[1])
        self._tables[:count, :columns].copy_(block_tables[:, :columns])
        context = max(_SHORTEST_CONTEXT, 1 << (longest - 1).bit_length())
        key = size, min(context, self._max_model_len)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._capture(lambda: self._compute(*key))
        return step()[:count]

    def _compute(self, size: int, longest: int) -> torch.Tensor:
        metadata = AttentionMetadata(
            slot_mapping=self._slots[:size],
            block_tables=self._tables[:size],
            seq_lens=self._lens[:size],
            query_start_loc=self._starts[: size + 1],
            num_decodes=size,
            max_query_len=1,
            max_seq_len=longest,
            backend=self._backend,
        )
        hidden = self._model(self._input_ids[:size], self._positions[:size], self._kv_cache, metadata)
        return self._model.compute_logits(hidden)


class CudaCapture:
    """Captures steps as CUDA graphs in one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Run `step` once, so that nothing is compiled or allocated for the first time while it is captured, then
        capture it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
