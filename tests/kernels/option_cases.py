"""Batches for the options of paged attention, and their meaning in float64: what the reference is held against."""

import math

import torch
from kernel_cases import make_batch

from paged_kernels.arguments import QUANTISED_DTYPES

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8

OPTION_GRID = [
    # (page, head_dim, group, options): every option, page, head size and kind of group, and options together
    (8, 64, 1, {"soft_cap": 2.0}),
    (16, 80, 3, {"alibi": True}),
    (64, 96, 8, {"sinks": True, "window": 20}),
    (128, 112, 7, {"cache": (E4M3, "tensor")}),
    (16, 128, 4, {"cache": (INT8, "token"), "sinks": True}),
    (32, 192, 2, {"cache": (E5M2, "token"), "alibi": True}),
    (64, 256, 1, {"soft_cap": 1.0, "window": 40, "alibi": True}),
    (16, 64, 71, {}),
    (24, 64, 16, {"cache": (INT8, "tensor"), "soft_cap": 5.0}),
    (32, 128, 8, {"cache": (E4M3, "token"), "window": 33, "sinks": True, "alibi": True, "soft_cap": 3.0}),
]


def with_options(batch, *, window=None, soft_cap=None, alibi=False, sinks=False, cache=None, seed=5):
    """The batch with those options; cache: (type, `tensor` or `token`), into which its keys and values are made."""
    heads = batch["query"].shape[1]
    generator = torch.Generator().manual_seed(seed)
    batch = {**batch, "window": window, "soft_cap": soft_cap}
    if alibi:
        batch["alibi_slopes"] = 2.0 ** -torch.arange(1, heads + 1).remainder(9).float()
    if sinks:
        batch["sinks"] = torch.randn(heads, generator=generator)
    if cache is not None:
        for name in ("k", "v"):
            batch[f"{name}_cache"], batch[f"{name}_scale"] = quantised(batch[f"{name}_cache"], *cache, generator)
    return batch


def quantised(cache, dtype, scales, generator):
    """(cache of that type, its scales); unwritten slots, which hold NaN, get NaN or a large number, and no scale."""
    largest = QUANTISED_DTYPES[dtype]
    unwritten = cache.isnan()
    if scales == "tensor":
        scale = torch.tensor(3.0 / largest)
        divided = cache.float() / scale
    else:
        scale = (torch.rand(cache.shape[:3], generator=generator) * 3 + 1) / largest
        divided = cache.float() / scale[..., None]
        scale[unwritten[..., 0]] = float("nan")
    divided = divided.clamp(-largest, largest)
    if dtype == INT8:
        return torch.where(unwritten, 99.0, divided.round()).to(dtype), scale
    return divided.to(dtype), scale


def option_batch(page, dim, group, dtype, options):
    """Single tokens, short queries and chunks around multiples of a page, with options."""
    decodes = [0, 1, page, 3 * page + 3]
    short = [(2, page + 1), (8, 2 * page + 5), (5, 5), (0, 7), (1, page), (3, 0)]
    chunks = [(0, page), (page + 3, 3 * page + 1), (11, 11), (2 * page + 1, 2 * page + 1), (3, 0)]
    ragged = short + chunks
    batch = make_batch(
        decodes + [length for _, length in ragged], [1] * len(decodes) + [rows for rows, _ in ragged],
        heads=2 if group < 4 else 1, group=group, dim=dim, page=page, dtype=dtype, padding=2,
    )  # fmt: skip
    batch |= {"num_decodes": len(decodes), "num_short": len(decodes) + len(short)}
    batch["total_seq_len"] = int(batch["seq_lens"].sum())
    return with_options(batch, **options)


def short_batch(page, dim, group, dtype, options=None, lens=(1500, 700, 9, 0, 1493)):
    """Short queries only, two of them over contexts that are split."""
    batch = make_batch(
        list(lens), [8, 3, 1, 2, 1], heads=1, group=group, dim=dim, page=page, dtype=dtype, padding=3, seed=2
    )
    return with_options(batch, **(options or {}))


def attend_by_definition(batch):
    """Row by row and token by token, in float64: position p sees max(0, p - window + 1) .. p."""
    query, page = batch["query"].double(), batch["k_cache"].shape[2]
    group = query.shape[1] // batch["k_cache"].shape[1]
    window = batch.get("window") or 10**9
    out = torch.zeros_like(query)
    starts = batch["query_start_loc"].tolist()
    for i, length in enumerate(batch["seq_lens"].tolist()):
        table = batch["block_tables"][i].tolist()
        for row in range(starts[i], starts[i + 1] if length else starts[i]):
            p = length - starts[i + 1] + row
            seen = range(max(0, p - window + 1), p + 1)
            for head in range(query.shape[1]):
                places = [(table[t // page], head // group, t % page) for t in seen]
                keys, values = (torch.stack([_value(batch, name, at) for at in places]) for name in ("k", "v"))
                scores = keys @ query[row, head] * batch["scale"]
                out[row, head] = _weights(batch, scores, head) @ values
    return out


def _value(batch, name, at):
    """A key or value, dequantised."""
    scale = batch.get(f"{name}_scale")
    factor = 1.0 if scale is None else scale if scale.dim() == 0 else scale[at]
    return batch[f"{name}_cache"][at[0]].to(torch.float64)[at[1:]] * factor


def _weights(batch, scores, head):
    """What each of the tokens seen weighs, the last one being the query's own."""
    if batch.get("soft_cap"):
        scores = batch["soft_cap"] * torch.tanh(scores / batch["soft_cap"])
    if batch.get("alibi_slopes") is not None:
        scores = scores + batch["alibi_slopes"][head] * torch.arange(1 - len(scores), 1)
    sinks = batch.get("sinks")
    extra = 0.0 if sinks is None else math.exp(sinks[head])
    return scores.exp() / (scores.exp().sum() + extra)
