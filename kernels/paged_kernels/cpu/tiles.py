"""Attention over a tile of tokens that lie anywhere in memory: scores, weighted sums, packing; emitted as LLVM IR.

Where each token's row is, an array of element offsets says, so that pages end here. `at` arrays are int64 and hold
offsets of valid rows also for the tokens that pad a tile; what is computed for those is masked or weighs nothing.

Scores put tokens along the lanes: each token's products are summed lane by lane, and the sums of 16 tokens are then
folded into one vector of 16 scores by a tree of shuffles.
bfloat16 is multiplied in pairs (`_Emit.pair_products`): along head_dim for scores, along tokens for weighted sums. The
order of every sum is fixed by the sizes alone. Only `look_up` knows pages; nothing here knows sequences or threads.
"""

import zlib
from pathlib import Path

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from paged_kernels.cpu.micro import _Emit, _literal, has_wide_registers
from paged_kernels.cpu.products import PANEL_OUTPUTS, TAG

TILE_TAG = zlib.crc32(Path(__file__).read_bytes(), TAG)
"""See `micro.BUILD_TAG`."""

LANES = 16
_LINE_BYTES = 64
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


@numba.njit
def look_up(args, tables, k_at, v_at, to, seq, head, start, span):
    """Where keys and values of `span` tokens from `start` lie, at k_at[to:] and v_at[to:], in whole sixteens.

    args: the record of an attention kernel. tables: int32, rows of block ids. k_at, v_at: int64, element offsets.
    """
    page = start // args.block_size
    within = start - page * args.block_size
    block = np.int64(0)
    for i in range(span):
        if i == 0 or within == args.block_size:
            page += i > 0
            within = within if i == 0 else 0
            block = np.int64(tables[seq * args.table_row + page])
        k_at[to + i] = block * args.k_block + head * args.k_head + within * args.k_token
        v_at[to + i] = block * args.v_block + head * args.v_head + within * args.v_token
        within += 1
    for i in range(span, (span + 15) // 16 * 16):
        k_at[to + i], v_at[to + i] = k_at[to + span - 1], v_at[to + span - 1]


def padded(head_dim: int) -> int:
    """Elements from one row of sums to the next: whole vectors."""
    return -(-head_dim // LANES) * LANES


def _row(emit, base, offset):
    """A row as 16-bit or 32-bit elements, whatever they mean."""
    data, is_bf16 = base
    return emit.b.bitcast(emit.b.gep(data, [offset]), (_I16 if is_bf16 else _F32).as_pointer())


def _part(emit, row, first, count):
    """`count` elements of a row from the `first` on."""
    kind = ir.VectorType(row.type.pointee, count)
    place = emit.b.bitcast(emit.b.gep(row, [emit.i64(first)]), kind.as_pointer())
    return emit.b.load(place, align=4 if kind.element == _F32 else 2)


def _filled(emit, vec, lanes):
    """A vector with zeros behind it."""
    count = vec.type.count
    if count == lanes:
        return vec
    nothing = ir.Constant(vec.type, [vec.type.element(0)] * count)
    return emit.shuffle(vec, nothing, [i if i < count else count for i in range(lanes)])


def _words(emit, base, offset, head_dim):
    """A row as vectors of 16 words, float32 or pairs of bfloat16; zeros behind the last."""
    row, step = _row(emit, base, offset), 2 if base[1] else 1
    words = []
    for first in range(0, head_dim, step * LANES):
        vec = _filled(emit, _part(emit, row, first, min(step * LANES, head_dim - first)), step * LANES)
        words.append(emit.b.bitcast(vec, ir.VectorType(_I32, LANES)) if base[1] else vec)
    return words


def _columns(emit, base, offsets, head_dim, first, end):
    """Dims `first` to `end` (or head_dim) of one row, or of two rows of bfloat16 in turns, in vectors of 16 words."""
    rows = [_row(emit, base, offset) for offset in offsets]
    vectors = []
    for dim in range(first, min(end, head_dim), LANES):
        parts = [_filled(emit, _part(emit, row, dim, min(LANES, head_dim - dim)), LANES) for row in rows]
        if len(parts) == 2:
            pairs = emit.shuffle(*parts, [i // 2 + LANES * (i % 2) for i in range(2 * LANES)])
            parts = [emit.b.bitcast(pairs, ir.VectorType(_I32, LANES))]
        vectors += parts
    return vectors


def _fold(emit, vectors, level=0):
    """The sums of 16 vectors' lanes as one vector; `vectors` are functions, called when their turn comes."""
    if len(vectors) == 1:
        return vectors[0]()
    half = len(vectors) // 2
    left, right = (_fold(emit, part, level + 1) for part in (vectors[:half], vectors[half:]))
    first, second = _FOLDS[level]
    return emit.b.fadd(emit.shuffle(left, right, first), emit.shuffle(left, right, second))


def _per_quarter(places):
    """A pattern of places within 4 lanes, for all quarters of 16; 4 and above are the other vector's."""
    return [(p % 4) + 4 * quarter + 16 * (p // 4) for quarter in range(4) for p in places]


def _quarters(which):
    """Whole quarters by number; 4 and above are the other vector's."""
    return [4 * q + i for q in which for i in range(4)]


# From the outermost level. The innermost, done most often, needs no shuffles where 16 lanes are two registers.
_FOLDS = (
    (_per_quarter([0, 2, 4, 6]), _per_quarter([1, 3, 5, 7])),
    (_per_quarter([0, 1, 4, 5]), _per_quarter([2, 3, 6, 7])),
    (_quarters([0, 2, 4, 6]), _quarters([1, 3, 5, 7])),
    (_quarters([0, 1, 4, 5]), _quarters([2, 3, 6, 7])),
)
# Which vector's sum comes first, second, ... if they are folded in this order.
_FOLD_ORDER = [i + 4 * j for i in range(4) for j in range(4)]


def _line_elements(base):
    return _LINE_BYTES // (2 if base[1] else 4)


def _ask(emit, base, array, first, line, dim):
    """Ask for one cache line of 16 tokens' rows, by its number; the tokens' offsets are at array[first:].

    In the order of their numbers, all through: memory gives lines that lie side by side faster (Zen 3, 2 threads: 18
    GB/s instead of 15), also to those who ask early.
    """
    per_token, elements = -(-dim // _line_elements(base)), _line_elements(base)
    token = emit.b.udiv(line, emit.i64(per_token))
    within = emit.b.mul(emit.b.urem(line, emit.i64(per_token)), emit.i64(elements))
    last = emit.i64(LANES - 1)
    token = emit.b.select(emit.b.icmp_unsigned("<", token, last), token, last)
    start = _offset(emit, array, emit.b.add(first, token))
    emit.prefetch(emit.b.gep(base[0], [emit.b.add(start, within)]))


def _offset(emit, array, index):
    return emit.b.load(emit.b.gep(array[0], [index]), align=8)


@intrinsic(prefer_literal=True)
def tile_scores(typingctx, s, s_off, s_row, q, q_off, q_row, k, k_off, k_at, at_off, next_off, rows, head_dim):
    """s[s_off + r * s_row + t] = q[r] . k[t] for 16 tokens and `rows` rows of q; k[t] at k_off + k_at[at_off + t].

    Meanwhile the keys at k_off + k_at[next_off + t] are asked for, a few at a time: a core has few requests under way.

    s: float32. q, k: float32 or bfloat16 bits; q's rows are q_row apart. head_dim even for bfloat16.
    """
    count, dim = _literal(rows, "rows"), _literal(head_dim, "head_dim")

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        scores, query, key, at = (emit.base(sig.args[i], args[i]) for i in (0, 3, 6, 8))
        key = (builder.gep(key[0], [args[7]]), key[1])
        offsets = [_offset(emit, at, emit.at(args[9], t)) for t in range(LANES)]
        lines, slots = LANES * -(-dim // _line_elements(key)), LANES * count
        multiply = emit.pair_products if query[1] else emit.fma
        for r in range(count):
            row = _words(emit, query, builder.add(args[4], builder.mul(args[5], emit.i64(r))), dim)

            def products(place, row=row, r=r):
                t, slot = _FOLD_ORDER[place], r * LANES + place
                for line in range(slot * lines // slots, (slot + 1) * lines // slots):
                    _ask(emit, key, at, args[10], emit.i64(line), dim)
                acc = emit.const(0.0, LANES)
                for words, vec in zip(row, _words(emit, key, offsets[t], dim), strict=True):
                    acc = multiply(words, vec, acc)
                return acc

            total = _fold(emit, [lambda place=place: products(place) for place in range(LANES)])
            where = builder.add(args[1], builder.mul(args[2], emit.i64(r)))
            emit.store(scores, where, total, LANES)
        return context.get_dummy_value()

    n = types.int64
    return types.void(s, n, n, q, n, n, k, n, k_at, n, n, rows, head_dim), codegen


@intrinsic(prefer_literal=True)
def tile_values(typingctx, acc, acc_off, p, p_off, p_row, v, v_off, v_at, at_off, next_off, tokens, rows, head_dim):
    """acc[r, :] += sum over t of p[r, t] * v[t, :] for `tokens` tokens; v[t] at v_off + v_at[at_off + t].

    Meanwhile the values at v_off + v_at[next_off + t] are asked for.

    acc: float32, packed rows of `padded(head_dim)`. p, v: float32 or bfloat16 bits; p's rows are p_row apart. `tokens`
    even for bfloat16.
    """
    count, dim = _literal(rows, "rows"), _literal(head_dim, "head_dim")
    # Sums kept in registers at once.
    held_rows, held_dims = (4, 64) if has_wide_registers() else (3, 32)

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        out, weight, value, at = (emit.base(sig.args[i], args[i]) for i in (0, 2, 5, 7))
        value = (builder.gep(value[0], [args[6]]), value[1])
        step, element, multiply = (2, _I32, emit.pair_products) if value[1] else (1, _F32, emit.fma)
        steps = builder.sdiv(args[10], emit.i64(step))
        # Lines to ask for at each step of each pass.
        asked = -(-(-(-dim // _line_elements(value)) * step) // -(-dim // held_dims))

        def block(first_row, many, first_dim):
            p_at = [builder.add(args[3], builder.mul(args[4], emit.i64(first_row + i))) for i in range(many)]
            weights = [builder.bitcast(builder.gep(weight[0], [where]), element.as_pointer()) for where in p_at]

            def body(t, sums):
                tokens = builder.mul(t, emit.i64(step))
                offsets = [_offset(emit, at, emit.at(builder.add(args[8], tokens), i)) for i in range(step)]
                if first_row == 0:
                    turn = builder.add(t, emit.i64(first_dim // held_dims * (LANES // step)))
                    for i in range(asked):
                        line = emit.at(builder.mul(turn, emit.i64(asked)), i)
                        _ask(emit, value, at, args[9], line, dim)
                vectors = _columns(emit, value, offsets, dim, first_dim, first_dim + held_dims)
                new = []
                for i in range(many):
                    word = emit.splat(builder.load(builder.gep(weights[i], [t]), align=2), LANES)
                    new += [multiply(vec, word, sums[i * len(vectors) + j]) for j, vec in enumerate(vectors)]
                return new

            dims = range(first_dim, min(first_dim + held_dims, dim), LANES)
            places = [emit.at(args[1], (first_row + i) * padded(dim) + d) for i in range(many) for d in dims]
            start = [emit.load(out, place, LANES) for place in places]
            for place, vec in zip(places, emit.loop(steps, start, body), strict=True):
                emit.store(out, place, vec, LANES)

        for first_dim in range(0, dim, held_dims):
            for first_row in range(0, count, held_rows):
                block(first_row, min(held_rows, count - first_row), first_dim)
        return context.get_dummy_value()

    n = types.int64
    return types.void(acc, n, p, n, n, v, n, v_at, n, n, n, rows, head_dim), codegen


def _transposed(emit, vectors):
    """16 vectors of 16 lanes, rows and columns exchanged: blocks of 1, 2, 4, 8 lanes are swapped across in turn."""
    for size in (1, 2, 4, 8):
        places = range(LANES)
        low = [i if not i & size else LANES + i - size for i in places]
        high = [i + size if not i & size else LANES + i for i in places]
        new = list(vectors)
        for i in range(LANES):
            if not i & size:
                new[i] = emit.shuffle(vectors[i], vectors[i + size], low)
                new[i + size] = emit.shuffle(vectors[i], vectors[i + size], high)
        vectors = new
    return vectors


@intrinsic(prefer_literal=True)
def pack_keys(typingctx, panel, panel_off, k, k_at, at_off, head_dim):
    """Write 16 tokens' keys, k[t] at offset k_at[at_off + t], into half of a panel (`products`) with tokens as outputs.

    panel, k: the same type, float32 or bfloat16 bits; head_dim even for the latter.
    """
    dim = _literal(head_dim, "head_dim")

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        to, key, at = (emit.base(sig.args[i], args[i]) for i in (0, 2, 3))
        words = dim // 2 if key[1] else dim
        tokens = [_words(emit, key, _offset(emit, at, emit.at(args[4], t)), dim) for t in range(LANES)]
        for block in range(len(tokens[0])):
            columns = _transposed(emit, [token[block] for token in tokens])
            for i, vec in enumerate(columns[: words - block * LANES]):
                _store_words(emit, to, emit.at(args[1], (block * LANES + i) * PANEL_OUTPUTS * dim // words), vec)
        return context.get_dummy_value()

    n = types.int64
    return types.void(panel, n, k, k_at, n, head_dim), codegen


@intrinsic(prefer_literal=True)
def pack_values(typingctx, panels, row_off, panel_size, v, v_at, at_off, head_dim):
    """Write a row of the panels whose outputs are dims: one token's values, or two tokens' in turns for bfloat16.

    panels: panel_size elements each, PANEL_OUTPUTS dims to one; the row lies row_off elements from a panel's start.
    v: the same type, v[t] at offset v_at[at_off + t].
    """
    dim = _literal(head_dim, "head_dim")

    def codegen(context, builder, sig, args):
        emit = _Emit(context, builder)
        to, value, at = (emit.base(sig.args[i], args[i]) for i in (0, 3, 4))
        step = 2 if value[1] else 1
        offsets = [_offset(emit, at, emit.at(args[5], i)) for i in range(step)]
        for index, first in enumerate(range(0, dim, PANEL_OUTPUTS)):
            panel = builder.add(args[1], builder.mul(args[2], emit.i64(index)))
            for i, vec in enumerate(_columns(emit, value, offsets, dim, first, first + PANEL_OUTPUTS)):
                _store_words(emit, to, emit.at(panel, i * LANES * step), vec)
        return context.get_dummy_value()

    n = types.int64
    return types.void(panels, n, n, v, v_at, n, head_dim), codegen


def _store_words(emit, base, offset, vec):
    place = emit.b.bitcast(emit.b.gep(base[0], [offset]), vec.type.as_pointer())
    emit.b.store(vec, place, align=2 if base[1] else 4)
