"""Attention over a paged KV cache: the one public module of `paged_kernels`.

Checks arguments and hands them to a backend: `triton` (Triton-lang kernels, CUDA or interpreted), `cpu` (numba)
or `reference` (plain torch). Triton-lang and numba are imported only when their backend is used. Knows
tensors only: no requests, no scheduler, no model.

Shapes used throughout
    k_cache, v_cache  [num_blocks, num_kv_heads, block_size, head_dim], any strides, last dimension contiguous
    slot              block id * block_size + offset within the block
    block_tables      int32 [num_seqs, max_blocks]; entries past a sequence's last block are never read
"""

import importlib
import importlib.util
import os
from functools import cache

import torch

BACKENDS = ("triton", "cpu", "reference")

_MODULES = {
    "triton": "paged_kernels.triton_dispatch",
    "cpu": "paged_kernels.cpu.dispatch",
    "reference": "paged_kernels.reference",
}
_PACKAGES = {"triton": "triton", "cpu": "numba"}
_DTYPES = {
    "triton": (torch.float32, torch.float16, torch.bfloat16),
    "cpu": (torch.float32, torch.bfloat16),
    "reference": (torch.float32, torch.float16, torch.bfloat16),
}


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "True")


def resolve_backend(requested: str, device: torch.device | str) -> str:
    """The backend to use on a device: `auto` gives `triton` on CUDA and `cpu` on a CPU.

    Raises ValueError for an unknown name, for a backend that cannot run on the device, and when the package
    it needs is not installed.
    """
    kind = torch.device(device).type
    if requested != "auto" and requested not in BACKENDS:
        choices = ", ".join(("auto", *BACKENDS))
        raise ValueError(f"attention_backend {requested!r} is unknown; choose one of {choices}")
    backend = requested
    if requested == "auto":
        backend = "triton" if kind == "cuda" else "cpu"
    if backend == "triton" and kind != "cuda" and not _interpreted():
        raise ValueError(
            f"attention_backend 'triton' needs a CUDA device, not {kind!r}; set TRITON_INTERPRET=1 before "
            "starting to run the Triton-lang kernels interpreted, or use 'cpu'"
        )
    if backend == "cpu" and kind != "cpu":
        raise ValueError(f"attention_backend 'cpu' runs on CPU tensors, not on {kind!r}; use 'triton'")
    package = _PACKAGES.get(backend)
    if package and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"attention_backend {backend!r} needs the Python package {package!r}, which is not installed; "
            f"install it (pip install {package}) or use attention_backend 'reference'"
        )
    return backend


