"""Triton code of linear attention: the only module that imports triton, and imported only when used.

With φ = elu + 1, a pair of batch entry and head is cut into segments of ``chunks`` chunks of ``ROWS`` tokens. A program
takes one segment of one pair, chunk by chunk, and holds a state in registers: S ``(D, D)`` and z ``(D,)``, in memory
one above the other. All numbers are float32 inside, whatever the inputs are. ``PRECISION`` is that of the products:
``ieee``, true float32, or ``tf32``, which holds bfloat16 and float16 inputs exactly and rounds features to 11 bits.

Ready features of any width F are taken in blocks of ``BF``, and values of any width E by one program per ``BE`` of
them. A state is then too large for registers: a program reads and writes its own, S ``(F, BE)`` and z ``(F,)``, in
memory, block by block; F is filled up to whole blocks. Levels ``(pairs, length)`` weigh each key by 2 to its level;
``tops`` are the largest levels so far, and all sums are relative to those, so that no exponent is above 0.

Every tensor comes with its strides along batch, head and token; the stride along the last dimension is 1.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ^ arguments are pointers and blocks, which Triton types itself

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _block(x, batch_stride, head_stride, row_stride, pair, heads, first_row, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    start = x + (pair // heads) * batch_stride + (pair % heads) * head_stride + first_row.to(tl.int64) * row_stride
    return start + tl.arange(0, ROWS)[:, None] * row_stride + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _inside(kept, D: tl.constexpr, WIDTH: tl.constexpr):
    return kept[:, None] & (tl.arange(0, WIDTH) < D)[None, :]


@triton.jit
def _load(block, inside):
    return tl.load(block, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _features(block, inside):
    """φ(x) = exp(min(x, 0)) + max(x, 0), and 0 outside."""
    x = _load(block, inside)
    return tl.where(inside, tl.exp(tl.minimum(x, 0.0)) + tl.maximum(x, 0.0), 0.0)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if PRECISION == "tf32":  # matrix units read the first 19 bits only: adding half of the last of them rounds
        a = (a.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
        b = (b.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _fine_dot(a, b, PRECISION: tl.constexpr):
    """A product for sums that cancel: TF32 also multiplies the remainder of the first TF32, which is nearly float32."""
    return tl.dot(a, b, input_precision="tf32x3" if PRECISION == "tf32" else PRECISION)


@triton.jit
def _real(mask, pair, heads, rows, length, MASKED: tl.constexpr):
    real = rows < length
    if MASKED:
        real = real & (tl.load(mask + (pair // heads) * length + rows, mask=real, other=0) != 0)
    return real


@triton.jit
def _state(states, pair, count, index, D: tl.constexpr, WIDTH: tl.constexpr):
    """S and z number ``index`` of ``count``; zeros for -1."""
    f = tl.arange(0, WIDTH)
    start = states + (pair * count + index) * ((D + 1) * D)
    there = f < tl.where(index >= 0, D, 0)  # as "and", a False of one number would fill the mask with integers
    S = tl.load(start + f[:, None] * D + f[None, :], mask=there[:, None] & (f < D)[None, :], other=0.0)
    z = tl.load(start + D * D + f, mask=there, other=0.0)
    return S, z


@triton.jit
def add_up(
    x, xb, xh, xn, y, yb, yh, yn, mask, inverses, slopes, states, length, heads, chunks,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr, REVERSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip  # one line for the tensors, one for the sizes
    """Sums of one segment: S = Σ φ(x) yᵀ and z = Σ φ(x); with ``WEIGHTED``, Σ φ(x) (y·inverse)ᵀ and Σ φ(x)·slope.

    With ``REVERSED``, the segments run from the last to the second."""
    pair, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    segment = tl.num_programs(1) - place if REVERSED else place
    f = tl.arange(0, WIDTH)
    S = tl.zeros((WIDTH, WIDTH), tl.float32)
    z = tl.zeros((WIDTH,), tl.float32)
    for chunk in range(chunks):
        at = (segment * chunks + chunk) * ROWS
        rows = at + tl.arange(0, ROWS)
        real = _real(mask, pair, heads, rows, length, MASKED)
        inside = _inside(real, D, WIDTH)
        phi = _features(_block(x, xb, xh, xn, pair, heads, at, ROWS, WIDTH), inside)
        values = _load(_block(y, yb, yh, yn, pair, heads, at, ROWS, WIDTH), inside)
        if WEIGHTED:
            values *= tl.load(inverses + pair * length + rows, mask=real, other=0.0)[:, None]
            slope = tl.load(slopes + pair * length + rows, mask=real, other=0.0)
            z += tl.sum(phi * slope[:, None], 0)
        else:
            z += tl.sum(phi, 0)
        S += _dot(tl.trans(phi), values, PRECISION)
    start = states + (pair * tl.num_programs(1) + place) * ((D + 1) * D)
    tl.store(start + f[:, None] * D + f[None, :], S, mask=(f < D)[:, None] & (f < D)[None, :])
    tl.store(start + D * D + f, z, mask=f < D)


@triton.jit
def attend(
    q, qb, qh, qn, k, kb, kh, kn, v, vb, vh, vn, grad, gb, gh, gn, out, ob, oh, on,
    mask, first, states, inverses, slopes, length, heads, chunks, count,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip  # one line for the tensors, one for the sizes
    """Outputs of one segment of queries, forward in time; with ``BACKWARD``, the gradient of q in their place.

    ``BACKWARD`` also writes, for each query, 1 / denominator to ``inverses`` and the denominator's gradient to
    ``slopes``."""
    pair, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    S, z = _state(states, pair, count, segment - 1 if CAUSAL else 0, D, WIDTH)
    for chunk in range(chunks):
        at = (segment * chunks + chunk) * ROWS
        rows = at + tl.arange(0, ROWS)
        inside = _inside(rows < length, D, WIDTH)
        phi_q = _features(_block(q, qb, qh, qn, pair, heads, at, ROWS, WIDTH), inside)
        numerator = _dot(phi_q, S, PRECISION)
        denominator = tl.sum(phi_q * z[None, :], 1)
        if CAUSAL:
            real = _inside(_real(mask, pair, heads, rows, length, MASKED), D, WIDTH)
            phi_k = _features(_block(k, kb, kh, kn, pair, heads, at, ROWS, WIDTH), real)
            values = _load(_block(v, vb, vh, vn, pair, heads, at, ROWS, WIDTH), real)
            seen = rows[:, None] >= rows[None, :]
            weights = tl.where(seen, _dot(phi_q, tl.trans(phi_k), PRECISION), 0.0)
            numerator += _dot(weights, values, PRECISION)
            denominator += tl.sum(weights, 1)
        some = rows < length
        if MASKED:
            some = some & (rows >= tl.load(first + pair // heads))
        denominator = tl.where(some, denominator, 1.0)
        result = numerator / denominator[:, None]
        if BACKWARD:
            upper = _load(_block(grad, gb, gh, gn, pair, heads, at, ROWS, WIDTH), inside) / denominator[:, None]
            slope = -tl.sum(upper * result, 1)
            d_phi = _fine_dot(upper, tl.trans(S), PRECISION) + slope[:, None] * z[None, :]
            if CAUSAL:
                d_weights = _dot(upper, tl.trans(values), PRECISION) + slope[:, None]
                d_phi += _fine_dot(tl.where(seen, d_weights, 0.0), phi_k, PRECISION)
            result = d_phi * tl.minimum(phi_q, 1.0)
            tl.store(inverses + pair * length + rows, 1.0 / denominator, mask=rows < length)
            tl.store(slopes + pair * length + rows, slope, mask=rows < length)
        if CAUSAL:
            S += _dot(tl.trans(phi_k), values, PRECISION)
            z += tl.sum(phi_k, 0)
        block = _block(out, ob, oh, on, pair, heads, at, ROWS, WIDTH)
        tl.store(block, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def key_gradients(
    q, qb, qh, qn, k, kb, kh, kn, v, vb, vh, vn, grad, gb, gh, gn, dk, dkb, dkh, dkn, dv, dvb, dvh, dvn,
    mask, states, inverses, slopes, length, heads, chunks, count,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip  # one line for the tensors, one for the sizes
    """Gradients of one segment of keys and values, backward in time; the state holds the gradients of S and z."""
    pair, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    S, z = _state(states, pair, count, tl.num_programs(1) - 2 - segment if CAUSAL else 0, D, WIDTH)
    for step in range(chunks):
        at = (segment * chunks + chunks - 1 - step) * ROWS
        rows = at + tl.arange(0, ROWS)
        inside = _inside(rows < length, D, WIDTH)
        real = _inside(_real(mask, pair, heads, rows, length, MASKED), D, WIDTH)
        phi_k = _features(_block(k, kb, kh, kn, pair, heads, at, ROWS, WIDTH), real)
        values = _load(_block(v, vb, vh, vn, pair, heads, at, ROWS, WIDTH), real)
        d_values = _dot(phi_k, S, PRECISION)
        d_phi = _dot(values, tl.trans(S), PRECISION) + z[None, :]
        if CAUSAL:
            phi_q = _features(_block(q, qb, qh, qn, pair, heads, at, ROWS, WIDTH), inside)
            inverse = tl.load(inverses + pair * length + rows, mask=rows < length, other=0.0)
            upper = _load(_block(grad, gb, gh, gn, pair, heads, at, ROWS, WIDTH), inside) * inverse[:, None]
            slope = tl.load(slopes + pair * length + rows, mask=rows < length, other=0.0)
            seen = rows[None, :] >= rows[:, None]
            weights = tl.where(seen, _dot(phi_k, tl.trans(phi_q), PRECISION), 0.0)
            d_values += _dot(weights, upper, PRECISION)
            d_weights = _dot(values, tl.trans(upper), PRECISION) + slope[None, :]
            d_phi += _dot(tl.where(seen, d_weights, 0.0), phi_q, PRECISION)
            S += _dot(tl.trans(phi_q), upper, PRECISION)
            z += tl.sum(phi_q * slope[:, None], 0)
        # Features of padded keys are 0, and with them both gradients.
        d_keys = d_phi * tl.minimum(phi_k, 1.0)
        tl.store(_block(dk, dkb, dkh, dkn, pair, heads, at, ROWS, WIDTH), d_keys.to(dk.dtype.element_ty), mask=inside)
        tl.store(_block(dv, dvb, dvh, dvn, pair, heads, at, ROWS, WIDTH), d_values.to(dv.dtype.element_ty), mask=inside)


@triton.jit
def _columns(first, count, WIDTH: tl.constexpr):
    columns = first + tl.arange(0, WIDTH)
    return columns, columns < count


@triton.jit
def _own_state(states, pair, count, index, width):
    """Address of the state number ``index`` of ``count`` of this program, ``width`` numbers long."""
    return states + ((pair * count + index) * tl.num_programs(2) + tl.program_id(2)) * width


@triton.jit
def _scales(levels, tops, pair, length, at, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """Weights of the earlier sums in each row, of each key in the later sums, and of earlier sums in later ones."""
    carried, taken = tl.full((ROWS,), 1.0, tl.float32), tl.full((ROWS,), 1.0, tl.float32)
    kept = tl.full((1,), 1.0, tl.float32)
    if LEVELS:
        rows = at + tl.arange(0, ROWS)
        level = tl.load(levels + pair * length + rows, mask=rows < length, other=float("-inf"))
        top = tl.load(tops + pair * length + rows, mask=rows < length, other=float("inf"))
        last = tops + pair * length + tl.zeros((1,), tl.int32)
        before = tl.load(last + tl.minimum(tl.maximum(at, 1), length) - 1)
        after = tl.load(last + tl.minimum(at + ROWS, length) - 1)
        carried, taken, kept = tl.exp2(before - top), tl.exp2(level - after), tl.exp2(before - after)
    return carried, taken, kept


@triton.jit
def _seen(pairs, levels, tops, pair, length, at, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """Numbers of the pairs of a chunk ``(ROWS, ROWS)``, each times the key's weight; 0 for later keys."""
    rows = at + tl.arange(0, ROWS)
    seen = rows[:, None] >= rows[None, :]
    if LEVELS:
        level = tl.load(levels + pair * length + rows, mask=rows < length, other=float("-inf"))
        top = tl.load(tops + pair * length + rows, mask=rows < length, other=float("inf"))
        pairs *= tl.exp2(tl.minimum(level[None, :] - top[:, None], 0.0))  # those of later keys may be large
    return tl.where(seen, pairs, 0.0)


