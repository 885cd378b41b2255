"""The Triton-lang variants that the compile gate builds: one row per kernel, pairwise over sizes and options.

Each row uses the `settings()` that the launcher uses, so that what is compiled is what is shipped. Attention meets
every head size, page size, group and option, in pairs and not in every combination.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from paged_kernels import (
    block_copy,
    decode_attention,
    kv_write,
    penalties,
    prefill_attention,
    rms_norm,
    rope_kv_write,
    sampling,
    silu_mul,
    token_logprobs,
)
from paged_kernels.attention_options import option_constants

CAPABILITIES = (80, 90, 100)
TYPE_NAMES = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.int8: "i8"}

# Types of arguments by name; what is neither here nor in a variant's own types is a 32-bit integer.
TYPES = {
    "tables": "*i32", "lens": "*i32", "starts": "*i32", "slots": "*i64", "pairs": "*i64",
    "part_out": "*fp32", "part_lse": "*fp32", "slopes": "*fp32", "sinks": "*fp32", "k_scale": "*fp32",
    "v_scale": "*fp32", "scale": "fp32", "soft_cap": "fp32", "eps": "fp32",
}  # fmt: skip


@dataclass
class Variant:
    """One kernel with its compile-time arguments, for one GPU generation."""

    label: str
    kernel: Any
    settings: tuple[dict, dict]
    capability: int
    types: dict[str, str] = field(default_factory=dict)


def options(**chosen) -> tuple[str, dict, torch.dtype | None]:
    """(label, constexprs, type of the cache) of some options of attention."""
    dtype = chosen.pop("dtype", None)
    label = " ".join(f"{name}={value}" if value is not True else name for name, value in chosen.items())
    if dtype is not None:
        label += f" {TYPE_NAMES[dtype]}"
    return label, option_constants(**chosen, quantised=dtype is not None), dtype


PLAIN = options()
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
# (head_dim, page, group, max_query_len, split, options)
DECODE = [
    (64, 8, 1, 1, False, PLAIN),
    (80, 16, 7, 1, True, PLAIN),
    (96, 128, 8, 1, True, options(alibi=True)),
    (112, 64, 3, 1, False, PLAIN),
    (128, 16, 8, 1, True, PLAIN),
    (128, 64, 4, 1, False, PLAIN),
    (128, 64, 8, 8, True, PLAIN),
    (128, 16, 71, 8, True, options(window=4096)),
    (192, 32, 1, 1, False, options(soft_cap=True)),
    (256, 64, 2, 1, True, options(window=4096, soft_cap=True)),
    (256, 16, 8, 8, True, PLAIN),
    (64, 64, 8, 1, True, options(window=128, sinks=True)),
    (128, 64, 4, 1, True, options(scales="tensor", dtype=E4M3)),
    (128, 16, 8, 8, True, options(scales="token", dtype=E4M3)),
    (128, 32, 8, 1, True, options(scales="tensor", dtype=E5M2)),
    (256, 64, 2, 1, False, options(scales="token", dtype=INT8)),
    (64, 128, 8, 8, False, options(scales="token", dtype=INT8, sinks=True)),
]
# (head_dim, page, group, max_query_len, options)
PREFILL = [
    (64, 8, 1, 4096, PLAIN),
    (64, 16, 1, 9, PLAIN),
    (80, 128, 8, 4096, PLAIN),
    (96, 32, 3, 4096, options(alibi=True)),
    (112, 16, 7, 4096, PLAIN),
    (128, 16, 4, 4096, PLAIN),
    (128, 64, 8, 4096, PLAIN),
    (128, 64, 4, 16, PLAIN),
    (128, 16, 3, 4096, options(window=4096)),
    (128, 64, 1, 4096, options(soft_cap=True, alibi=True)),
    (192, 64, 1, 4096, PLAIN),
    (256, 16, 2, 4096, options(window=4096, soft_cap=True)),
    (256, 64, 1, 4096, PLAIN),
    (64, 64, 8, 4096, options(window=128, sinks=True)),
    (128, 64, 4, 4096, options(scales="tensor", dtype=E4M3)),
    (128, 16, 8, 4096, options(scales="token", dtype=E4M3)),
    (128, 32, 8, 4096, options(scales="tensor", dtype=E5M2)),
    (256, 64, 2, 4096, options(scales="token", dtype=INT8)),
    (64, 128, 8, 4096, options(scales="token", dtype=INT8, sinks=True)),
]


def variants() -> Iterator[Variant]:
    """Every variant; labels are unique."""
    for capability in CAPABILITIES:
        yield from attention(capability)
        yield from kv_cache(capability)
        yield from layers(capability)
        yield from after_the_logits(capability)
    yield prefill(80, (128, 16, 4, 4096, PLAIN), "fp16")
    for capability, dim in ((80, 128), (90, 64), (90, 128), (100, 256)):
        yield decode(capability, (dim, 16, 4, 1, True, PLAIN), "fp32")
        yield prefill(capability, (dim, 16, 4, 4096, PLAIN), "fp32")


def attention(capability: int) -> Iterator[Variant]:
    for make, rows in ((decode, DECODE), (prefill, PREFILL)):
        for row in rows:
            # Ampere has no instructions for e4m3.
            if capability > 80 or row[-1][2] != E4M3:
                yield make(capability, row)
    for dim, query in ((80, 1), (128, 8), (256, 1)):
        label = f"combine d{dim} q{query}"
        settings = decode_attention.combine_settings(dim, query)
        yield Variant(label, decode_attention.combine_kernel, settings, capability, tensors("bf16", "out"))


def decode(capability: int, row: tuple, dtype: str = "bf16") -> Variant:
    dim, page, group, query, split, (name, constants, cache) = row
    settings = decode_attention.settings(
        group=group, head_dim=dim, page=page, split=split, capability=capability, max_query_len=query,
        options=constants, **sizes(dtype, cache),
    )  # fmt: skip
    label = f"decode {dtype} d{dim} p{page} g{group} q{query} {'split ' * split}{name}"
    types = attention_types(dtype, cache)
    return Variant(label, decode_attention.decode_kernel, settings, capability, types)


def prefill(capability: int, row: tuple, dtype: str = "bf16") -> Variant:
    dim, page, group, query, (name, constants, cache) = row
    settings = prefill_attention.settings(
        group=group, head_dim=dim, page=page, capability=capability, max_query_len=query, options=constants,
        **sizes(dtype, cache),
    )  # fmt: skip
    label = f"prefill {dtype} d{dim} p{page} g{group} m{settings[0]['BLOCK_M']} {name}"
    types = attention_types(dtype, cache)
    return Variant(label, prefill_attention.prefill_kernel, settings, capability, types)


def sizes(dtype: str, cache: torch.dtype | None) -> dict[str, int]:
    element_size = 4 if dtype == "fp32" else 2
    return {"element_size": element_size, "cache_element_size": 1 if cache is not None else element_size}


def attention_types(dtype: str, cache: torch.dtype | None) -> dict[str, str]:
    return tensors(dtype, "query", "out") | tensors(TYPE_NAMES.get(cache, dtype), "k_cache", "v_cache")


def tensors(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}")


def kv_cache(capability: int) -> Iterator[Variant]:
    written = [("none", None), ("tensor", E5M2), ("token", INT8)]
    if capability > 80:
        written += [("tensor", E4M3), ("token", E4M3)]
    inputs = tensors("bf16", "query", "key", "value", "cos", "sin", "out")
    for scales, cache in written:
        name = f"{scales} {TYPE_NAMES.get(cache, 'bf16')}"
        types = inputs | tensors(TYPE_NAMES.get(cache, "bf16"), "k_cache", "v_cache")
        settings = kv_write.settings(8, 80, 16, scales, cache)
        yield Variant(f"write d80 {name}", kv_write.kv_write_kernel, settings, capability, types)
        settings = rope_kv_write.settings(32, 8, 128, 64, 64, scales, cache)
        yield Variant(f"rope+write d128 {name}", rope_kv_write.rope_kv_write_kernel, settings, capability, types)
    types = tensors("bf16", "source", "destination")
    yield Variant("block copy", block_copy.block_copy_kernel, block_copy.settings(), capability, types)


def layers(capability: int) -> Iterator[Variant]:
    names = ("x", "residual", "weight", "out", "total")
    for n, residual, unit_offset in ((4096, True, False), (128, False, False), (16384, True, True)):
        settings = rms_norm.settings(n, residual=residual, unit_offset=unit_offset)
        label = f"rms norm n{n} {'residual ' * residual}{'1+w' * unit_offset}"
        yield Variant(label, rms_norm.rms_norm_kernel, settings, capability, tensors("bf16", *names))
    types = tensors("bf16", "gate_up", "out")
    yield Variant("silu*mul", silu_mul.silu_mul_kernel, silu_mul.settings(14336), capability, types)


def after_the_logits(capability: int) -> Iterator[Variant]:
    floats = ("temperature", "temperatures", "entry_counts", "repetition", "frequency", "presence")
    floats += ("logits", "top_p", "min_p", "scratch", "part_max", "part_sum", "logprobs", "top_logprobs", "out")
    ints = ("entry_rows", "entry_tokens", "top_k", "seeds", "positions", "tokens", "candidates", "ranks", "top_ids")
    types = tensors("fp32", *floats) | tensors("i64", *ints) | {"part_ahead": "*i32"}
    settings = penalties.settings()
    scores = types | {"logits": "*bf16"}
    yield Variant("temperature", penalties.temperature_kernel, settings["temperature"], capability, scores)
    yield Variant("penalties", penalties.penalty_kernel, settings["penalty"], capability, scores)
    chosen = types | {"out": "*i64"}
    yield Variant("sample", sampling.sample_kernel, sampling.settings(128_256), capability, chosen)
    both = token_logprobs.settings(128_256, 20)
    yield Variant("logprobs piece", token_logprobs.logprobs_piece_kernel, both["piece"], capability, types)
    yield Variant("logprobs row", token_logprobs.logprobs_row_kernel, both["row"], capability, types)
