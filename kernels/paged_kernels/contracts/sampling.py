"""Contracts of what follows the logits: penalties, temperature, the choice of a token, log-probabilities.

The rules are those of `paged_backend.sampling`; tests hold the two together.
"""

import torch

from paged_kernels.backends import fail, implementation

MAX_TOP_LOGPROBS = 64


def _check_logits(logits: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        fail("logits", f"must be [rows, vocabulary] with contiguous rows, not {list(logits.shape)}")
    if logits.dtype not in dtypes:
        fail("logits", f"must be {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}, not {logits.dtype}")


def _check_vector(name: str, values: torch.Tensor, dtype: torch.dtype, length: int, device: torch.device) -> None:
    if values.dtype != dtype or values.shape != (length,) or values.device != device or not values.is_contiguous():
        fail(name, f"must be contiguous {dtype} [{length}] on {device}, not {values.dtype} {list(values.shape)}")


def penalise(
    logits: torch.Tensor,
    entry_rows: torch.Tensor,
    entry_tokens: torch.Tensor,
    entry_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    temperature: torch.Tensor,
    *,
    backend: str,
) -> torch.Tensor:
    """Repetition, frequency and presence penalties, then temperature: a new float32 [rows, vocabulary].

    logits: [rows, vocabulary], float32, float16 or bfloat16. An entry (row, token, count) stands for a token that the
    row's sequence holds, generated `count` times (0: only in its prompt): entry_rows and entry_tokens int64 [entries],
    entry_counts float32; no pair twice; row -1 skips the entry (padding). The rest is float32 [rows].
    Of an entry: repetition divides a positive score and multiplies another, then frequency * count and, where count
    > 0, presence are subtracted (vLLM's order); results stay finite, scores that are not finite are kept. At last all
    scores of a row are divided by its temperature, if that is positive.
    Raises ValueError naming the argument at fault.
    """
    _check_logits(logits, (torch.float32, torch.float16, torch.bfloat16))
    rows, entries, device = logits.shape[0], entry_rows.numel(), logits.device
    _check_vector("entry_rows", entry_rows, torch.int64, entries, device)
    _check_vector("entry_tokens", entry_tokens, torch.int64, entries, device)
    _check_vector("entry_counts", entry_counts, torch.float32, entries, device)
    per_row = {"repetition": repetition, "frequency": frequency, "presence": presence, "temperature": temperature}
    for name, values in per_row.items():
        _check_vector(name, values, torch.float32, rows, device)
    apply = implementation("penalise", backend, torch.float32, device)
    out = torch.empty(logits.shape, dtype=torch.float32, device=device)
    if rows:
        apply(logits, entry_rows, entry_tokens, entry_counts, *per_row.values(), out)
    return out


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    backend: str,
) -> torch.Tensor:
    """One token per row: int64 [rows], a pure function of the row's logits, parameters, seed and position.

    logits: float32 [rows, vocabulary]. temperature: float32 [rows]; 0 or less takes the first of the most likely
    tokens. top_k: int64 [rows], below 1 is off; what equals the k-th stays. top_p, min_p: float32 [rows], 1 and 0 are
    off; of tokens that weigh the same at top-p's edge the lower ids stay. seeds: int64 [rows], the bits of a 64-bit
    seed. positions: int64 [rows] below 2**32, tokens the sequence has before this one.
    Order: temperature, min-p, top-k, top-p, then the inverse of the cumulative distribution at one uniform number
    (Philox4x32-10 of seed and position). Probabilities become integers (units of 2**-40) before they are added, so
    the sum's order, and with it the other rows of a batch, cannot matter. Nothing sorts the vocabulary.
    A row whose maximum is not finite, or that holds NaN, gives -1. Raises ValueError naming the argument at fault.
    """
    _check_logits(logits, (torch.float32,))
    rows, device = logits.shape[0], logits.device
    for name, values in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        _check_vector(name, values, torch.float32, rows, device)
    for name, values in (("top_k", top_k), ("seeds", seeds), ("positions", positions)):
        _check_vector(name, values, torch.int64, rows, device)
    choose = implementation("sample", backend, logits.dtype, device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows:
        choose(logits, temperature, top_k, top_p, min_p, seeds, positions, out)
    return out


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, count: int, *, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of chosen tokens, their ranks, and the `count` most likely tokens, without sorting.

    logits: float32 [rows, vocabulary], free of NaN. tokens: int64 [rows]; -1 (padding) gives zeros in the row's
    results. Tokens are ordered by logit, equal ones by id; the first has rank 1.
    Returns (logprobs float32 [rows], ranks int64 [rows], top_ids int64 [rows, k], top_logprobs float32 [rows, k]), best
    first, k = min(count, vocabulary). What is -inf becomes the lowest float32.
    Raises ValueError naming the argument at fault.
    """
    _check_logits(logits, (torch.float32,))
    rows, vocabulary = logits.shape
    _check_vector("tokens", tokens, torch.int64, rows, logits.device)
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        fail("count", f"must be from 0 to {MAX_TOP_LOGPROBS}, not {count}")
    gather = implementation("token_logprobs", backend, logits.dtype, logits.device)
    count = min(count, vocabulary)
    floats, ints = ({"dtype": d, "device": logits.device} for d in (torch.float32, torch.int64))
    logprobs, ranks = torch.empty(rows, **floats), torch.empty(rows, **ints)
    top_ids, top_logprobs = torch.empty(rows, count, **ints), torch.empty(rows, count, **floats)
    if rows:
        gather(logits, tokens, logprobs, ranks, top_ids, top_logprobs)
    return logprobs, ranks, top_ids, top_logprobs
