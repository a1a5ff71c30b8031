"""Triton code of linear attention with φ = elu + 1: the only module that imports triton, and imported only when used.

A pair of batch entry and head is cut into segments of ``chunks`` chunks of ``ROWS`` tokens. A program takes one segment
of one pair, chunk by chunk, and holds a state in registers: S ``(D, D)`` and z ``(D,)``, in memory one above the other.
All numbers are float32 inside, whatever the inputs are. ``PRECISION`` is that of the products: ``ieee``, true float32,
or ``tf32``, which holds bfloat16 and float16 inputs exactly and rounds features to 11 bits.

Every tensor comes with its strides along batch, head and token; the stride along the last dimension is 1.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ^ arguments are pointers and blocks, which Triton types itself

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _block(x, batch_stride, head_stride, row_stride, pair, heads, first_row, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Addresses ``(ROWS, WIDTH)`` of the rows of one pair from ``first_row`` on."""
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
    """A product for sums that cancel: TF32 also multiplies what the first TF32 leaves over, which is nearly float32."""
    return tl.dot(a, b, input_precision="tf32x3" if PRECISION == "tf32" else PRECISION)


@triton.jit
def _real(mask, pair, heads, rows, length, MASKED: tl.constexpr):
    """Which rows hold keys."""
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
