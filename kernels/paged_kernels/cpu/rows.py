"""What happens to single rows between the matrix products (CPU): embedding, RMSNorm, rotary embedding and KV write.

The residual stream is float32 [tokens, hidden] whatever the weights are; products take rows in the weights' own type.
A work item is a number of rows. Sources: RMSNorm (Zhang and Sennrich, 2019), RoPE (Su et al., 2021; element i pairs
with element i + head_dim / 2, as in transformers' Llama).
"""

import zlib
from functools import cache
from pathlib import Path

import numpy as np
from numba import carray

from paged_kernels.cpu.micro import copy_row
from paged_kernels.cpu.primitives import fetch_add, pointer
from paged_kernels.cpu.products import TAG, normalize, rotate
from paged_kernels.cpu.runtime import UNBOUNDED, Arguments, compile_kernel

_TAG = zlib.crc32(Path(__file__).read_bytes(), TAG)

EMBED_ARGUMENTS = Arguments("ids table out", "rows size rows_per_item")
NORM_ARGUMENTS = Arguments("x weight out", "rows size rows_per_item", "eps")
QKV_ARGUMENTS = Arguments(
    "qkv cos sin slots query k_cache v_cache q_norm k_norm",
    "tokens tokens_per_item q_heads kv_heads block_size has_norm k_block k_head k_token v_block v_head v_token",
    "eps",
)


@cache
def build_embed(element: type):
    """out[t] = table[ids[t]], widened to float32."""
    tag = _TAG

    def embed(arguments, taken, items):
        _ = tag
        args = carray(arguments, 1)[0]
        ids = carray(pointer(args.ids), args.rows, np.int64)
        table = carray(pointer(args.table), UNBOUNDED, element)
        out = carray(pointer(args.out), UNBOUNDED, np.float32)
        counter = carray(taken, 1)
        done = 0
        while True:
            item = fetch_add(counter, 0)
            if item >= items:
                return done
            done += 1
            for row in range(item * args.rows_per_item, min(args.rows, (item + 1) * args.rows_per_item)):
                to, at = row * args.size, ids[row] * args.size
                whole = args.size // 16 * 16
                for i in range(0, whole, 16):
                    copy_row(out, to + i, table, at + i, 16)
                for i in range(whole, args.size):
                    copy_row(out, to + i, table, at + i, 1)

    return compile_kernel(embed, EMBED_ARGUMENTS)


@cache
def build_norm(element: type):
    """out[t] = x[t] / rms(x[t]) * weight."""
    tag = _TAG

    def norm(arguments, taken, items):
        _ = tag
        args = carray(arguments, 1)[0]
        x = carray(pointer(args.x), UNBOUNDED, np.float32)
        weight = carray(pointer(args.weight), args.size, np.float32)
        out = carray(pointer(args.out), UNBOUNDED, element)
        counter = carray(taken, 1)
        done = 0
        while True:
            item = fetch_add(counter, 0)
            if item >= items:
                return done
            done += 1
            for row in range(item * args.rows_per_item, min(args.rows, (item + 1) * args.rows_per_item)):
                normalize(out, row * args.size, x, row * args.size, weight, args.size, args.eps)

    return compile_kernel(norm, NORM_ARGUMENTS)


@cache
def build_qkv(head_dim: int, element: type):
    """Split fused projections: queries, normed if the model does that and rotated, go to `query` [tokens, q_heads,
    head_dim]; keys, likewise, and values to their cache slots (slot -1: nowhere)."""
    tag, dim, half = _TAG, head_dim, head_dim // 2

    def split(arguments, taken, items):
        _ = tag
        args = carray(arguments, 1)[0]
        qkv = carray(pointer(args.qkv), UNBOUNDED, np.float32)
        cos = carray(pointer(args.cos), args.tokens * half, np.float32)
        sin = carray(pointer(args.sin), args.tokens * half, np.float32)
        slots = carray(pointer(args.slots), args.tokens, np.int64)
        query = carray(pointer(args.query), UNBOUNDED, element)
        k_cache = carray(pointer(args.k_cache), UNBOUNDED, element)
        v_cache = carray(pointer(args.v_cache), UNBOUNDED, element)
        q_norm = carray(pointer(args.q_norm), dim, np.float32)
        k_norm = carray(pointer(args.k_norm), dim, np.float32)
        counter = carray(taken, 1)
        heads, kv_heads = args.q_heads, args.kv_heads
        done = 0
        while True:
            item = fetch_add(counter, 0)
            if item >= items:
                return done
            done += 1
            for token in range(item * args.tokens_per_item, min(args.tokens, (item + 1) * args.tokens_per_item)):
                at = token * (heads + 2 * kv_heads) * dim
                for head in range(heads):
                    if args.has_norm:
                        normalize(qkv, at, qkv, at, q_norm, dim, args.eps)
                    rotate(query, (token * heads + head) * dim, qkv, at, cos, sin, token * half, half)
                    at += dim
                slot = slots[token]
                if slot < 0:
                    continue
                block = slot // args.block_size
                offset = slot - block * args.block_size
                for head in range(kv_heads):
                    if args.has_norm:
                        normalize(qkv, at, qkv, at, k_norm, dim, args.eps)
                    to = block * args.k_block + head * args.k_head + offset * args.k_token
                    rotate(k_cache, to, qkv, at, cos, sin, token * half, half)
                    at += dim
                for head in range(kv_heads):
                    to = block * args.v_block + head * args.v_head + offset * args.v_token
                    copy_row(v_cache, to, qkv, at, dim)
                    at += dim

    return compile_kernel(split, QKV_ARGUMENTS)
