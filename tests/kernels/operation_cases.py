"""Checks of the operations around attention against `paged_kernels.reference`: one row of OPERATIONS for each.

A check takes (dtype, device, backend) and raises AssertionError. All start from data where every special case of the
contract occurs: skipped slots and entries, rows of zeros, strided views, sizes that are no power of two.
"""

import torch
from kernel_cases import TOLERANCE, make_caches

from paged_kernels import ops

# A result may round twice, so that two steps of a type lie between the sides of a boundary.
TWO_STEPS = TOLERANCE | {torch.bfloat16: {"atol": 1e-3, "rtol": 1.7e-2}}
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


def randn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def both(name, backend, *arguments, **options):
    """Results of an operation as tuples: of the backend and of the reference."""
    results = [getattr(ops, name)(*arguments, backend=b, **options) for b in (backend, "reference")]
    return [r if isinstance(r, tuple) else (r,) for r in results]


def agree(name, backend, *arguments, exact=False, **options):
    """Backend and reference agree, and no argument has changed."""
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    for own, expected in zip(*both(name, backend, *arguments, **options), strict=True):
        tolerance = (
            {"rtol": 0, "atol": 0} if exact else TWO_STEPS[own.dtype if own.is_floating_point() else torch.float32]
        )
        torch.testing.assert_close(own, expected, **tolerance, equal_nan=True)
    for argument, old in zip(arguments, before, strict=True):
        if isinstance(old, torch.Tensor):
            torch.testing.assert_close(argument, old, rtol=0, atol=0, equal_nan=True)


# --- the KV cache ---


