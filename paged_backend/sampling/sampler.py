"""Chooses the next tokens of a mixed batch from their logits.

Greedy rows take the argmax and pay for nothing else. The others go through a fixed order: temperature, min-p, top-k,
top-p, then the inverse of the cumulative distribution at one uniform number per row.

Weights relative to the most likely token become integers (units of 2**-40) before anything is summed over the
vocabulary. Integer sums are exact in any order, so which tokens top-p keeps and which one is drawn cannot depend on how
a device arranges the sum, and therefore not on the other rows of the batch.

No path sorts the whole vocabulary. The k largest of a row lie in the k blocks of tokens with the largest maxima (in a
few more, if there are ties), so a row with a small k looks at those alone, its tokens still in the order of their ids.

Knows logits and numbers; no requests, no models, no text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from paged_backend.errors import PagedBackendError
from paged_backend.sampling.rng import uniform

_UNIT = float(1 << 40)
# Rows with a k up to this look at their best blocks only; a larger k gains little by it.
_SMALL_K = 256
_BLOCK = 64
# Beyond this share of all blocks, looking at blocks costs more than it saves.
_MOST_BLOCKS = 0.25
# On a CPU rows are drawn in slices of about so many logits, whose temporaries stay in the cache.
_SLICE_LOGITS = 1 << 19
# How many candidates top-p looks at first; most distributions need few.
_FIRST_CANDIDATES = 64
# Then it counts weights by size: by the binary exponent and so many bits behind it.
_BUCKET_BITS = 6
_NUM_BUCKETS = (41 << _BUCKET_BITS) + 2


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters of R rows, as numpy arrays [R].

    Attributes:
        greedy: bool, rows that take the most likely token.
        temperature: float32, positive where not greedy.
        top_k: int64, values below 1 are off.
        top_p: float32 in (0, 1].
        min_p: float32 in [0, 1].
        seeds: uint64, one per sequence.
        positions: int64, tokens the sequence has before the one to sample.
    """

    greedy: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray

    def select(self, rows: np.ndarray) -> SamplingBatch:
        """The given rows."""
        return SamplingBatch(
            *(getattr(self, name)[rows] for name in self.__slots__)  # in the order of the fields
        )


def sample_greedily(logits: torch.Tensor) -> np.ndarray:
    """The most likely token of each row; see `sample`."""
    if not logits.is_cpu:
        best, tokens = logits.max(dim=-1)
        _check_finite(best.tolist())
        return tokens.cpu().numpy()
    values = logits.numpy()
    places = values.argmax(axis=-1)
    _check_finite([values.item(row, token) for row, token in enumerate(places.tolist())])
    return places


def sample(logits: torch.Tensor, batch: SamplingBatch) -> np.ndarray:
    """Choose one token per row.

    Args:
        logits: float32 [R, vocabulary]; not changed.
        batch: the rows' parameters.

    Returns:
        int64 [R] token ids.

    Raises:
        PagedBackendError: a row holds NaN or infinity where its maximum should be: the model's output is broken.
    """
    best, tokens = _most_likely(logits)
    drawn = np.flatnonzero(~batch.greedy)
    if logits.device.type == "cpu":
        drawn = _draw_natively(logits, best, tokens, drawn, batch)
    for rows in _slices(drawn, batch, logits):
        index = torch.from_numpy(rows).to(logits.device)
        shifted = torch.sub(_rows_between(logits, rows, index), take_rows(best, index)[:, None])
        tokens[index] = _draw(shifted, batch.select(rows))
    # Checked last so that a GPU is waited for once.
    _check_finite(best.tolist())
    return tokens.cpu().numpy()


def warm_up() -> None:
    """Compile what drawing on a CPU needs, so that no request waits for a compiler."""
    sample(
        torch.zeros(2, 2),
        SamplingBatch(
            greedy=np.zeros(2, dtype=bool),
            temperature=np.ones(2, dtype=np.float32),
            top_k=np.zeros(2, dtype=np.int64),
            top_p=np.array([1.0, 0.5], dtype=np.float32),
            min_p=np.zeros(2, dtype=np.float32),
            seeds=np.ones(2, dtype=np.uint64),
            positions=np.zeros(2, dtype=np.int64),
        ),
    )