@triton.jit
def sum_features(
    x, xb, xh, xn, y, yb, yh, yn, mask, of_rows, of_ones, states, length, heads, chunks, count, F, E,
    ROWS: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    MASKED: tl.constexpr, SCALED: tl.constexpr, CAUSAL: tl.constexpr, REVERSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip  # one line for the tensors, one for the sizes
    """Sums of one segment and one block of features: Σ x yᵀ and Σ x; with ``SCALED``, of y·of_rows and x·of_ones.

    If ``CAUSAL``, the next segment takes them as its state; with ``REVERSED``, the one before, and states lie from the
    last segment to the first."""
    pair, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = segment
    if CAUSAL:
        index = segment + 1
    if REVERSED:
        segment = tl.num_programs(1) - segment
    blocks = tl.cdiv(F, BF)
    block, place = tl.program_id(2) % blocks, tl.program_id(2) // blocks
    features, there = _columns(block * BF, F, BF)
    _, wide = _columns(place * BE, E, BE)
    S = tl.zeros((BF, BE), tl.float32)
    z = tl.zeros((BF,), tl.float32)
    for chunk in range(chunks):
        at = (segment * chunks + chunk) * ROWS
        rows = at + tl.arange(0, ROWS)
        real = _real(mask, pair, heads, rows, length, MASKED)
        phi = _load(_block(x, xb, xh, xn, pair, heads, at, ROWS, BF) + block * BF, real[:, None] & there[None, :])
        values = _load(_block(y, yb, yh, yn, pair, heads, at, ROWS, BE) + place * BE, real[:, None] & wide[None, :])
        if SCALED:
            values *= tl.load(of_rows + pair * length + rows, mask=real, other=0.0)[:, None]
            z += tl.sum(phi * tl.load(of_ones + pair * length + rows, mask=real, other=0.0)[:, None], 0)
        else:
            z += tl.sum(phi, 0)
        S += _dot(tl.trans(phi), values, PRECISION)
    start = states + ((pair * count + index) * tl.cdiv(E, BE) + place) * (blocks * BF * (BE + 1))
    tl.store(start + features[:, None] * BE + tl.arange(0, BE)[None, :], S)
    tl.store(start + blocks * BF * BE + features, z)


@triton.jit
def attend_features(
    q, qb, qh, qn, k, kb, kh, kn, v, vb, vh, vn, out, ob, oh, on,
    mask, first, levels, tops, states, inverses, length, heads, chunks, count, F, E,
    ROWS: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, LEVELS: tl.constexpr, LENIENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip  # one line for the tensors, one for the sizes
    """Outputs of one segment of queries, forward in time, and 1 / denominator in ``inverses``.

    With ``LENIENT``, a denominator of 0 gives 0."""
    pair, segment, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    blocks, columns = tl.cdiv(F, BF), tl.arange(0, BE)
    _, wide = _columns(place * BE, E, BE)
    start = _own_state(states, pair, count, segment if CAUSAL else 0, blocks * BF * (BE + 1))
    for chunk in range(chunks):
        at = (segment * chunks + chunk) * ROWS
        rows = at + tl.arange(0, ROWS)
        inside = rows < length
        numerator = tl.zeros((ROWS, BE), tl.float32)
        denominator = tl.zeros((ROWS,), tl.float32)
        if CAUSAL:
            tl.debug_barrier()  # states are read by other threads than wrote them
            real = _real(mask, pair, heads, rows, length, MASKED)
            values = _load(_block(v, vb, vh, vn, pair, heads, at, ROWS, BE) + place * BE, real[:, None] & wide[None, :])
            carried, taken, kept = _scales(levels, tops, pair, length, at, ROWS, LEVELS)
            scores = tl.zeros((ROWS, ROWS), tl.float32)
        for block in range(blocks):
            features, there = _columns(block * BF, F, BF)
            phi_q = _load(
                _block(q, qb, qh, qn, pair, heads, at, ROWS, BF) + block * BF, inside[:, None] & there[None, :]
            )
            S_at = start + features[:, None] * BE + columns[None, :]
            z_at = start + blocks * BF * BE + features
            S, z = tl.load(S_at), tl.load(z_at)
            numerator += _dot(phi_q, S, PRECISION)
            denominator += tl.sum(phi_q * z[None, :], 1)
            if CAUSAL:
                phi_k = _load(
                    _block(k, kb, kh, kn, pair, heads, at, ROWS, BF) + block * BF, real[:, None] & there[None, :]
                )
                scores += _dot(phi_q, tl.trans(phi_k), PRECISION)
                phi_k *= taken[:, None]
                tl.store(S_at, S * kept[:, None] + _dot(tl.trans(phi_k), values, PRECISION))
                tl.store(z_at, z * kept + tl.sum(phi_k, 0))
        if CAUSAL:
            weights = _seen(scores, levels, tops, pair, length, at, ROWS, LEVELS)
            numerator = numerator * carried[:, None] + _dot(weights, values, PRECISION)
            denominator = denominator * carried + tl.sum(weights, 1)
        some = inside
        if MASKED:
            some = some & (rows >= tl.load(first + pair // heads))
        if LENIENT:
            some = some & (denominator != 0)
        inverse = 1.0 / tl.where(some, denominator, 1.0)
        target = _block(out, ob, oh, on, pair, heads, at, ROWS, BE) + place * BE
        tl.store(target, (numerator * inverse[:, None]).to(out.dtype.element_ty), mask=inside[:, None] & wide[None, :])
        tl.store(inverses + pair * length + rows, inverse, mask=rows < tl.where(place == 0, length, 0))


@triton.jit
def query_feature_gradients(
    k, kb, kh, kn, v, vb, vh, vn, grad, gb, gh, gn, dq, dqb, dqh, dqn, dqe,
    mask, levels, tops, states, inverses, slopes, length, heads, chunks, count, F, E,
    ROWS: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip  # one line for the tensors, one for the sizes
    """Gradients of one segment of query features, forward in time: the share of ``BE`` values in each ``dqe``."""
    pair, segment, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    blocks, columns = tl.cdiv(F, BF), tl.arange(0, BE)
    _, wide = _columns(place * BE, E, BE)
    start = _own_state(states, pair, count, segment if CAUSAL else 0, blocks * BF * (BE + 1))
    for chunk in range(chunks):
        at = (segment * chunks + chunk) * ROWS
        rows = at + tl.arange(0, ROWS)
        inside = rows < length
        inverse = tl.load(inverses + pair * length + rows, mask=inside, other=0.0)
        upper = _load(_block(grad, gb, gh, gn, pair, heads, at, ROWS, BE) + place * BE, inside[:, None] & wide[None, :])
        upper *= inverse[:, None]
        slope = tl.load(slopes + pair * length + rows, mask=rows < tl.where(place == 0, length, 0), other=0.0)
        if CAUSAL:
            tl.debug_barrier()  # states are read by other threads than wrote them
            real = _real(mask, pair, heads, rows, length, MASKED)
            values = _load(_block(v, vb, vh, vn, pair, heads, at, ROWS, BE) + place * BE, real[:, None] & wide[None, :])
            carried, taken, kept = _scales(levels, tops, pair, length, at, ROWS, LEVELS)
            d_scores = _dot(upper, tl.trans(values), PRECISION) + slope[:, None]
            d_scores = _seen(d_scores, levels, tops, pair, length, at, ROWS, LEVELS)
        for block in range(blocks):
            features, there = _columns(block * BF, F, BF)
            S_at = start + features[:, None] * BE + columns[None, :]
            z_at = start + blocks * BF * BE + features
            S, z = tl.load(S_at), tl.load(z_at)
            d_phi = _dot(upper, tl.trans(S), PRECISION) + slope[:, None] * z[None, :]
            if CAUSAL:
                d_phi *= carried[:, None]
                phi_k = _load(
                    _block(k, kb, kh, kn, pair, heads, at, ROWS, BF) + block * BF, real[:, None] & there[None, :]
                )
                d_phi += _dot(d_scores, phi_k, PRECISION)
                phi_k *= taken[:, None]
                tl.store(S_at, S * kept[:, None] + _dot(tl.trans(phi_k), values, PRECISION))
                tl.store(z_at, z * kept + tl.sum(phi_k, 0))
            target = _block(dq + place.to(tl.int64) * dqe, dqb, dqh, dqn, pair, heads, at, ROWS, BF) + block * BF
            tl.store(target, d_phi.to(dq.dtype.element_ty), mask=inside[:, None] & there[None, :])


@triton.jit
def key_feature_gradients(
    q, qb, qh, qn, k, kb, kh, kn, v, vb, vh, vn, grad, gb, gh, gn,
    dk, dkb, dkh, dkn, dke, dv, dvb, dvh, dvn,
    mask, levels, tops, states, inverses, slopes, length, heads, chunks, count, F, E,
    ROWS: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip  # one line for the tensors, one for the sizes
    """Gradients of one segment of key features and values, backward in time; states are the gradients of sums.

    Those of features: the share of ``BE`` values in each ``dke``."""
    pair, turn, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    blocks, columns = tl.cdiv(F, BF), tl.arange(0, BE)
    _, wide = _columns(place * BE, E, BE)
    start = _own_state(states, pair, count, turn if CAUSAL else 0, blocks * BF * (BE + 1))
    for step in range(chunks):
        at = ((tl.num_programs(1) - turn) * chunks - 1 - step) * ROWS
        rows = at + tl.arange(0, ROWS)
        inside = rows < length
        real = _real(mask, pair, heads, rows, length, MASKED)
        values = _load(_block(v, vb, vh, vn, pair, heads, at, ROWS, BE) + place * BE, real[:, None] & wide[None, :])
        carried, taken, kept = _scales(levels, tops, pair, length, at, ROWS, LEVELS)
        once = tl.where(place == 0, 1.0, 0.0)
        d_values = tl.zeros((ROWS, BE), tl.float32)
        if CAUSAL:
            tl.debug_barrier()  # states are read by other threads than wrote them
            inverse = tl.load(inverses + pair * length + rows, mask=inside, other=0.0)
            upper = _load(
                _block(grad, gb, gh, gn, pair, heads, at, ROWS, BE) + place * BE, inside[:, None] & wide[None, :]
            )
            upper *= inverse[:, None]
            slope = tl.load(slopes + pair * length + rows, mask=rows < tl.where(place == 0, length, 0), other=0.0)
            d_scores = _dot(upper, tl.trans(values), PRECISION) + slope[:, None]
            d_scores = _seen(d_scores, levels, tops, pair, length, at, ROWS, LEVELS)
            scores = tl.zeros((ROWS, ROWS), tl.float32)
        for block in range(blocks):
            features, there = _columns(block * BF, F, BF)
            phi_k = _load(_block(k, kb, kh, kn, pair, heads, at, ROWS, BF) + block * BF, real[:, None] & there[None, :])
            S_at = start + features[:, None] * BE + columns[None, :]
            z_at = start + blocks * BF * BE + features
            S, z = tl.load(S_at), tl.load(z_at)
            d_values += _dot(phi_k, S, PRECISION)
            d_phi = (_dot(values, tl.trans(S), PRECISION) + (z * once)[None, :]) * taken[:, None]
            if CAUSAL:
                phi_q = _load(
                    _block(q, qb, qh, qn, pair, heads, at, ROWS, BF) + block * BF, inside[:, None] & there[None, :]
                )
                scores += _dot(phi_q, tl.trans(phi_k), PRECISION)
                d_phi += _dot(tl.trans(d_scores), phi_q, PRECISION)
                phi_q *= carried[:, None]
                tl.store(S_at, S * kept[:, None] + _dot(tl.trans(phi_q), upper, PRECISION))
                tl.store(z_at, z * kept + tl.sum(phi_q * slope[:, None], 0))
            d_phi = tl.where(real[:, None], d_phi, 0.0)
            target = _block(dk + place.to(tl.int64) * dke, dkb, dkh, dkn, pair, heads, at, ROWS, BF) + block * BF
            tl.store(target, d_phi.to(dk.dtype.element_ty), mask=inside[:, None] & there[None, :])
        d_values *= taken[:, None]
        if CAUSAL:
            weights = _seen(scores, levels, tops, pair, length, at, ROWS, LEVELS)
            d_values += _dot(tl.trans(weights), upper, PRECISION)
        target = _block(dv, dvb, dvh, dvn, pair, heads, at, ROWS, BE) + place * BE
        tl.store(target, d_values.to(dv.dtype.element_ty), mask=inside[:, None] & wide[None, :])
