"""Contract of paged attention: its documentation and its checks."""

import torch

from paged_kernels.arguments import QUANTISED_DTYPES, Bounds, Options
from paged_kernels.backends import fail, implementation


def check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, like: torch.Tensor, quantised: bool) -> None:
    """Two caches of one shape, of the type of `like` or, where quantised, of one of 8 bits."""
    for name, cached in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cached.dim() != 4:
            fail(name, "must be [num_blocks, num_kv_heads, block_size, head_dim]")
        if cached.stride(3) != 1:
            fail(name, "last dimension must be contiguous")
        if quantised and (cached.dtype not in QUANTISED_DTYPES or cached.dtype != k_cache.dtype):
            fail(name, f"dtype must be float8_e4m3fn, float8_e5m2 or int8, the same for both; not {cached.dtype}")
        if not quantised and cached.dtype in QUANTISED_DTYPES:
            fail(name, f"a cache of {cached.dtype} needs k_scale and v_scale")
        if not quantised and cached.dtype != like.dtype:
            fail(name, f"dtype {cached.dtype} differs from {like.dtype}")
        if cached.device != like.device:
            fail(name, f"is on {cached.device}, not {like.device}")
    if v_cache.shape != k_cache.shape:
        fail("v_cache", "shape differs from k_cache")


def check_scales(k_scale: torch.Tensor, v_scale: torch.Tensor, k_cache: torch.Tensor) -> None:
    """Both per tensor ([], one number) or both per token and head ([num_blocks, num_kv_heads, block_size])."""
    per_token = k_cache.shape[:3]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.dtype != torch.float32 or scale.device != k_cache.device:
            fail(name, f"must be float32 on {k_cache.device}")
        if scale.dim() != 0 and scale.shape != per_token:
            fail(name, f"must have shape [] or {list(per_token)}, not {list(scale.shape)}")
        if scale.dim() and scale.stride(2) != 1:
            fail(name, "last dimension must be contiguous")
    if v_scale.shape != k_scale.shape or v_scale.stride() != k_scale.stride():
        fail("v_scale", "shape or strides differ from k_scale")


def _check_lengths(query, block_tables, seq_lens, query_start_loc):
    num_seqs = seq_lens.shape[0]
    named = (("block_tables", block_tables), ("seq_lens", seq_lens), ("query_start_loc", query_start_loc))
    for name, tensor in named:
        if tensor.dtype != torch.int32:
            fail(name, f"must be int32, not {tensor.dtype}")
        if tensor.device != query.device:
            fail(name, f"must be on {query.device}")
    if seq_lens.dim() != 1 or not seq_lens.is_contiguous():
        fail("seq_lens", "must be contiguous [num_seqs]")
    if query_start_loc.shape != (num_seqs + 1,) or not query_start_loc.is_contiguous():
        fail("query_start_loc", f"must be contiguous with {num_seqs + 1} entries")
    if block_tables.dim() != 2 or block_tables.shape[0] != num_seqs or block_tables.stride(1) != 1:
        fail("block_tables", f"must be [{num_seqs}, max_blocks] with contiguous rows")


def _check_bounds(bounds: Bounds, num_seqs: int, rows: int) -> None:
    if not 0 <= bounds.num_decodes <= min(num_seqs, rows):
        fail("num_decodes", f"{bounds.num_decodes} is not between 0 and the number of sequences and query rows")
    if not bounds.num_decodes <= bounds.num_short <= num_seqs:
        fail("num_short", f"{bounds.num_short} is not between num_decodes and the number of sequences")
    for name in ("max_query_len", "max_seq_len"):
        if getattr(bounds, name) < 0:
            fail(name, "must not be negative")
    if bounds.total_seq_len is not None and bounds.total_seq_len < 0:
        fail("total_seq_len", "must not be negative")


