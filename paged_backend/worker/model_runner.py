"""`ModelRunner`: turns a step's plan into one ragged batch, runs the model and samples.

Order of the batch: sequences with a single new token first (decode rows, and prefill chunks that happen to be one
token), then longer chunks; the attention kernels rely on it. Logits are computed only for rows that sample.

         decode rows          chunks
    |  a  |  b  |  c  |  d d d d  |  e e e  |      tokens, T
    0     1     2     3           7        10      query_start_loc

Knows tensors and rows; not where blocks come from, nor what a request is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paged_backend.errors import PagedBackendError
from paged_backend.model.attention import AttentionMetadata
from paged_backend.model.decoder import Decoder
from paged_backend.sampling.sampler import sample
from paged_backend.sched.output import ScheduledSequence, SchedulerOutput, WorkerOutput
from paged_backend.worker.input_batch import InputBatch


@dataclass(slots=True)
class RaggedBatch:
    """A step's batch on the host: N sequences in the order of the kernels, T tokens.

    `seq_ids`, `rows` (of the input batch) and `samples` have N entries, `input_ids` and `positions` T; the others are
    as in `AttentionMetadata`.
    """

    seq_ids: list[int]
    rows: np.ndarray
    samples: np.ndarray
    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    num_decodes: int
    max_query_len: int


class ModelRunner:
    """Owns the rows, the model and the KV cache; one step at a time, from one thread.

    Args:
        model: a loaded decoder.
        kv_cache: [layers, 2, blocks, kv_heads, block_size, head_dim].
        max_num_seqs: rows.
        backend: attention backend, resolved.
    """

    def __init__(self, model: Decoder, kv_cache: torch.Tensor, max_num_seqs: int, backend: str) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._backend = backend
        self._device = kv_cache.device
        self._block_size = kv_cache.shape[4]
        self._input = InputBatch(max_num_seqs)
        self._tables = _BatchTables(self._device)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> WorkerOutput:
        """Apply the plan's differences, compute its tokens, sample where it says so.

        Raises:
            PagedBackendError: the plan contradicts the rows, or the model's output is broken.
        """
        self._apply(plan)
        if not plan.scheduled:
            return WorkerOutput([], [])
        batch = build_batch(plan.scheduled, self._input, self._block_size)
        hidden = self._forward(batch)
        chosen = np.flatnonzero(batch.samples)
        if not chosen.size:
            return WorkerOutput([], [])
        last = torch.from_numpy(batch.query_start_loc[1:][chosen].astype(np.int64) - 1).to(self._device)
        logits = self._model.compute_logits(hidden[last])
        rows = batch.rows[chosen]
        tokens = sample(logits, self._input.sampling(rows))
        self._input.append_tokens(rows, tokens)
        return WorkerOutput([batch.seq_ids[i] for i in chosen], tokens.tolist())

    def _apply(self, plan: SchedulerOutput) -> None:
        for seq_id in plan.removed:
            self._input.remove(seq_id)
        for new in plan.new:
            self._input.add(new)
        for seq_id, block_ids in plan.new_block_ids.items():
            self._input.append_blocks(seq_id, block_ids)

    def _forward(self, batch: RaggedBatch) -> torch.Tensor:
        max_seq_len = int(batch.seq_lens.max())
        metadata = AttentionMetadata(
            slot_mapping=self._to_device(batch.slot_mapping),
            block_tables=self._tables.gather(self._input, batch.rows, -(-max_seq_len // self._block_size)),
            seq_lens=self._to_device(batch.seq_lens),
            query_start_loc=self._to_device(batch.query_start_loc),
            num_decodes=batch.num_decodes,
            max_query_len=batch.max_query_len,
            max_seq_len=max_seq_len,
            backend=self._backend,
        )
        input_ids, positions = self._to_device(batch.input_ids), self._to_device(batch.positions)
        return self._model(input_ids, positions, self._kv_cache, metadata)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def build_batch(scheduled: list[ScheduledSequence], state: InputBatch, block_size: int) -> RaggedBatch:
    """Lay out a step's tokens.

    Raises:
        PagedBackendError: a planned range is empty, goes beyond the known tokens or the block table, or its `samples`
            flag does not tell whether it reaches the last known token.
    """
    count = len(scheduled)
    lengths = np.fromiter((s.num_new_tokens for s in scheduled), dtype=np.int64, count=count)
    # Stable, so that rows of a kind keep their scheduling order, and steady decoding keeps the order of last step.
    order = np.argsort(lengths != 1, kind="stable")
    ordered = [scheduled[i] for i in order]
    lengths = lengths[order]
    rows = np.fromiter((state.row(s.seq_id) for s in ordered), dtype=np.int64, count=count)
    computed = np.fromiter((s.num_computed_tokens for s in ordered), dtype=np.int64, count=count)
    samples = np.fromiter((s.samples for s in ordered), dtype=bool, count=count)
    seq_lens = computed + lengths
    _check_plan(ordered, lengths, seq_lens, samples, state.num_tokens[rows], state.num_blocks[rows] * block_size)

    starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    token_rows = np.repeat(rows, lengths)
    positions = np.arange(starts[-1], dtype=np.int64) + np.repeat(computed - starts[:-1], lengths)
    blocks = state.block_tables[token_rows, positions // block_size].astype(np.int64)
    return RaggedBatch(
        seq_ids=[s.seq_id for s in ordered],
        rows=rows,
        samples=samples,
        input_ids=state.token_ids[token_rows, positions].astype(np.int64),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        seq_lens=seq_lens.astype(np.int32),
        query_start_loc=starts.astype(np.int32),
        num_decodes=int(np.count_nonzero(lengths == 1)),
        max_query_len=int(lengths.max()),
    )


def _check_plan(
    ordered: list[ScheduledSequence],
    lengths: np.ndarray,
    seq_lens: np.ndarray,
    samples: np.ndarray,
    known: np.ndarray,
    capacity: np.ndarray,
) -> None:
    """A plan that breaks these rules would read or write another sequence's cache."""
    wrong = (lengths < 1) | (seq_lens > known) | (seq_lens > capacity) | (samples != (seq_lens == known))
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise PagedBackendError(
            f"the step's plan does not fit the worker's rows: {ordered[i]} with {known[i]} known tokens and "
            f"{capacity[i]} slots"
        )


class _BatchTables:
    """Block tables in batch order on the device, patched where they changed; gathered anew when the batch changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows = np.empty(0, dtype=np.int64)
        self._host = np.empty((0, 0), dtype=np.int32)
        self._tensor = torch.empty(0, 0, dtype=torch.int32, device=device)

    def gather(self, state: InputBatch, rows: np.ndarray, width: int) -> torch.Tensor:
        """int32 [N, at least width] block tables of `rows`; valid until the next call."""
        same = width <= self._host.shape[1] and np.array_equal(rows, self._rows)
        if same:
            changed = [i for i, row in enumerate(rows.tolist()) if row in state.changed_tables]
            for i in changed:
                self._host[i] = state.block_tables[rows[i], : self._host.shape[1]]
        else:
            # All columns in use by anyone would do; a little slack saves gathering anew at every added block.
            columns = min(state.block_tables.shape[1], width + 8)
            self._rows, self._host = rows, state.block_tables[rows, :columns]
        if not same or (changed and self._device.type != "cpu"):
            self._tensor = torch.from_numpy(self._host).to(self._device)
        state.clear_changes()
        return self._tensor