@cache
def _implementation(backend: str, dtype: torch.dtype, device: torch.device):
    """The module that holds a backend's functions; refuses what it cannot run."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; choose one of {', '.join(BACKENDS)}")
    if dtype not in _DTYPES[backend]:
        names = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES[backend])
        raise ValueError(f"backend {backend!r} supports {names}, not {dtype}")
    resolve_backend(backend, device)
    return importlib.import_module(_MODULES[backend])


# The checks run at every layer of every step: messages are put together only once something is wrong.


def _fail(name: str, problem: str):
    raise ValueError(f"{name}: {problem}")


def _check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, like: torch.Tensor) -> None:
    for name, cached in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cached.dim() != 4:
            _fail(name, "must be [num_blocks, num_kv_heads, block_size, head_dim]")
        if cached.stride(3) != 1:
            _fail(name, "last dimension must be contiguous")
        if cached.dtype != like.dtype:
            _fail(name, f"dtype {cached.dtype} differs from {like.dtype}")
        if cached.device != like.device:
            _fail(name, f"is on {cached.device}, not {like.device}")
    if v_cache.shape != k_cache.shape:
        _fail("v_cache", "shape differs from k_cache")


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: str,
) -> None:
    """Store the keys and values of new tokens in their cache slots; no other slot changes.

    key, value: [num_tokens, num_kv_heads, head_dim], may be strided views (of a fused QKV tensor, say) with a
    contiguous last dimension. slot_mapping: int64 [num_tokens]; -1 skips the token. Slots must be distinct
    and inside the cache (not checked: that would wait for the device).
    Raises ValueError naming the argument at fault.
    """
    _check_caches(k_cache, v_cache, key)
    heads, dim = k_cache.shape[1], k_cache.shape[3]
    for name, rows in (("key", key), ("value", value)):
        if rows.dim() != 3 or rows.shape[1] != heads or rows.shape[2] != dim:
            _fail(name, f"must be [num_tokens, {heads}, {dim}], as the cache, not {list(rows.shape)}")
        if rows.stride(2) != 1:
            _fail(name, "last dimension must be contiguous")
        if rows.dtype != key.dtype:
            _fail(name, f"dtype {rows.dtype} differs from {key.dtype}")
    if value.shape != key.shape:
        _fail("value", "shape differs from key")
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != key.shape[:1]:
        _fail("slot_mapping", f"must be int64 with {key.shape[0]} entries, one per token")
    if not slot_mapping.is_contiguous() or slot_mapping.device != key.device:
        _fail("slot_mapping", f"must be contiguous and on {key.device}")
    module = _implementation(backend, key.dtype, key.device)
    if key.shape[0]:
        module.write_kv(key, value, k_cache, v_cache, slot_mapping)


def _check_lengths(query, block_tables, seq_lens, query_start_loc, num_decodes):
    num_seqs = seq_lens.shape[0]
    named = (("block_tables", block_tables), ("seq_lens", seq_lens), ("query_start_loc", query_start_loc))
    for name, tensor in named:
        if tensor.dtype != torch.int32:
            _fail(name, f"must be int32, not {tensor.dtype}")
        if tensor.device != query.device:
            _fail(name, f"must be on {query.device}")
    if seq_lens.dim() != 1 or not seq_lens.is_contiguous():
        _fail("seq_lens", "must be contiguous [num_seqs]")
    if query_start_loc.shape != (num_seqs + 1,) or not query_start_loc.is_contiguous():
        _fail("query_start_loc", f"must be contiguous with {num_seqs + 1} entries")
    if block_tables.dim() != 2 or block_tables.shape[0] != num_seqs or block_tables.stride(1) != 1:
        _fail("block_tables", f"must be [{num_seqs}, max_blocks] with contiguous rows")
    if not 0 <= num_decodes <= min(num_seqs, query.shape[0]):
        _fail("num_decodes", f"{num_decodes} is not between 0 and the number of sequences and query rows")


def _check_query(query, k_cache, out):
    heads, dim = k_cache.shape[1], k_cache.shape[3]
    if query.dim() != 3 or query.shape[2] != dim:
        _fail("query", f"must be [total_q, num_q_heads, {dim}], as the cache, not {list(query.shape)}")
    if query.stride(2) != 1:
        _fail("query", "last dimension must be contiguous")
    if query.shape[1] == 0 or query.shape[1] % heads:
        _fail("query", f"{query.shape[1]} query heads are not a multiple of {heads} kv heads")
    if out is None:
        return
    if out.shape != query.shape or out.dtype != query.dtype or out.device != query.device:
        _fail("out", f"must be {query.dtype} {list(query.shape)} on {query.device}, as query")
    if out.stride(2) != 1:
        _fail("out", "last dimension must be contiguous")


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
    backend: str,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch of queries over their sequences' cached keys and values.

    query: [total_q, num_q_heads, head_dim], may be a strided view. seq_lens: int32 [num_seqs], the context
    including this step's tokens, whose keys are already in the cache. query_start_loc: int32 [num_seqs + 1];
    query i of q_len sits at position seq_len - q_len + i. The first num_decodes sequences have exactly one
    query token each. max_query_len and max_seq_len bound this batch's lengths (host integers; nothing here
    waits for the device). Returns out [total_q, num_q_heads, head_dim]; rows of sequences with seq_len 0 and
    rows past query_start_loc[-1] are zeros.
    window: a query sees the last `window` positions up to its own, itself included (Mistral's sliding window);
    None: all. Blocks wholly before the window of a sequence's first query here are not read: their table entries
    may be anything.
    Raises ValueError naming the argument at fault.
    """
    _check_caches(k_cache, v_cache, query)
    _check_query(query, k_cache, out)
    _check_lengths(query, block_tables, seq_lens, query_start_loc, num_decodes)
    if max_query_len < 0:
        _fail("max_query_len", "must not be negative")
    if max_seq_len < 0:
        _fail("max_seq_len", "must not be negative")
    if window is not None and window < 1:
        _fail("window", f"must be at least 1, the token itself, or None; not {window}")
    module = _implementation(backend, query.dtype, query.device)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if query.shape[0] == 0:
        return out
    if seq_lens.shape[0] == 0 or k_cache.shape[0] == 0:
        return out.zero_()
    module.paged_attention(
        query, k_cache, v_cache, block_tables, seq_lens, query_start_loc,
        scale, num_decodes, max_query_len, max_seq_len, window, out,
    )  # fmt: skip
    return out


def warmup(
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    backend: str,
    window: int | None = None,
) -> None:
    """Compile what a model of these sizes and attention window will use, so that no request waits for a compiler.

    Runs every kernel once on a tiny cache, on the current CUDA device for `triton` unless interpreted.
    Raises ValueError for an unknown backend or an unsupported dtype.
    """
    on_gpu = backend == "triton" and torch.cuda.is_available() and not _interpreted()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    _implementation(backend, dtype, device)
    shape = (2, num_kv_heads, block_size, head_dim)
    k_cache, v_cache = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    ints = {"dtype": torch.int32, "device": device}
    rows = torch.zeros(4, num_q_heads, head_dim, dtype=dtype, device=device)
    slots = torch.full((4,), -1, dtype=torch.int64, device=device)
    write_kv(rows[:, :num_kv_heads], rows[:, :num_kv_heads], k_cache, v_cache, slots, backend=backend)
    # Launch settings depend on the bounds: one token or a full chunk, one split or several.
    for longest_query, longest in ((1, 1), (max(1, 64 * num_kv_heads // num_q_heads), 1 << 16), (4096, 1)):
        paged_attention(
            rows, k_cache, v_cache,
            torch.ones(3, 2, **ints), torch.tensor([1, 1, 2], **ints), torch.tensor([0, 1, 2, 4], **ints),
            scale=1.0, num_decodes=2, max_query_len=longest_query, max_seq_len=longest, backend=backend,
            window=window,
        )  # fmt: skip