def _check_query(query, k_cache, out):
    heads, dim = k_cache.shape[1], k_cache.shape[3]
    if query.dim() != 3 or query.shape[2] != dim:
        fail("query", f"must be [total_q, num_q_heads, {dim}], as the cache, not {list(query.shape)}")
    if query.stride(2) != 1:
        fail("query", "last dimension must be contiguous")
    if query.shape[1] == 0 or query.shape[1] % heads:
        fail("query", f"{query.shape[1]} query heads are not a multiple of {heads} kv heads")
    if out is None:
        return
    if out.shape != query.shape or out.dtype != query.dtype or out.device != query.device:
        fail("out", f"must be {query.dtype} {list(query.shape)} on {query.device}, as query")
    if out.stride(2) != 1:
        fail("out", "last dimension must be contiguous")


def _check_options(options: Options, query: torch.Tensor, k_cache: torch.Tensor) -> None:
    if options.window is not None and options.window < 1:
        fail("window", f"must be at least 1, the token itself, or None; not {options.window}")
    if options.soft_cap is not None and not options.soft_cap > 0:
        fail("soft_cap", f"must be positive or None; not {options.soft_cap}")
    for name in ("alibi_slopes", "sinks"):
        tensor = getattr(options, name)
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or tensor.shape != query.shape[1:2] or tensor.device != query.device:
            fail(name, f"must be float32 [{query.shape[1]}], one per query head, on {query.device}")
        if not tensor.is_contiguous():
            fail(name, "must be contiguous")
    if (options.k_scale is None) != (options.v_scale is None):
        fail("v_scale", "k_scale and v_scale must be given together")
    if options.k_scale is not None and options.v_scale is not None:
        check_scales(options.k_scale, options.v_scale, k_cache)


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
    num_short: int | None = None,
    total_seq_len: int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch of queries over their sequences' cached keys and values.

    query: [total_q, num_q_heads, head_dim], may be a strided view. seq_lens: int32 [num_seqs], the context
    including this step's tokens, whose keys are already in the cache. query_start_loc: int32 [num_seqs + 1];
    query i of q_len sits at position seq_len - q_len + i. The first num_decodes sequences have exactly one
    query token each, the first num_short (None: num_decodes) at most eight: those are split over their contexts
    even if they are few, as verifying speculated tokens needs. max_query_len, max_seq_len and total_seq_len (None:
    not known) bound this batch's lengths and their sum (host integers; nothing here waits for the device).
    Returns out [total_q, num_q_heads, head_dim]; rows of sequences with seq_len 0 and rows past query_start_loc[-1]
    are zeros.

    A score is query . key * scale; then, in this order:
    soft_cap: cap * tanh(score / cap) (Gemma 2).
    alibi_slopes: float32 [num_q_heads]; slope * (key position - query position) is added (Press et al. 2022).
    window: a query sees the last `window` positions up to its own, itself included (Mistral's sliding window);
    None: all. Blocks wholly before the window of a sequence's first query here are not read: their table entries
    may be anything.
    sinks: float32 [num_q_heads], one more score per head that takes part in the softmax and has no value (gpt-oss).

    A cache of float8_e4m3fn, float8_e5m2 or int8 is multiplied by k_scale and v_scale: float32 [] (one number) or
    [num_blocks, num_kv_heads, block_size] (one per token and head), on the device.
    The cpu backend computes all options but the window with the reference.
    Raises ValueError naming the argument at fault. Longer than a screen because every argument is explained here.
    """
    if num_short is None:
        num_short = num_decodes
    bounds = Bounds(num_decodes, num_short, max_query_len, max_seq_len, total_seq_len)
    options = Options(window, soft_cap, alibi_slopes, sinks, k_scale, v_scale)
    check_caches(k_cache, v_cache, query, k_scale is not None)
    _check_query(query, k_cache, out)
    _check_lengths(query, block_tables, seq_lens, query_start_loc)
    _check_bounds(bounds, seq_lens.shape[0], query.shape[0])
    if window is not None or not options.window_only:
        _check_options(options, query, k_cache)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if backend == "cpu" and not options.window_only:
        backend = "reference"
    attend = implementation("paged_attention", backend, query.dtype, query.device)
    if query.shape[0] == 0:
        return out
    if seq_lens.shape[0] == 0 or k_cache.shape[0] == 0:
        return out.zero_()
    batch = (query, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale)
    if backend == "cpu":
        attend(*batch, num_decodes, max_query_len, max_seq_len, window, out)
    else:
        attend(*batch, bounds, options, out)
    return out
