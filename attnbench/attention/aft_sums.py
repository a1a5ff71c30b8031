"""Softmax over keys with logits of their own for each channel: what AFT computes, in sums that never overflow.

Channel x of the result is ``Σ_j e^(k_jx + w_ij) v_jx / Σ_j e^(k_jx + w_ij)``. A set of keys is summed up as the
logarithm of its denominator and its weighted mean, and two sets are joined by a convex combination; so every exponent
is taken relative to the largest of its own query and channel, and no earlier row can feel a later key.

k and v are ``(..., n, X)`` in float32 or float64, w is ``(..., rows, n)`` and broadcasts against them. A key that is
not there has k = :data:`EMPTY` and v = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

EMPTY = -1e30
"""Finite, so that the difference of two of them is 0 and not NaN."""

_RUN = 16
"""Tokens to a run of :func:`running`."""

_ROWS = 128
"""Rows at a time of :func:`full`."""

Bias = Callable[[Tensor, Tensor], Tensor]
"""w ``(G, squares, rows, keys)`` of the positions ``(squares, rows)`` and ``(squares, keys)``. Of a position outside of
0 .. n - 1 it may say anything finite."""


class Sums(NamedTuple):
    """Some keys, as seen by each query and channel; one of them looks like a key with k = log and v = mean."""

    log: Tensor
    """``log Σ e^(k + w)``."""
    mean: Tensor

    def last(self) -> Sums:
        """Of the last row, ``(..., 1, X)``."""
        return Sums(self.log[..., -1:, :], self.mean[..., -1:, :])


def join(a: Sums, b: Sums) -> Sums:
    """Of both sets of keys."""
    return Sums(torch.logaddexp(a.log, b.log), torch.lerp(b.mean, a.mean, torch.sigmoid(a.log - b.log)))


class Weighed(NamedTuple):
    """Keys ready to be read by any query."""

    top: Tensor
    """``(..., 1, X)``, the largest k."""
    both: Tensor
    """``(..., n, 2X)``: e^(k - top) beside e^(k - top)·v."""

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Weighed:
        top = k.detach().amax(-2, keepdim=True)
        weight = (k - top).exp_()
        return cls(top, torch.cat((weight, weight * v), -1))

    def read(self, w: Tensor | None) -> Sums:
        """By queries with the biases w; by one query without biases for None.

        One product does it, because e^(w + k) is taken apart. That loses a row's digits only where both w in this row
        and k in a channel spread over more than the exponents of the dtype, 80 in float32: then, not NaN but 0.
        """
        if w is None:
            log, total = self.top, self.both.sum(-2, keepdim=True)
        else:
            row_top = w.detach().amax(-1, keepdim=True)
            log, total = self.top + row_top, torch.matmul((w - row_top).exp_(), self.both)
        denominator, numerator = total.chunk(2, -1)
        denominator = denominator.clamp(min=torch.finfo(total.dtype).tiny)
        return Sums(log + denominator.log(), numerator / denominator)


def read(k: Tensor, v: Tensor, w: Tensor | None = None) -> Sums:
    """All keys of k and v, ``(..., n, X)``, under the biases w ``(..., rows, n)``."""
    return Weighed.of(k, v).read(w)


def blocks(x: Tensor, length: int, value: float) -> Tensor:
    """``(..., n, X)`` as ``(..., n / length, length, X)``, filled up with ``value``."""
    missing = -x.shape[-2] % length
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing), value=value)
    return torch.unflatten(x, -2, (-1, length))


def later(x: Tensor, steps: int, value: float) -> Tensor:
    """Moved by ``steps`` along axis -3, the first ones being ``value``; earlier for a negative number."""
    return torch.nn.functional.pad(x, (0, 0, 0, 0, steps, -steps), value=value)


def triangles(k: Tensor, v: Tensor, bias: Bias | None) -> Sums:
    """Row i of each block over the keys j <= i of the block.

    A triangle is cut into squares: the second half of the rows with the first half of the keys, and so on in each
    half. No square holds a key that one of its rows does not see.

    Args:
        k, v: ``(G, blocks, T, X)``, T a power of two.
        bias: None for 0.
    """
    count, length = k.shape[-3:-1]
    position = torch.arange(count * length, device=k.device)
    sums = Sums(k, v)
    if bias is not None:
        own = bias(position[:, None], position[:, None]).expand(-1, count * length, 1, 1)
        sums = Sums(k + own.reshape(-1, count, length, 1), v)
    half = 1
    while half < length:
        cut = (-1, 2, half)
        halves = [torch.unflatten(x.flatten(-3, -2), -2, cut) for x in sums]
        first, second = (Sums(*(x[..., i, :, :] for x in halves)) for i in (0, 1))
        if bias is None:
            seen = first.last()
        else:
            keys, rows = torch.unflatten(position, 0, cut).unbind(1)
            first_k, first_v = (torch.unflatten(x.flatten(-3, -2), -2, cut)[..., 0, :, :] for x in (k, v))
            seen = read(first_k, first_v, bias(rows, keys))
        second = join(second, seen)
        sums = Sums(*(torch.stack(pair, -3).reshape(k.shape) for pair in zip(first, second, strict=True)))
        half *= 2
    return sums


def running(k: Tensor, v: Tensor) -> Sums:
    """Row i over the keys j <= i without biases, in O(n): k, v ``(G, n, X)``."""
    n = k.shape[-2]
    length = min(_RUN, power_of_two(n))
    inside = triangles(blocks(k, length, EMPTY), blocks(v, length, 0.0), None)
    if n > length:
        ends = (x.squeeze(-2) for x in inside.last())
        inside = join(inside, _before(running(*ends), 1))
    return Sums(*(x.flatten(-3, -2)[..., :n, :] for x in inside))


def _before(ends: Sums, steps: int) -> Sums:
    """Running sums ``(G, blocks, X)`` as those of what lies ``steps`` blocks back, ``(G, blocks, 1, X)``."""
    return Sums(later(ends.log.unsqueeze(-2), steps, EMPTY), later(ends.mean.unsqueeze(-2), steps, 0.0))


def windowed(k: Tensor, v: Tensor, reach: int, bias: Bias, *, causal: bool) -> Sums:
    """Every row over all keys, or those up to its own, with biases that are 0 beyond ``reach`` tokens: O(n·reach).

    Args:
        k, v: ``(G, n, X)``.
        reach: the farthest key with a bias.
    """
    n = k.shape[-2]
    length = min(power_of_two(max(reach, 32)), power_of_two(n))
    k, v = blocks(k, length, EMPTY), blocks(v, length, 0.0)
    count = k.shape[-3]
    rows = torch.arange(count * length, device=k.device).view(count, length)
    near = range(-1, 0) if causal else range(-1, 2)
    keys = rows[:, :1] + torch.arange(near.start * length, near.stop * length, device=k.device)
    near_k = torch.cat([later(k, -step, EMPTY) for step in near], -2)
    near_v = torch.cat([later(v, -step, 0.0) for step in near], -2)
    sums = read(near_k, near_v, bias(rows, keys))
    if causal:
        sums = join(sums, triangles(k, v, bias))
    if count > 2:
        whole = Sums(*(x.squeeze(-2) for x in read(k, v)))
        sums = join(sums, _before(running(*whole), 2))
        if not causal:
            back = _before(running(*(x.flip(-2) for x in whole)), 2)
            sums = join(sums, Sums(*(x.flip(-3) for x in back)))
    return Sums(*(x.flatten(-3, -2)[..., :n, :] for x in sums))


def full(k: Tensor, v: Tensor, rows: Tensor, columns: Tensor | None, bias: Bias, *, causal: bool) -> Tensor:
    """Means of every row over all keys, or those up to its own, with a bias for each pair: O(n²) time, O(n) memory.

    Args:
        k, v: ``(1, n, X)``.
        rows, columns: w is ``rows @ columnsᵀ``, ``(n, F)`` each; for None w is ``rows``, ``(n, n)``.
        bias: the same w.
    """
    n = k.shape[-2]
    length = min(_ROWS, power_of_two(n))
    inside = triangles(blocks(k, length, EMPTY), blocks(v, length, 0.0), bias) if causal else None
    keys: tuple[Tensor, Tensor] = (k, v) if causal else Weighed.of(k, v)
    means = []
    # split, not slices: the gradient of each slice would be as large as the whole.
    for block, part in enumerate(torch.split(rows, length)):
        own = inside and Sums(*(x[:, block, : part.shape[0]] for x in inside))
        if own and not block:
            means.append(own.mean)
            continue
        seen = [x[:, : block * length] for x in keys] if own else keys
        if torch.is_grad_enabled():  # w of these rows is computed again, not kept
            arguments = (part, columns, own, *seen)
            means.append(checkpoint(_rows_of_full, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            means.append(_rows_of_full(part, columns, own, *seen))
    return torch.cat(means, 1)


def _rows_of_full(rows: Tensor, columns: Tensor | None, own: Sums | None, *keys: Tensor) -> Tensor:
    weighed = Weighed.of(*keys) if own else Weighed(*keys)
    n = weighed.both.shape[-2]
    sums = weighed.read(rows[:, :n] if columns is None else rows @ columns[:n].mT)
    return join(own, sums).mean if own else sums.mean


def power_of_two(n: int) -> int:
    """The smallest that is at least n."""
    return 1 << (n - 1).bit_length()