def slots_of(tokens, blocks, page, device, seed=0):
    """Distinct slots in random order, some skipped."""
    slots = torch.randperm(blocks * page, generator=torch.Generator().manual_seed(seed))[:tokens]
    slots[[0, tokens // 2]] = -1
    return slots.to(device)


def quantised_caches(blocks, heads, page, dim, cache_dtype, scales, device):
    """(k_cache, v_cache, k_scale, v_scale) full of a value no test writes."""
    caches = [torch.full((blocks, heads, page, dim), 3, dtype=torch.int8).view(cache_dtype) for _ in range(2)]
    shape = () if scales == "tensor" else (blocks, heads, page)
    values = [torch.full(shape, 2.0**-6 * (i + 1)) for i in range(2)]
    return [t.to(device) for t in (*caches, *values)]


def check_written(name, backend, inputs, caches, **options):
    """The operation fills caches as the reference does: scales bit for bit, values but for a rounding of few.

    inputs: query (or none), key, value, tables of RoPE; caches as `quantised_caches` gives, or two plain ones.
    """
    results = []
    for b in (backend, "reference"):
        copies = [t.clone() for t in caches]
        extra = copies[2:]
        if name == "rope_write_kv":
            scales = dict(zip(("k_scale", "v_scale"), extra, strict=False))
            results.append((ops.rope_write_kv(*inputs, *copies[:2], options["slots"], backend=b, **scales), *copies))
        else:
            getattr(ops, name)(*inputs, *copies[:2], options["slots"], *extra, backend=b)
            results.append((None, *copies))
    for own, expected in zip(*results, strict=True):
        if own is None:
            continue
        if own.dtype in ops.QUANTISED_DTYPES:
            # Neighbouring values differ by one step; a division may fall on either side of a tie.
            steps = (steps_from_zero(own) - steps_from_zero(expected)).abs()
            assert steps.max() <= 1
            assert (steps > 0).float().mean() < 0.01
        else:
            torch.testing.assert_close(own, expected, **TOLERANCE[own.dtype], equal_nan=True)


def steps_from_zero(x):
    """How many values of its type lie between 0 and each element, negative below 0."""
    bits = x.view(torch.int8).int()
    return bits if x.dtype == INT8 else torch.where(bits < 0, -(bits & 127), bits)


def quantisable(shape, dtype, device, seed, cache_dtype):
    """Values around the scales of `quantised_caches`: some too large for a type, a head of zeros."""
    if device == "cpu" and cache_dtype != INT8:
        # Triton-lang's interpreter rounds to 8-bit floats wrongly (it loses carries into the exponent, and
        # subnormals): values that need no rounding still show everything else.
        bits = torch.randint(0, 120, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)
        signs = randn(*shape, seed=seed + 9).sign()
        x = bits.view(cache_dtype).float() * signs * 2**-6
        x[..., 0] = ops.QUANTISED_DTYPES[cache_dtype] * 2**-6
        x[1] *= 8
    else:
        x = randn(*shape, seed=seed)
        x[1] *= 1e4
        x[3] *= 1e-4
    x[2, 0] = 0
    return x.to(dtype).to(device)


def check_write_kv_quantised(dtype, device, backend):
    page, heads, dim, tokens = 16, 3, 80, 9
    types = (E5M2, INT8) if device != "cpu" and torch.cuda.get_device_capability() < (8, 9) else (E4M3, E5M2, INT8)
    for cache_dtype in types:
        for scales in ("tensor", "token"):
            caches = quantised_caches(4, heads, page, dim, cache_dtype, scales, device)
            rows = [quantisable((tokens, heads, dim), dtype, device, seed, cache_dtype) for seed in (1, 2)]
            slots = slots_of(tokens, 4, page, device)
            check_written("write_kv_quantised", backend, rows, caches, slots=slots)


def check_rope_write_kv(dtype, device, backend):
    for page, q_heads, heads, dim, half, scales in (
        (16, 6, 2, 64, 32, None), (8, 5, 1, 80, 20, None), (64, 4, 4, 128, 64, "token"), (16, 3, 3, 96, 48, "tensor"),
    ):  # fmt: skip
        tokens, width = 7, (q_heads + 2 * heads) * dim
        fused = randn(tokens, width, seed=dim, dtype=dtype, device=device).view(tokens, -1, dim)
        inputs = [fused[:, :q_heads], fused[:, q_heads : q_heads + heads], fused[:, q_heads + heads :]]
        angles = randn(tokens, half, seed=3) * 5
        inputs += [table.to(dtype).to(device) for table in (angles.cos(), angles.sin())]
        if scales is None:
            caches = [cache.to(device) for cache in make_caches(4, heads, page, dim, dtype, fill=7.0)]
        else:
            caches = quantised_caches(4, heads, page, dim, INT8, scales, device)
        check_written("rope_write_kv", backend, inputs, caches, slots=slots_of(tokens, 4, page, device))


def check_copy_blocks(dtype, device, backend):
    cache = randn(3, 12, 2, 16, 20, dtype=dtype, device=device)
    pairs = torch.tensor([[1, 7], [-1, -1], [4, 2], [1, 11]], device=device)
    expected = cache.clone()
    for source, destination in ((1, 7), (4, 2), (1, 11)):
        expected[:, destination] = cache[:, source]
    ops.copy_blocks(cache, cache, pairs, backend=backend)
    assert torch.equal(cache, expected)
    # Out to a staging buffer and back, through strided halves of a larger tensor, in a quantised type.
    whole = torch.arange(2 * 6 * 2 * 40, dtype=torch.int16).to(torch.int8).view(6, 2, 2, 40).to(device)
    cache = whole.transpose(0, 1).view(E5M2)
    staging = torch.zeros(2, 3, 2, 40, dtype=torch.int8, device=device).view(E5M2)
    out = torch.tensor([[5, 0], [1, 2]], device=device)
    ops.copy_blocks(cache, staging, out, backend=backend)
    bits, kept = staging.view(torch.int8), cache.view(torch.int8)
    assert torch.equal(bits[:, 0], kept[:, 5]) and torch.equal(bits[:, 2], kept[:, 1]) and not bits[:, 1].any()
    before = kept.clone()
    cache.view(torch.int8)[:, [1, 5]] = 0
    ops.copy_blocks(staging, cache, out.flip(1).contiguous(), backend=backend)
    assert torch.equal(cache.view(torch.int8), before)
    ops.copy_blocks(staging, cache, out[:0], backend=backend)
    assert torch.equal(cache.view(torch.int8), before)


# --- layers ---


def check_rms_norm(dtype, device, backend):
    for shape in ((5, 96), (3, 4, 64), (2, 1000)):
        x = randn(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device)[..., : shape[-1]]
        x[0] = 0
        weight = randn(shape[-1], seed=1, dtype=dtype, device=device)
        for unit_offset in (False, True):
            agree("rms_norm", backend, x, weight, 1e-6, unit_offset=unit_offset)
    assert not ops.rms_norm(x, weight, 1e-6, backend=backend)[0].any()


def check_add_rms_norm(dtype, device, backend):
    x, residual = (randn(6, 300, seed=s, dtype=dtype, device=device) for s in (0, 1))
    weight = randn(300, seed=2, dtype=dtype, device=device)
    for unit_offset in (False, True):
        agree("add_rms_norm", backend, x, residual, weight, 1e-5, unit_offset=unit_offset)


def check_silu_mul(dtype, device, backend):
    gate_up = randn(5, 2 * 1100, dtype=dtype, device=device) * 3
    gate_up[0] = 0
    gate_up[1, :4] = torch.tensor([-1e4, 1e4, -90.0, 30.0])
    gate_up[1, 1100:1104] = 1
    agree("silu_mul", backend, gate_up)
    assert not ops.silu_mul(gate_up, backend=backend)[0].any()
    agree("silu_mul", backend, randn(3, 64, dtype=dtype, device=device)[:, :30])


# --- after the logits ---


def check_penalise(dtype, device, backend):
    rows, vocabulary = 4, 1500
    logits = randn(rows, vocabulary + 7, dtype=dtype, device=device)[:, :vocabulary] * 4
    logits[0, 3], logits[0, 4], logits[0, 5] = float("-inf"), float("nan"), 1e4
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randperm(vocabulary, generator=generator)[:n] for n in (100, 1, 70)]
    tokens[0][:3] = torch.tensor([3, 4, 5])
    entry_rows = torch.cat(
        [torch.full((len(t),), r) for r, t in zip((0, 2, 3), tokens, strict=True)] + [torch.tensor([-1])]
    )
    entry_tokens = torch.cat([*tokens, torch.tensor([vocabulary * 99])])
    counts = torch.randint(0, 5, entry_tokens.shape, generator=generator).float()
    per_row = [[1.3, 1.0, 1e-38, 0.5], [0.1, 0.0, -2.0, 1.0], [0.5, 0.0, 0.0, -0.25], [0.7, 0.0, 1.0, 2.5]]
    arguments = [t.to(device) for t in (entry_rows, entry_tokens, counts, *map(torch.tensor, per_row))]
    agree("penalise", backend, logits, *arguments, exact=True)
    agree("penalise", backend, logits, *(t[:0] for t in arguments[:3]), *arguments[3:], exact=True)


def sampling_case(rows, vocabulary, device, seed=0):
    """Arguments of ops.sample: every filter alone and with others, ties, greedy rows and broken ones."""
    logits = randn(rows, vocabulary, seed=seed) * 3
    logits[0::5] = logits[0::5].round()  # many equal tokens
    logits[1::5, : vocabulary // 2] = float("-inf")
    generator = torch.Generator().manual_seed(seed)

    def pick(*values):
        return torch.tensor(values)[torch.randint(0, len(values), (rows,), generator=generator)]

    arguments = [
        logits, pick(1.0, 0.3, 2.0, 0.0, 1.0), pick(0, -1, 1, 3, 50, vocabulary), pick(1.0, 0.9, 0.5, 0.05, 1.0),
        pick(0.0, 0.0, 0.1), torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        torch.randint(0, 2**20, (rows,), generator=generator),
    ]  # fmt: skip
    return [a.to(device) for a in arguments]


def check_sample(dtype, device, backend):
    arguments = sampling_case(40, 300, device)
    own, expected = (ops.sample(*arguments, backend=b) for b in (backend, "reference"))
    # exp may differ in its last bit, which can move a boundary of the distribution across the number drawn.
    assert (own != expected).sum() <= 1
    rows = [a[:3] for a in arguments]
    rows[0][0, 5], rows[0][1, 7], rows[0][2] = float("nan"), float("inf"), float("-inf")
    assert ops.sample(*rows, backend=backend).tolist() == [-1, -1, -1]
    assert ops.sample(*(a[:0] for a in arguments), backend=backend).shape == (0,)


def check_token_logprobs(dtype, device, backend):
    logits = randn(6, 5000, device=device) * 3
    logits[1] = logits[1].round()
    logits[2, 7:] = float("-inf")
    logits[3, :10] = torch.tensor([0.0, -0.0] * 5)
    logits[3, 10:] = -1
    tokens = torch.tensor([17, 4999, 4000, 3, -1, 0], device=device)
    for count in (0, 1, 12):
        agree("token_logprobs", backend, logits, tokens, count)
    agree("token_logprobs", backend, logits[:, :5], tokens.clamp(max=4), 20)


OPERATIONS = {
    # operation: (check, whether it depends on the type of its input)
    "write_kv_quantised": (check_write_kv_quantised, True),
    "rope_write_kv": (check_rope_write_kv, True),
    "copy_blocks": (check_copy_blocks, True),
    "rms_norm": (check_rms_norm, True),
    "add_rms_norm": (check_add_rms_norm, True),
    "silu_mul": (check_silu_mul, True),
    "penalise": (check_penalise, True),
    "sample": (check_sample, False),
    "token_logprobs": (check_token_logprobs, False),
}


def operation_grid(*dtypes):
    """(operation, dtype) pairs: each operation with each type that makes a difference."""
    return [(name, d) for name, (_, typed) in OPERATIONS.items() for d in (dtypes if typed else (torch.float32,))]


def check_operation(name, dtype, device, backend):
    OPERATIONS[name][0](dtype, device, backend)
