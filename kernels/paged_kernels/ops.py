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

import torch

BACKENDS = ("triton", "cpu", "reference")

_MODULES = {"triton": "paged_kernels.triton_dispatch", "cpu": "paged_kernels.cpu.dispatch"}
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


def _implementation(backend: str, tensor: torch.Tensor):
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; choose one of {', '.join(BACKENDS)}")
    if tensor.dtype not in _DTYPES[backend]:
        names = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES[backend])
        raise ValueError(f"backend {backend!r} supports {names}, not {tensor.dtype}")
    if backend == "reference":
        return None
    resolve_backend(backend, tensor.device)
    return importlib.import_module(_MODULES[backend])


def _require(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {problem}")


def _check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, like: torch.Tensor) -> None:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _require(cache.dim() == 4, name, "must be [num_blocks, num_kv_heads, block_size, head_dim]")
        _require(cache.stride(3) == 1, name, "last dimension must be contiguous")
        _require(cache.dtype == like.dtype, name, f"dtype {cache.dtype} differs from {like.dtype}")
        _require(cache.device == like.device, name, f"is on {cache.device}, not {like.device}")
    _require(v_cache.shape == k_cache.shape, "v_cache", "shape differs from k_cache")


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
    _, heads, _, dim = k_cache.shape
    for name, rows in (("key", key), ("value", value)):
        _require(rows.dim() == 3, name, "must be [num_tokens, num_kv_heads, head_dim]")
        _require(rows.shape[1:] == (heads, dim), name, f"must have {heads} heads of {dim}, as the cache")
        _require(rows.stride(2) == 1, name, "last dimension must be contiguous")
        _require(rows.dtype == key.dtype, name, f"dtype {rows.dtype} differs from {key.dtype}")
    _require(value.shape == key.shape, "value", "shape differs from key")
    _require(slot_mapping.dtype == torch.int64, "slot_mapping", "must be int64")
    _require(slot_mapping.shape == key.shape[:1], "slot_mapping", "must have one entry per token")
    _require(slot_mapping.is_contiguous(), "slot_mapping", "must be contiguous")
    _require(slot_mapping.device == key.device, "slot_mapping", f"must be on {key.device}")
    module = _implementation(backend, key)
    if key.shape[0] == 0:
        return
    if module is None:
        from paged_kernels import reference as module
    module.write_kv(key, value, k_cache, v_cache, slot_mapping)


def _check_attention(query, k_cache, v_cache, block_tables, seq_lens, query_start_loc, num_decodes, out):
    _check_caches(k_cache, v_cache, query)
    heads, dim = k_cache.shape[1], k_cache.shape[3]
    _require(query.dim() == 3, "query", "must be [total_q, num_q_heads, head_dim]")
    _require(query.stride(2) == 1, "query", "last dimension must be contiguous")
    _require(query.shape[2] == dim, "query", f"head_dim {query.shape[2]} differs from the cache's {dim}")
    _require(
        query.shape[1] > 0 and query.shape[1] % heads == 0,
        "query",
        f"{query.shape[1]} query heads are not a multiple of {heads} kv heads",
    )
    num_seqs = seq_lens.shape[0]
    named = (("block_tables", block_tables), ("seq_lens", seq_lens), ("query_start_loc", query_start_loc))
    for name, tensor in named:
        _require(tensor.dtype == torch.int32, name, f"must be int32, not {tensor.dtype}")
        _require(tensor.device == query.device, name, f"must be on {query.device}")
    _require(seq_lens.dim() == 1 and seq_lens.is_contiguous(), "seq_lens", "must be contiguous [num_seqs]")
    _require(
        query_start_loc.shape == (num_seqs + 1,) and query_start_loc.is_contiguous(),
        "query_start_loc",
        f"must be contiguous with {num_seqs + 1} entries",
    )
    _require(
        block_tables.dim() == 2 and block_tables.shape[0] == num_seqs and block_tables.stride(1) == 1,
        "block_tables",
        f"must be [{num_seqs}, max_blocks] with contiguous rows",
    )
    _require(
        0 <= num_decodes <= min(num_seqs, query.shape[0]),
        "num_decodes",
        f"{num_decodes} is not between 0 and the number of sequences and query rows",
    )
    if out is not None:
        _require(out.shape == query.shape, "out", "shape differs from query")
        _require(out.dtype == query.dtype, "out", "dtype differs from query")
        _require(out.device == query.device, "out", f"must be on {query.device}")
        _require(out.stride(2) == 1, "out", "last dimension must be contiguous")


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch of queries over their sequences' cached keys and values.

    query: [total_q, num_q_heads, head_dim], may be a strided view. seq_lens: int32 [num_seqs], the context
    including this step's tokens, whose keys are already in the cache. query_start_loc: int32 [num_seqs + 1];
    query i of q_len sits at position seq_len - q_len + i. The first num_decodes sequences have exactly one
    query token each. max_query_len and max_seq_len bound this batch's lengths (host integers; nothing here
    waits for the device). Returns out [total_q, num_q_heads, head_dim]; rows of sequences with seq_len 0 and
    rows past query_start_loc[-1] are zeros.
    Raises ValueError naming the argument at fault.
    """
    _check_attention(query, k_cache, v_cache, block_tables, seq_lens, query_start_loc, num_decodes, out)
    _require(max_query_len >= 0, "max_query_len", "must not be negative")
    _require(max_seq_len >= 0, "max_seq_len", "must not be negative")
    module = _implementation(backend, query)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if query.shape[0] == 0:
        return out
    if seq_lens.shape[0] == 0 or k_cache.shape[0] == 0:
        return out.zero_()
    args = (query, k_cache, v_cache, block_tables, seq_lens, query_start_loc)
    if module is None:
        from paged_kernels import reference

        reference.paged_attention(*args, scale, out)
    else:
        module.paged_attention(*args, scale, num_decodes, max_query_len, max_seq_len, out)
    return out


def warmup(
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    backend: str,
) -> None:
    """Compile what a model of these sizes will use, so that no request waits for a compiler.

    Runs every kernel once on a tiny cache, on the current CUDA device for `triton` unless interpreted.
    Raises ValueError for an unknown backend or an unsupported dtype.
    """
    on_gpu = backend == "triton" and torch.cuda.is_available() and not _interpreted()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    if _implementation(backend, torch.empty(0, dtype=dtype, device=device)) is None:
        return
    shape = (2, num_kv_heads, block_size, head_dim)
    k_cache, v_cache = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    lens = [1, 2, min(2, block_size)]
    ints = {"dtype": torch.int32, "device": device}
    rows = torch.zeros(4, num_q_heads, head_dim, dtype=dtype, device=device)
    slots = torch.full((4,), -1, dtype=torch.int64, device=device)
    write_kv(rows[:, :num_kv_heads], rows[:, :num_kv_heads], k_cache, v_cache, slots, backend=backend)
    paged_attention(
        rows, k_cache, v_cache,
        torch.ones(3, 1, **ints), torch.tensor(lens, **ints), torch.tensor([0, 1, 2, 4], **ints),
        scale=1.0, num_decodes=2, max_query_len=2, max_seq_len=2, backend=backend,
    )  # fmt: skip
