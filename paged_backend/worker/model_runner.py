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

from dataclasses import dataclass

import numpy as np
import torch

from paged_backend.errors import PagedBackendError
from paged_backend.model.attention import AttentionMetadata
from paged_backend.model.cpu_decoder import Model
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
    `sampled_ids`, `sampled_rows` and `sampled_from` say which sequences sample, from the logits of which of the N.
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
        self._device = kv_cache.device
        self._block_size = kv_cache.shape[4]
        self._input = InputBatch(max_num_seqs)
        self._tables = _BatchTables(self._device)
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
        if len(batch.input_ids) != plan.num_scheduled_tokens:
            raise PagedBackendError(
                f"the step's plan counts {plan.num_scheduled_tokens} tokens and holds {len(batch.input_ids)}"
            )
        if self._graphs is not None and self._graphs.fits(len(batch.rows)) and _is_plain_decode(batch):
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
        sources, places = np.unique(batch.sampled_from, return_inverse=True)
        last = self._to_device(batch.query_start_loc[1:][sources].astype(np.int64) - 1)
        logits = self._model.compute_logits(hidden[last])
        return logits if len(sources) == len(places) else logits[self._to_device(places)]

    def _replay(self, graphs: DecodeGraphs, batch: RaggedBatch) -> torch.Tensor:
        width = -(-int(batch.seq_lens.max()) // self._block_size)
        tables = self._tables.gather(self._input, batch.rows, width)
        return graphs.run(batch.input_ids, batch.positions, batch.slot_mapping, batch.seq_lens, tables)

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
            total_seq_len=int(batch.seq_lens.sum()),
        )
        input_ids, positions = self._to_device(batch.input_ids), self._to_device(batch.positions)
        return self._model(input_ids, positions, self._kv_cache, metadata)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _is_plain_decode(batch: RaggedBatch) -> bool:
    """One token of each sequence, and each samples for itself."""
    count = len(batch.rows)
    return batch.num_decodes == count and len(batch.sampled_from) == count


def build_batch(scheduled: list[ScheduledSequence], state: InputBatch, block_size: int) -> RaggedBatch:
    """Lay out a step's tokens.

    Raises:
        PagedBackendError: a planned range is empty, goes beyond the known tokens or the block table or into the null
            block; a sequence comes twice; `samples` does not tell whether the range reaches the last known token, or
            names a sibling with other tokens.
    """
    count = len(scheduled)
    lengths = np.fromiter((s.num_new_tokens for s in scheduled), dtype=np.int64, count=count)
    # Stable, so that rows of a kind keep their scheduling order, and steady decoding keeps the order of last step.
    order = np.argsort(lengths != 1, kind="stable")
    ordered = [scheduled[i] for i in order]
    lengths = lengths[order]
    rows = np.fromiter((state.row(s.seq_id) for s in ordered), dtype=np.int64, count=count)
    computed = np.fromiter((s.num_computed_tokens for s in ordered), dtype=np.int64, count=count)
    num_samples = np.fromiter((len(s.samples) for s in ordered), dtype=np.int64, count=count)
    seq_lens = computed + lengths
    _check_ranges(ordered, lengths, seq_lens, state.num_tokens[rows], state.num_blocks[rows] * block_size)
    sampled_ids = [seq_id for s in ordered for seq_id in s.samples]
    sampled_rows = np.fromiter(map(state.row, sampled_ids), dtype=np.int64, count=len(sampled_ids))
    sampled_from = np.repeat(np.arange(count), num_samples)
    _check_samples(ordered, rows, sampled_rows, sampled_from, state)

    starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    token_rows = np.repeat(rows, lengths)
    positions = np.arange(starts[-1], dtype=np.int64) + np.repeat(computed - starts[:-1], lengths)
    blocks = state.block_tables[token_rows, positions // block_size].astype(np.int64)
    if not blocks.all():
        raise PagedBackendError("the step's plan writes to the null block")
    return RaggedBatch(
        rows=rows,
        sampled_ids=sampled_ids,
        sampled_rows=sampled_rows,
        sampled_from=sampled_from,
        input_ids=state.token_ids[token_rows, positions].astype(np.int64),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        seq_lens=seq_lens.astype(np.int32),
        query_start_loc=starts.astype(np.int32),
        num_decodes=int(np.count_nonzero(lengths == 1)),
        max_query_len=int(lengths.max()),
    )


def _check_ranges(
    ordered: list[ScheduledSequence],
    lengths: np.ndarray,
    seq_lens: np.ndarray,
    known: np.ndarray,
    capacity: np.ndarray,
) -> None:
    """A plan that breaks these rules would read or write another sequence's cache."""
    samples = np.fromiter((s.seq_id in s.samples for s in ordered), dtype=bool, count=len(ordered))
    wrong = (lengths < 1) | (seq_lens > known) | (seq_lens > capacity) | (samples != (seq_lens == known))
    # Siblings sample where the sequence itself does.
    wrong |= np.fromiter((bool(s.samples) for s in ordered), dtype=bool, count=len(ordered)) != samples
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise PagedBackendError(
            f"the step's plan does not fit the worker's rows: {ordered[i]} with {known[i]} known tokens and "
            f"{capacity[i]} slots"
        )


def _check_samples(
    ordered: list[ScheduledSequence],
    rows: np.ndarray,
    sampled_rows: np.ndarray,
    sampled_from: np.ndarray,
    state: InputBatch,
) -> None:
    """Each sequence computes and samples once, from the logits after its own tokens."""
    for kind, used in (("computes", rows), ("samples", sampled_rows)):
        if len(np.unique(used)) != len(used):
            raise PagedBackendError(f"the step's plan {kind} a sequence twice: {ordered}")
    for i in np.flatnonzero(sampled_rows != rows[sampled_from]):
        own, other = sampled_rows[i], rows[sampled_from[i]]
        count = state.num_tokens[other]
        same = state.num_tokens[own] == count and np.array_equal(
            state.token_ids[own, :count], state.token_ids[other, :count]
        )
        if not same:
            raise PagedBackendError(f"a sibling in {ordered[sampled_from[i]]} has other tokens")


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
