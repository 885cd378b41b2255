"""`InputBatch`: one persistent row per sequence, kept up to date by differences, never rebuilt.

A row holds a sequence's token ids, block table and sampling parameters in numpy arrays, so that a step's batch is
made by indexing. Rows are recycled. Knows nothing of models and of why sequences come and go.

Wide arrays grow with what is really there (token columns with the longest sequence, block columns with the longest
block table) and are not cleared, so that the operating system commits only pages that were written: a context length
of a million tokens costs nothing until a sequence has it.
"""

from __future__ import annotations

import numpy as np

from paged_backend.errors import PagedBackendError
from paged_backend.sampling.constraints import ConstraintBatch, TokenConstraints, gather_constraints
from paged_backend.sampling.penalties import PenaltyBatch, TokenHistory, gather_penalties
from paged_backend.sampling.sampler import SamplingBatch
from paged_backend.sched.output import NewSequence

_FIRST_TOKEN_COLUMNS = 1024
_FIRST_BLOCK_COLUMNS = 64
_SEED_MASK = (1 << 64) - 1
# In place of a number of log-probabilities: the row wants none at all.
NO_LOGPROBS = -1


class InputBatch:
    """Rows for up to `max_num_seqs` sequences.

    Attributes:
        token_ids: int32 [rows, columns]; a row's first `num_tokens` entries count.
        num_tokens: int64 [rows], known tokens.
        block_tables: int32 [rows, columns]; a row's first `num_blocks` entries count, the rest is 0 (the null block).
        num_blocks: int64 [rows].
        changed_tables: rows whose block table changed since the last `clear_changes()`.
        num_prompt_tokens: int64 [rows], how many of a row's tokens are its prompt.
        num_logprobs: int64 [rows], how many top log-probabilities a row wants, or NO_LOGPROBS.
        num_prompt_logprobs: int64 [rows], the same of its prompt tokens.
        num_prompt_reporting: rows that want log-probabilities of their prompt tokens.
        is_beam: bool [rows], rows of a beam search, which sample nothing.
        demanding: rows that want anything but their most likely token.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._rows: dict[int, int] = {}
        # Popped from the end: low rows first, so that active rows stay close together.
        self._free = list(range(max_num_seqs))[::-1]
        self.token_ids = np.empty((max_num_seqs, _FIRST_TOKEN_COLUMNS), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_tables = np.zeros((max_num_seqs, _FIRST_BLOCK_COLUMNS), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.changed_tables: set[int] = set()
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)
        self.num_prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)
        self.num_prompt_reporting = 0
        self.is_beam = np.zeros(max_num_seqs, dtype=bool)
        self.demanding: set[int] = set()
        # Of rows with penalties only.
        self._histories: dict[int, TokenHistory] = {}
        # Of rows with rules only.
        self._constraints: dict[int, TokenConstraints] = {}
        self._sampling = SamplingBatch(
            greedy=np.ones(max_num_seqs, dtype=bool),
            temperature=np.ones(max_num_seqs, dtype=np.float32),
            top_k=np.zeros(max_num_seqs, dtype=np.int64),
            top_p=np.ones(max_num_seqs, dtype=np.float32),
            min_p=np.zeros(max_num_seqs, dtype=np.float32),
            seeds=np.zeros(max_num_seqs, dtype=np.uint64),
            positions=self.num_tokens,
        )

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, seq_id: int) -> int:
        """The row of a sequence.

        Raises:
            PagedBackendError: there is none: the scheduler planned a sequence it never announced.
        """
        try:
            return self._rows[seq_id]
        except KeyError:
            raise PagedBackendError(f"sequence {seq_id} has no row in the worker") from None

    def add(self, new: NewSequence) -> None:
        """Create a row.

        Raises:
            PagedBackendError: the sequence has one already, all rows are taken, or a beam asks for no continuations.
        """
        if new.seq_id in self._rows:
            raise PagedBackendError(f"sequence {new.seq_id} has a row in the worker already")
        if not self._free:
            raise PagedBackendError(f"the worker holds {len(self._rows)} sequences, its maximum")
        if new.is_beam and not new.num_logprobs:
            raise PagedBackendError(f"sequence {new.seq_id} is a beam, which asks for no continuations")
        row = self._rows[new.seq_id] = self._free.pop()
        count = len(new.token_ids)
        self._reserve_tokens(count)
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row] = count
        self.num_blocks[row] = 0
        self._append_blocks(row, new.block_ids)
        params, sampling = new.params, self._sampling
        sampling.greedy[row] = params.is_greedy
        sampling.temperature[row] = min(params.temperature, float(np.finfo(np.float32).max))
        # A k beyond any vocabulary is off, and need not fit the array's type.
        sampling.top_k[row] = min(params.top_k, np.iinfo(np.int64).max)
        sampling.top_p[row] = params.top_p
        sampling.min_p[row] = params.min_p
        sampling.seeds[row] = new.seed & _SEED_MASK
        self.num_logprobs[row] = NO_LOGPROBS if new.num_logprobs is None else new.num_logprobs
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        if new.num_prompt_logprobs is not None:
            self.num_prompt_logprobs[row] = new.num_prompt_logprobs
            self.num_prompt_reporting += 1
        self.is_beam[row] = new.is_beam
        if new.rules is not None:
            self._constraints[row] = TokenConstraints(new.rules, new.num_prompt_tokens)
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            self._histories[row] = TokenHistory(
                new.num_prompt_tokens,
                repetition=params.repetition_penalty,
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
            )
        asks = not params.is_greedy or new.is_beam or new.num_logprobs is not None
        if asks or row in self._constraints or row in self._histories:
            self.demanding.add(row)

    def remove(self, seq_id: int) -> None:
        """Free a sequence's row."""
        row = self.row(seq_id)
        del self._rows[seq_id]
        # Entries past a table's end stay 0, whoever has the row next.
        self.block_tables[row, : self.num_blocks[row]] = 0
        self.num_blocks[row] = self.num_tokens[row] = 0
        self.demanding.discard(row)
        self._histories.pop(row, None)
        self._constraints.pop(row, None)
        if self.num_prompt_logprobs[row] != NO_LOGPROBS:
            self.num_prompt_logprobs[row] = NO_LOGPROBS
            self.num_prompt_reporting -= 1
        self._free.append(row)

    def append_blocks(self, seq_id: int, block_ids: list[int]) -> None:
        """Extend a sequence's block table."""
        self._append_blocks(self.row(seq_id), block_ids)

    def replace_blocks(self, seq_id: int, entries: list[tuple[int, int]]) -> None:
        """Overwrite (table index, block id) entries of a sequence's block table.

        Raises:
            PagedBackendError: an index is beyond the table.
        """
        row = self.row(seq_id)
        for index, block_id in entries:
            if not 0 <= index < self.num_blocks[row]:
                raise PagedBackendError(f"sequence {seq_id} has no block {index} to replace: {self.num_blocks[row]}")
            self.block_tables[row, index] = block_id
        self.changed_tables.add(row)

    def release_blocks(self, seq_id: int, count: int) -> None:
        """Make the first `count` entries of a sequence's block table the null block.

        Raises:
            PagedBackendError: there are not so many.
        """
        row = self.row(seq_id)
        if not 0 <= count <= self.num_blocks[row]:
            raise PagedBackendError(f"sequence {seq_id} has {self.num_blocks[row]} blocks and cannot release {count}")
        self.block_tables[row, :count] = 0
        self.changed_tables.add(row)

    def extend_tokens(self, seq_id: int, token_ids: list[int]) -> None:
        """Append tokens to a sequence that were chosen elsewhere."""
        row = self.row(seq_id)
        start, end = int(self.num_tokens[row]), int(self.num_tokens[row]) + len(token_ids)
        self._reserve_tokens(end)
        self.token_ids[row, start:end] = token_ids
        self.num_tokens[row] = end

    def append_tokens(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Append one sampled token to each of `rows` (distinct)."""
        ends = self.num_tokens[rows]
        self._reserve_tokens(max(ends.tolist()) + 1)
        self.token_ids[rows, ends] = tokens
        self.num_tokens[rows] = ends + 1

    def sampling(self, rows: np.ndarray) -> SamplingBatch:
        """The sampling parameters of `rows`; the position of each is its present number of tokens."""
        return self._sampling.select(rows)

    def penalties(self, rows: np.ndarray) -> PenaltyBatch | None:
        """The penalties of `rows`, numbered from 0 in their order, as of their present tokens; None: there are none."""
        if not self._histories:
            return None
        penalised = [(i, row) for i, row in enumerate(rows.tolist()) if row in self._histories]
        if not penalised:
            return None
        histories = [self._histories[row] for _, row in penalised]
        for history, (_, row) in zip(histories, penalised, strict=True):
            history.follow(self.token_ids[row, : self.num_tokens[row]])
        return gather_penalties([i for i, _ in penalised], histories)

    def constraints(
        self, rows: np.ndarray, seq_ids: list[int], masks: dict[int, bytes], vocabulary: int
    ) -> ConstraintBatch | None:
        """The constraints of `rows`, numbered from 0 in their order, as of their present tokens; None: there are none.

        Args:
            rows, seq_ids: the same sequences.
            masks: per sequence whose output has a form, the tokens that may follow.
            vocabulary: entries of the vocabulary.
        """
        if not (self._constraints or masks):
            return None
        narrowed = [
            (i, self._constraints.get(row), self.token_ids[row, : self.num_tokens[row]], masks.get(seq_id))
            for i, (row, seq_id) in enumerate(zip(rows.tolist(), seq_ids, strict=True))
            if row in self._constraints or seq_id in masks
        ]
        return gather_constraints(narrowed, vocabulary) if narrowed else None

    def clear_changes(self) -> None:
        """Forget which block tables changed."""
        self.changed_tables.clear()

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = int(self.num_blocks[row])
        end = start + len(block_ids)
        width = self.block_tables.shape[1]
        if end > width:
            self.block_tables = _widened(self.block_tables, _next_width(width, end), self.num_blocks, clear=True)
        self.block_tables[row, start:end] = block_ids
        self.num_blocks[row] = end
        self.changed_tables.add(row)

    def _reserve_tokens(self, count: int) -> None:
        width = self.token_ids.shape[1]
        if count > width:
            self.token_ids = _widened(self.token_ids, _next_width(width, count), self.num_tokens, clear=False)


def _next_width(width: int, needed: int) -> int:
    while width < needed:
        width *= 2
    return width


def _widened(array: np.ndarray, width: int, used: np.ndarray, *, clear: bool) -> np.ndarray:
    """A copy with more columns; of each row only the first `used` entries are copied."""
    make = np.zeros if clear else np.empty
    wide = make((array.shape[0], width), dtype=array.dtype)
    for row in np.flatnonzero(used):
        wide[row, : used[row]] = array[row, : used[row]]
    return wide