def _most_likely(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and its (first) index of each row; NaN counts as the maximum."""
    if logits.device.type != "cpu":
        return logits.max(dim=-1)
    # numpy searches with SIMD instructions, torch's CPU kernel with a loop some ten times slower.
    tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(-1, tokens[:, None])[:, 0], tokens


def _check_finite(best: list[float]) -> None:
    """Refuse rows whose largest logit is not finite; NaN reaches it from anywhere in its row."""
    broken = [row for row, score in enumerate(best) if not math.isfinite(score)]
    if broken:
        raise PagedBackendError(f"the model produced logits that are not finite (rows {broken} of the step)")


def take_rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows `index` (ascending); all of them without a copy."""
    return tensor if index.shape[0] == tensor.shape[0] else tensor[index]


def _slices(drawn: np.ndarray, batch: SamplingBatch, logits: torch.Tensor) -> Iterator[np.ndarray]:
    """The rows to draw, in groups that are handled alike: those with a small k, and the others."""
    vocabulary = logits.shape[-1]
    is_small = (batch.top_k[drawn] > 0) & (batch.top_k[drawn] <= min(_SMALL_K, _MOST_BLOCKS * vocabulary / _BLOCK))
    size = max(1, _SLICE_LOGITS // vocabulary) if logits.device.type == "cpu" else max(1, len(drawn))
    for group in (drawn[is_small], drawn[~is_small]):
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _draw_natively(
    logits: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor, drawn: np.ndarray, batch: SamplingBatch
) -> np.ndarray:
    """Draw those of the rows `drawn` that have no top-k, on a CPU; returns the others."""
    # Imported here because they compile, which machines that draw elsewhere should not wait for.
    from paged_kernels.cpu.draw import draw_tokens
    from paged_kernels.cpu.nucleus import draw_nucleus

    top_k = batch.top_k[drawn]
    no_top_k = (top_k < 1) | (top_k >= logits.shape[-1])
    unfiltered = no_top_k & (batch.top_p[drawn] == 1.0) & (batch.min_p[drawn] == 0.0)
    for rows, filtered in ((drawn[unfiltered], False), (drawn[no_top_k & ~unfiltered], True)):
        if not rows.size:
            continue
        index = torch.from_numpy(rows)
        own = _rows_between(logits, rows, index).contiguous(), best[index], torch.from_numpy(batch.temperature[rows])
        chance = torch.from_numpy(uniform(batch.seeds[rows], batch.positions[rows]).astype(np.float64))
        if filtered:
            filters = torch.from_numpy(batch.top_p[rows]), torch.from_numpy(batch.min_p[rows])
            tokens[index] = draw_nucleus(*own, *filters, chance)
        else:
            tokens[index] = draw_tokens(*own, chance)
    return drawn[~no_top_k]


def _rows_between(logits: torch.Tensor, rows: np.ndarray, index: torch.Tensor) -> torch.Tensor:
    """The rows, without a copy if they lie side by side."""
    first, last = int(rows[0]), int(rows[-1])
    return logits[first : last + 1] if last - first + 1 == len(rows) else logits[index]


def _draw(shifted: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Sample from rows of logits whose maximum is 0, which may be overwritten."""
    device = shifted.device
    blocks = None
    if batch.top_k.min() > 0:
        shifted, blocks = _best_blocks(shifted, batch.top_k)
    weights = token_weights(shifted.div_(_column(batch.temperature, device)), batch)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    chance = _column(uniform(batch.seeds, batch.positions), device).double()
    target = torch.minimum((chance * total).long(), total - 1)
    chosen = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=weights.shape[-1] - 1)
    if blocks is None:
        return chosen
    return blocks.gather(-1, (chosen // _BLOCK)[:, None])[:, 0] * _BLOCK + chosen % _BLOCK


def _best_blocks(values: torch.Tensor, top_k: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The blocks of each row that hold its k largest values and all that equal the k-th.

    Args:
        values: float32 [R, vocabulary].
        top_k: int64 [R], positive.

    Returns:
        [R, blocks * _BLOCK], the blocks' values in the order of the vocabulary, and int64 [R, blocks], which blocks
        they are; `values` themselves and None where that would not be much less.
    """
    if values.shape[-1] % _BLOCK:
        values = torch.nn.functional.pad(values, (0, -values.shape[-1] % _BLOCK), value=-torch.inf)
    in_blocks = values.view(values.shape[0], -1, _BLOCK)
    maxima = in_blocks.amax(dim=-1)
    count, most = int(top_k.max()), int(_MOST_BLOCKS * maxima.shape[-1])
    if count > most:
        return values, None
    # The k-th largest maximum is at most the k-th largest value: no block below it matters.
    k = torch.from_numpy(top_k).to(values.device)[:, None]
    kth = maxima.topk(count, dim=-1).values.gather(-1, k - 1)
    count = int((maxima >= kth).sum(dim=-1).max())
    if count > most:
        return values, None
    blocks = maxima.topk(count, dim=-1).indices.sort(dim=-1).values
    chosen = in_blocks.gather(1, blocks[:, :, None].expand(-1, -1, _BLOCK))
    return chosen.view(len(blocks), -1), blocks


def token_weights(scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """What each token weighs after all filters: int64 [R, vocabulary], 0 for tokens that are left out.

    Args:
        scaled: float32 [R, vocabulary], logits divided by the temperature, the largest of each row 0; any tokens that
            no filter keeps may be missing.
        batch: the rows' parameters.
    """
    # Relative to the most likely token: the same whichever tokens are missing, as probabilities would not be.
    # A power of two scales a float32 exactly; only the cut to an integer rounds.
    ratios = scaled.exp().mul_(_UNIT)
    weights = ratios.long()
    if batch.min_p.any():
        weights.masked_fill_(ratios < _column(batch.min_p, weights.device) * _UNIT, 0)
    return _top_p(_top_k(weights, scaled, batch), batch)


def _top_k(weights: torch.Tensor, scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Keep the k largest of each row, and whatever equals the k-th."""
    on = (batch.top_k > 0) & (batch.top_k < scaled.shape[-1])
    for rows in (np.flatnonzero(on & (batch.top_k <= _SMALL_K)), np.flatnonzero(on & (batch.top_k > _SMALL_K))):
        if not rows.size:
            continue
        index = torch.from_numpy(rows).to(weights.device)
        k = torch.from_numpy(batch.top_k[rows]).to(weights.device)[:, None]
        chosen = take_rows(scaled, index)
        kth = chosen.topk(int(batch.top_k[rows].max()), dim=-1).values.gather(-1, k - 1)
        weights = _with_rows(weights, index, take_rows(weights, index).masked_fill_(chosen < kth, 0))
    return weights


def _top_p(weights: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Keep the smallest set of tokens that holds the share p of the remaining weight, the most likely first; of
    tokens that weigh the same at the edge, those with the lower ids."""
    rows = np.flatnonzero(batch.top_p < 1.0)
    if not rows.size:
        return weights
    index = torch.from_numpy(rows).to(weights.device)
    chosen = take_rows(weights, index)
    share = _column(batch.top_p[rows], weights.device).double()
    needed = (share * chosen.sum(dim=-1, keepdim=True)).ceil().long().clamp_(min=1)
    lightest, taken = _edge(chosen, needed)
    above = chosen >= lightest
    # Rarely, more tokens weigh as much as the last one taken than fit; the first of them do.
    if (above.sum(dim=-1, keepdim=True) > taken).any():
        equal = chosen == lightest
        heavier = chosen > lightest
        above = heavier | (equal & (equal.cumsum(dim=-1) <= taken - heavier.sum(dim=-1, keepdim=True)))
    return _with_rows(weights, index, chosen.masked_fill_(~above, 0))


def _with_rows(tensor: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`tensor` with the rows `index` replaced."""
    if index.shape[0] == tensor.shape[0]:
        return rows
    tensor[index] = rows
    return tensor


def _edge(weights: torch.Tensor, needed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the heaviest tokens reach the weight `needed` [R, 1]: the weight of the last one taken and how many are
    taken, both [R, 1]. Looks at few candidates first, and at all weights only for the rows that fall short."""
    count = min(_FIRST_CANDIDATES, weights.shape[-1])
    candidates = weights
    if weights.shape[-1] % _BLOCK == 0 and count <= _MOST_BLOCKS * weights.shape[-1] / _BLOCK:
        # The values alone matter here, not whose they are: as many blocks as candidates hold them all.
        in_blocks = weights.view(len(weights), -1, _BLOCK)
        blocks = in_blocks.amax(dim=-1).topk(count, dim=-1, sorted=False).indices
        candidates = in_blocks.gather(1, blocks[:, :, None].expand(-1, -1, _BLOCK)).view(len(weights), -1)
    lightest, taken, reached = _last_of(candidates.topk(count, dim=-1).values, needed)
    if weights.shape[-1] > _FIRST_CANDIDATES and not reached.all():
        pending = torch.arange(len(weights), device=weights.device)[~reached]
        lightest[pending], taken[pending] = _edge_by_size(take_rows(weights, pending), take_rows(needed, pending))
    return lightest, taken


def _last_of(descending: torch.Tensor, needed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weight at which the sum of weights reaches `needed` [R, 1], how many that takes, both [R, 1], and whether
    they suffice, bool [R]."""
    sums = descending.cumsum(dim=-1)
    last = torch.searchsorted(sums, needed).clamp_(max=descending.shape[-1] - 1)
    return descending.gather(-1, last), last + 1, sums[:, -1] >= needed[:, 0]


def _edge_by_size(weights: torch.Tensor, needed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`_edge` without sorting: sums by size of weight say in which narrow range the last token is."""
    # The bits of a float32 grow with it; those of 1.0, the smallest weight that counts, become bucket 1.
    sizes = (weights.float().view(torch.int32) >> (23 - _BUCKET_BITS)) - ((127 << _BUCKET_BITS) - 1)
    sizes = sizes.clamp_(min=0).long()
    sums = torch.zeros(len(weights), _NUM_BUCKETS, dtype=torch.int64, device=weights.device)
    from_above = sums.scatter_add_(1, sizes, weights).flip(1).cumsum(dim=-1)
    place = torch.searchsorted(from_above, needed).clamp_(max=_NUM_BUCKETS - 1)
    bucket = _NUM_BUCKETS - 1 - place
    above = from_above.gather(1, place) - sums.gather(1, bucket)
    inside = weights.masked_fill(sizes != bucket, 0)
    count = int((sizes == bucket).sum(dim=-1).max())
    lightest, taken, _ = _last_of(inside.topk(count, dim=-1).values, needed - above)
    return lightest, taken + (sizes > bucket).sum(dim=-1, keepdim=True)


def _column(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)[:, None]
