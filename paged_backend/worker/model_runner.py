"""`ModelRunner`: turns a step's plan into one ragged batch, runs the model and samples.

Order of the batch: sequences with a single new token first (decode rows, and prefill chunks that happen to be one
token), then longer chunks; the attention kernels rely on it. Logits are computed only for rows that sample; the
siblings of a shared prompt sample from one row of them.

         decode rows          chunks
    |  a  |  b  |  c  |  d d d d  |  e e e  |      tokens, T
    0     1     2     3           7        10      query_start_loc

Knows tensors and rows; not where blocks come from, nor what a request is.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import torch

from paged_backend.errors import PagedBackendError
from paged_backend.model.attention import AttentionMetadata
from paged_backend.model.cpu_decoder import CpuDecoder, Model
from paged_backend.sched.output import ScheduledSequence, SchedulerOutput, TokenLogprobs, WorkerOutput
from paged_backend.worker.block_copy import HostPool, copy_blocks
from paged_backend.worker.decode_graphs import DecodeGraphs
from paged_backend.worker.input_batch import InputBatch
from paged_backend.worker.prompt_logprobs import prompt_logprobs
from paged_backend.worker.token_choice import choose_tokens


@dataclass(slots=True)
class RaggedBatch:
    """A step's batch on the host: N sequences in the order of the kernels, T tokens.

    `rows` (of the input batch) has N entries, `input_ids` and `positions` T; the others are as in `AttentionMetadata`.
    `sampled_ids`, `sampled_rows` and `sampled_from` say which sequences sample, from the logits of which of the N;
    `is_plain_decode`: each has one token and samples for itself.
    """

    rows: np.ndarray
    sampled_ids: list[int]
    sampled_rows: np.ndarray
    sampled_from: np.ndarray
    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    total_seq_len: int
    is_plain_decode: bool


class ModelRunner:
    """Owns the rows, the model and the KV cache; one step at a time, from one thread.

    Args:
        model: a loaded decoder.
        kv_cache: [layers, 2, blocks, kv_heads, block_size, head_dim].
        max_num_seqs: rows.
        backend: attention backend, resolved.
        num_host_blocks: blocks of host memory to swap to.
        enforce_eager: on a GPU, launch decode steps kernel by kernel rather than as CUDA graphs.
        max_model_len: longest sequence in tokens, which graphs must know; None: the model's context length.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: torch.Tensor,
        max_num_seqs: int,
        backend: str,
        num_host_blocks: int = 0,
        *,
        enforce_eager: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._backend = backend
        self._device, self._is_cpu = kv_cache.device, kv_cache.is_cpu
        self._block_size = kv_cache.shape[4]
        self._input = InputBatch(max_num_seqs)
        self._tables = _BatchTables(self._device)
        # Native kernels record no gradients, and entering the mode costs as much as a tenth of a step's other Python.
        self._mode = contextlib.nullcontext if isinstance(model, CpuDecoder) else torch.inference_mode
        self._host_pool = HostPool(kv_cache, num_host_blocks)
        self._graphs: DecodeGraphs | None = None
        if self._device.type == "cuda" and not enforce_eager:
            self._graphs = DecodeGraphs(
                model,
                kv_cache,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len or model.config.max_position,
                backend=backend,
            )

    def execute(self, plan: SchedulerOutput) -> WorkerOutput:
        """Apply the plan's differences, compute its tokens, sample where it says so.

        Raises:
            PagedBackendError: the plan contradicts the rows, or the model's output is broken.
        """
        with self._mode():
            return self._execute(plan)

    def _execute(self, plan: SchedulerOutput) -> WorkerOutput:
        self._apply(plan)
        if not plan.scheduled:
            return WorkerOutput([], [])
        batch = build_batch(plan.scheduled, self._input, self._block_size)
        if len(batch.input_ids) != plan.num_scheduled_tokens:
            raise PagedBackendError(
                f"the step's plan counts {plan.num_scheduled_tokens} tokens and holds {len(batch.input_ids)}"
            )
        if self._graphs is not None and batch.is_plain_decode and self._graphs.fits(len(batch.rows)):
            logits = self._replay(self._graphs, batch)
            return choose_tokens(logits, batch.sampled_ids, batch.sampled_rows, self._input, plan.token_masks)
        hidden = self._forward(batch)
        output = WorkerOutput([], [])
        if batch.sampled_ids:
            logits = self._logits(hidden, batch)
            output = choose_tokens(logits, batch.sampled_ids, batch.sampled_rows, self._input, plan.token_masks)
        if self._input.num_prompt_reporting:
            output.prompt_logprobs = self._prompt_logprobs(hidden, batch, plan)
        return output

    def _prompt_logprobs(
        self, hidden: torch.Tensor, batch: RaggedBatch, plan: SchedulerOutput
    ) -> dict[int, tuple[int, list[TokenLogprobs]]]:
        first = dict(zip(batch.rows.tolist(), batch.query_start_loc.tolist(), strict=False))
        first_token = {item.seq_id: first[self._input.row(item.seq_id)] for item in plan.scheduled}
        return prompt_logprobs(hidden, first_token, plan.scheduled, self._input, self._model.compute_logits)

    def _apply(self, plan: SchedulerOutput) -> None:
        """Apply the differences, in the order that `SchedulerOutput` documents."""
        if plan.swap_in and plan.swap_out:
            raise PagedBackendError("the step's plan swaps in and out at once")
        for seq_id in plan.removed:
            self._input.remove(seq_id)
        if plan.swap_out:
            self._host_pool.swap_out(plan.swap_out)
        if plan.swap_in:
            self._host_pool.swap_in(plan.swap_in)
        if plan.copies:
            copy_blocks(self._kv_cache, plan.copies)
        self._check_old_rows(plan)
        for new in plan.new:
            self._input.add(new)
        for seq_id, token_ids in plan.new_token_ids.items():
            self._input.extend_tokens(seq_id, token_ids)
        for seq_id, block_ids in plan.new_block_ids.items():
            self._input.append_blocks(seq_id, block_ids)
        for seq_id, entries in plan.replaced_block_ids.items():
            self._input.replace_blocks(seq_id, entries)
        for seq_id, count in plan.null_blocks.items():
            self._input.release_blocks(seq_id, count)

    @staticmethod
    def _check_old_rows(plan: SchedulerOutput) -> None:
        """A new row comes whole: differences to it would be applied twice."""
        changed = (plan.new_token_ids, plan.new_block_ids, plan.replaced_block_ids, plan.null_blocks)
        twice = [new.seq_id for new in plan.new if any(new.seq_id in changes for changes in changed)]
        if twice:
            raise PagedBackendError(f"the step's plan changes rows that it creates: {twice}")

    def _logits(self, hidden: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """Logits of each sampling sequence; the last layer runs once for those that share a row."""
        if batch.is_plain_decode:
            return self._model.compute_logits(hidden)
        sources, places = np.unique(batch.sampled_from, return_inverse=True)
        last = self._to_device(batch.query_start_loc[1:][sources].astype(np.int64) - 1)
        logits = self._model.compute_logits(hidden[last])
        return logits if len(sources) == len(places) else logits[self._to_device(places)]

    def _replay(self, graphs: DecodeGraphs, batch: RaggedBatch) -> torch.Tensor:
        tables = self._tables.gather(self._input, batch.rows, -(-batch.max_seq_len // self._block_size))
        return graphs.run(batch.input_ids, batch.positions, batch.slot_mapping, batch.seq_lens, tables)

    def _forward(self, batch: RaggedBatch) -> torch.Tensor:
        metadata = AttentionMetadata(
            slot_mapping=self._to_device(batch.slot_mapping),
            block_tables=self._tables.gather(self._input, batch.rows, -(-batch.max_seq_len // self._block_size)),
            seq_lens=self._to_device(batch.seq_lens),
            query_start_loc=self._to_device(batch.query_start_loc),
            num_decodes=batch.num_decodes,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            backend=self._backend,
            total_seq_len=batch.total_seq_len,
        )
        input_ids, positions = self._to_device(batch.input_ids), self._to_device(batch.positions)
        return self._model(input_ids, positions, self._kv_cache, metadata)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._is_cpu else tensor.to(self._device, non_blocking=True)


def build_batch(scheduled: list[ScheduledSequence], state: InputBatch, block_size: int) -> RaggedBatch:
    """Lay out a step's tokens.

    Raises:
        PagedBackendError: a planned range is empty, goes beyond the known tokens or the block table or into the null
            block; a sequence comes twice; `samples` does not tell whether the range reaches the last known token, or
            names a sibling with other tokens.
    """
    count = len(scheduled)
    num_decodes = sum(s.num_new_tokens == 1 for s in scheduled)
    if num_decodes < count:
        # Stable, so that rows of a kind keep their scheduling order, and steady decoding keeps the order of last step.
        scheduled = sorted(scheduled, key=lambda s: s.num_new_tokens != 1)
    rows = np.array([state.row(s.seq_id) for s in scheduled], dtype=np.int64)
    seq_lens = _checked_lengths(scheduled, rows, state, block_size)
    sampled_ids = [seq_id for s in scheduled for seq_id in s.samples]
    sampled_rows, sampled_from = rows, np.arange(count)
    samples_once = all(len(s.samples) == 1 for s in scheduled)
    if not samples_once:
        sampled_rows = np.array([state.row(seq_id) for seq_id in sampled_ids], dtype=np.int64)
        sampled_from = np.repeat(sampled_from, [len(s.samples) for s in scheduled])
        _check_samples(scheduled, rows, sampled_rows, sampled_from, state)

    positions = np.array([s.num_computed_tokens for s in scheduled], dtype=np.int64)
    starts, token_rows = np.arange(count + 1), rows
    if num_decodes < count:
        lengths = [s.num_new_tokens for s in scheduled]
        np.cumsum(lengths, out=starts[1:])
        token_rows = np.repeat(rows, lengths)
        positions = np.arange(starts[-1]) + np.repeat(positions - starts[:-1], lengths)
    columns, offsets = np.divmod(positions, block_size)
    blocks = state.block_tables[token_rows, columns].astype(np.int64)
    if np.count_nonzero(blocks) < len(blocks):
        raise PagedBackendError("the step's plan writes to the null block")
    return RaggedBatch(
        rows=rows,
        sampled_ids=sampled_ids,
        sampled_rows=sampled_rows,
        sampled_from=sampled_from,
        input_ids=state.token_ids[token_rows, positions].astype(np.int64),
        positions=positions,
        slot_mapping=blocks * block_size + offsets,
        seq_lens=np.array(seq_lens, dtype=np.int32),
        query_start_loc=starts.astype(np.int32),
        num_decodes=num_decodes,
        max_query_len=max(s.num_new_tokens for s in scheduled),
        max_seq_len=max(seq_lens),
        total_seq_len=sum(seq_lens),
        is_plain_decode=samples_once and num_decodes == count,
    )


def _checked_lengths(
    scheduled: list[ScheduledSequence], rows: np.ndarray, state: InputBatch, block_size: int
) -> list[int]:
    """Each sequence's length after the step. A plan that breaks these rules would read or write another's cache."""
    if len({s.seq_id for s in scheduled}) < len(scheduled):
        raise PagedBackendError(f"the step's plan computes a sequence twice: {scheduled}")
    lengths = []
    for s, known, blocks in zip(
        scheduled, state.num_tokens[rows].tolist(), state.num_blocks[rows].tolist(), strict=True
    ):
        length, slots = s.num_computed_tokens + s.num_new_tokens, blocks * block_size
        # Siblings sample where the sequence itself does.
        samples = s.seq_id in s.samples
        is_right = s.num_new_tokens >= 1 and length <= known and length <= slots
        if not is_right or samples != (length == known) or samples != bool(s.samples):
            raise PagedBackendError(
                f"the step's plan does not fit the worker's rows: {s} with {known} known tokens and {slots} slots"
            )
        lengths.append(length)
    return lengths


def _check_samples(
    scheduled: list[ScheduledSequence],
    rows: np.ndarray,
    sampled_rows: np.ndarray,
    sampled_from: np.ndarray,
    state: InputBatch,
) -> None:
    """Each sequence samples once, from the logits after its own tokens."""
    if len(np.unique(sampled_rows)) < len(sampled_rows):
        raise PagedBackendError(f"the step's plan samples a sequence twice: {scheduled}")
    for i in np.flatnonzero(sampled_rows != rows[sampled_from]):
        own, other = sampled_rows[i], rows[sampled_from[i]]
        count = state.num_tokens[other]
        same = state.num_tokens[own] == count and np.array_equal(
            state.token_ids[own, :count], state.token_ids[other, :count]
        )
        if not same:
            raise PagedBackendError(f"a sibling in {scheduled[sampled_from[i]]} has other tokens")


class _BatchTables:
    """Block tables in batch order on the device, patched where they changed; gathered anew when the batch changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[int] = []
        self._host = np.empty((0, 0), dtype=np.int32)
        self._tensor = torch.empty(0, 0, dtype=torch.int32, device=device)

    def gather(self, state: InputBatch, rows: np.ndarray, width: int) -> torch.Tensor:
        """int32 [N, at least width] block tables of `rows`; valid until the next call."""
        order, changed = rows.tolist(), []
        same = width <= self._host.shape[1] and order == self._rows
        if same:
            changed = [i for i, row in enumerate(order) if row in state.changed_tables] if state.changed_tables else []
            for i in changed:
                self._host[i] = state.block_tables[order[i], : self._host.shape[1]]
        else:
            # All columns in use by anyone would do; a little slack saves gathering anew at every added block.
            columns = min(state.block_tables.shape[1], width + 8)
            self._rows, self._host = order, state.block_tables[rows, :columns]
        if not same or (changed and self._device.type != "cpu"):
            self._tensor = torch.from_numpy(self._host).to(self._device)
        state.clear_changes()
        return self._tensor
