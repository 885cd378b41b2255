"""Penalties, sampling and log-probabilities in plain torch: sorts the vocabulary and takes the rows one by one."""

import torch

_LOWEST = torch.finfo(torch.float32).min
_HIGHEST = torch.finfo(torch.float32).max
_UNIT = float(1 << 40)
_LOW = 0xFFFFFFFF


def penalise(
    logits: torch.Tensor,
    entry_rows: torch.Tensor,
    entry_tokens: torch.Tensor,
    entry_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    temperature: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `ops.penalise`."""
    out.copy_(logits)
    used = entry_rows >= 0
    rows, tokens, counts = entry_rows[used], entry_tokens[used], entry_counts[used]
    before = out[rows, tokens]
    after = torch.where(before > 0, before / repetition[rows], before * repetition[rows])
    after = after - frequency[rows] * counts - presence[rows] * (counts > 0)
    out[rows, tokens] = torch.where(before.isfinite(), after.clamp(_LOWEST, _HIGHEST), before)
    out.div_(torch.where(temperature > 0, temperature, 1.0)[:, None])


def uniform(seed: int, position: int) -> float:
    """Philox4x32-10 (Salmon et al. 2011) with the seed as key and the position as counter, as a number in [0, 1)."""
    c0, c1, c2, c3 = position & _LOW, 0, 0, 0
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _LOW, (a >> 32) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    # The upper half of the words folded onto the lower leaves 31 uniform bits; float32 throughout.
    word = c0 if c0 < 1 << 31 else _LOW - c0
    return float(torch.tensor(word, dtype=torch.float32) * torch.tensor(4.6566127342e-10))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `ops.sample`."""
    for row in range(logits.shape[0]):
        scores, best = logits[row], logits[row].max()
        if not best.isfinite():
            out[row] = -1
        elif temperature[row] <= 0:
            out[row] = (scores == best).nonzero()[0, 0]
        else:
            scaled = (scores - best) / temperature[row]
            weights = _kept(scaled, int(top_k[row]), top_p[row], min_p[row])
            cumulative = weights.cumsum(0)
            total = cumulative[-1]
            chance = uniform(int(seeds[row]), int(positions[row]))
            target = torch.minimum((chance * total.double()).long(), total - 1)
            out[row] = torch.searchsorted(cumulative, target, right=True).clamp(max=len(weights) - 1)


def _kept(scaled: torch.Tensor, top_k: int, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """What each token of a row weighs: int64 [vocabulary], 0 for tokens that are left out."""
    probabilities = scaled.softmax(0)
    weights = (probabilities * _UNIT).long()
    weights = torch.where(probabilities < min_p * probabilities.max(), 0, weights)
    if 0 < top_k < len(weights):
        weights = torch.where(scaled < scaled.sort(descending=True).values[top_k - 1], 0, weights)
    if top_p < 1:
        needed = (top_p.double() * weights.sum().double()).ceil().long().clamp(min=1)
        # Stable: equal weights stay in the order of their ids.
        heaviest, order = weights.sort(descending=True, stable=True)
        last = int(torch.searchsorted(heaviest.cumsum(0), needed).clamp(max=len(weights) - 1))
        weights[order[last + 1 :]] = 0
    return weights


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    ranks: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> None:
    """See `ops.token_logprobs`."""
    used, chosen = tokens >= 0, tokens.clamp(min=0)[:, None]
    scores = logits.log_softmax(-1).clamp(min=_LOWEST)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    logprobs.copy_(torch.where(used, scores.gather(-1, chosen)[:, 0], 0.0))
    ranks.copy_(torch.where(used, (order == chosen).int().argmax(-1) + 1, 0))
    best = order[:, : top_ids.shape[1]]
    top_ids.copy_(torch.where(used[:, None], best, 0))
    top_logprobs.copy_(torch.where(used[:, None], scores.gather(-1, best), 0.0))
