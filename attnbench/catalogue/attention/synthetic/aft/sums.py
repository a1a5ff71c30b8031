"""Softmax over keys with separate logits for each channel, the engine of AFT, in sums that never overflow.

Channel x of the result is ``Σ_j e^(k_jx + w_ij) v_jx / Σ_j e^(k_jx + w_ij)``. For each query and channel, a set of
keys is summed up as the logarithm of its denominator and its weighted mean; two sets are joined by a convex
combination of the means. So no row overflows, and no key, however large, affects a row that does not see it.

k and v are ``(..., n, X)`` in float32 or float64; w is ``(..., rows, n)`` and broadcasts against them. A missing key
has k = :data:`EMPTY`, v = 0 and w = -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnbench.catalogue.engines.precision import hidden
from attnbench.catalogue.engines.tiling import budget, recomputed

EMPTY = hidden(torch.float32)
"""k of a missing key; finite, so that the difference of two of them is 0 and not NaN."""

_RUN = 16
"""Tokens in a run of :func:`running`."""

Bias = Callable[[Tensor, Tensor], Tensor]
"""w ``(..., squares, rows, keys)`` for the positions ``(squares, rows)`` and ``(squares, keys)``, or for one square if
all are alike. A missing key must not decide a row's reference: a padded key has w = -inf, and one outside of
0 .. n - 1 has the w of the nearest key inside.
"""


class Sums(NamedTuple):
    """Some keys, as seen by each query and channel; together they look like one key with k = log and v = mean."""

    log: Tensor
    """``log Σ e^(k + w)``."""
    mean: Tensor

    def last(self) -> Sums:
        return Sums(self.log[..., -1:, :], self.mean[..., -1:, :])


def join(a: Sums, b: Sums) -> Sums:
    """The sums over both sets of keys."""
    return Sums(torch.logaddexp(a.log, b.log), torch.lerp(b.mean, a.mean, torch.sigmoid(a.log - b.log)))


class Weighed(NamedTuple):
    """Keys that any query can read."""

    top: Tensor
    """``(..., 1, X)``, the largest k."""
    both: Tensor
    """``(..., n, 2X)``: e^(k - top) and e^(k - top)·v."""

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Weighed:
        top = k.detach().amax(-2, keepdim=True)
        weight = (k - top).exp_()
        return cls(top, torch.cat((weight, weight * v), -1))

    def read(self, w: Tensor | None) -> Sums:
        """The sums for queries with the biases w, or for one query without biases if w is None.

        One product does it, because e^(w + k) is split into factors. It loses a key if its w lies so far below the
        row's largest, and its k so far below the channel's, that both together exceed 87 (708 in float64). A row
        without any key left gives 0.
        """
        if w is None:
            log, total = self.top, self.both.sum(-2, keepdim=True)
        else:
            row_top = w.detach().amax(-1, keepdim=True).clamp_(min=EMPTY)  # if no key is there
            log, total = self.top + row_top, torch.matmul((w - row_top).exp_(), self.both)
        denominator, numerator = total.chunk(2, -1)
        denominator = denominator.clamp(min=torch.finfo(total.dtype).tiny)
        return Sums(log + denominator.log(), numerator / denominator)


def read(k: Tensor, v: Tensor, w: Tensor | None = None) -> Sums:
    """The sums over all keys of k and v, ``(..., n, X)``, under the biases w ``(..., rows, n)``."""
    return Weighed.of(k, v).read(w)


def blocks(x: Tensor, length: int, value: float) -> Tensor:
    """``(..., n, X)`` as ``(..., n / length, length, X)``, padded with ``value``."""
    missing = -x.shape[-2] % length
    if missing:
        x = pad(x, (0, 0, 0, missing), value=value)
    return torch.unflatten(x, -2, (-1, length))


def _piecewise(work: Callable[[int, Tensor, Tensor], Sums], k: Tensor, v: Tensor, *, around: bool = False) -> Sums:
    """``work(number of the first block, k, v)`` for some blocks ``(..., blocks, T, X)`` at a time.

    Its intermediates stay in a CPU's cache; for gradients they are computed again. With ``around``, ``work`` also gets
    the block before and the block after its own.
    """
    size = max(1, budget("aft.blocks", k.device) * k.shape[-3] // k.numel())
    pieces = zip(_split(k, size, EMPTY, around), _split(v, size, 0.0, around), strict=True)
    if size >= k.shape[-3]:
        return work(0, *next(pieces))
    sums = [recomputed(work, i * size, *piece) for i, piece in enumerate(pieces)]
    return Sums(*(torch.cat(parts, -3) for parts in zip(*sums, strict=True)))


def _split(x: Tensor, size: int, value: float, around: bool) -> list[Tensor]:
    # split, not slices: the gradient of each slice would be as large as the whole.
    parts = list(torch.split(x, size, dim=-3))
    if not around:
        return parts
    end = torch.full_like(x[..., :1, :, :], value)
    before = [end, *(part[..., -1:, :, :] for part in parts[:-1])]
    after = [*(part[..., :1, :, :] for part in parts[1:]), end]
    return [torch.cat(three, -3) for three in zip(before, parts, after, strict=True)]


def triangles(k: Tensor, v: Tensor, bias: Bias | None) -> Sums:
    """The sums of row i of each block over its keys j <= i; k, v ``(..., blocks, T, X)``, T a power of two.

    A triangle is cut into squares: the second half of the rows with the first half of the keys, and so on in each
    half. No square holds a key that one of its rows does not see.
    """
    return _piecewise(lambda first, k, v: _triangles(first, k, v, bias), k, v)


def _triangles(start: int, k: Tensor, v: Tensor, bias: Bias | None) -> Sums:
    count, length = k.shape[-3:-1]
    position = torch.arange(start * length, (start + count) * length, device=k.device)
    sums = Sums(k, v)
    if bias is not None:
        own = bias(position[:, None], position[:, None])[..., 0].clamp(min=EMPTY)
        own = own.expand(*own.shape[:-2], count * length, 1)
        sums = Sums(k + torch.unflatten(own, -2, (count, length)), v)
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
    """The sums of row i over the keys j <= i without biases, in O(n); k and v are ``(..., n, X)``."""
    n = k.shape[-2]
    length = min(_RUN, power_of_two(n))
    inside = triangles(blocks(k, length, EMPTY), blocks(v, length, 0.0), None)
    if n > length:
        ends = (x.squeeze(-2) for x in inside.last())
        inside = join(inside, _before(running(*ends), 1))
    return Sums(*(x.flatten(-3, -2)[..., :n, :] for x in inside))


def _before(ends: Sums, steps: int) -> Sums:
    """Running sums ``(..., blocks, X)``, each moved ``steps`` blocks on, ``(..., blocks, 1, X)``."""
    moved = (pad(x, (0, 0, steps, -steps), value=value) for x, value in zip(ends, (EMPTY, 0.0), strict=True))
    return Sums(*(x.unsqueeze(-2) for x in moved))


def windowed(k: Tensor, v: Tensor, reach: int, bias: Bias, *, alike: bool, causal: bool) -> Sums:
    """The sums of every row over all keys, or those up to its own, with biases 0 beyond ``reach`` tokens: O(n·reach).

    ``alike``: all blocks but those at the ends have the same biases.
    """
    n = k.shape[-2]
    length = min(power_of_two(max(reach, 32)), power_of_two(n))
    k, v = blocks(k, length, EMPTY), blocks(v, length, 0.0)
    count = k.shape[-3]
    near = range(1) if causal else range(3)  # the block before; if not causal, also itself and the one after

    def work(first: int, k: Tensor, v: Tensor) -> Sums:
        inner = k.shape[-3] - 2
        # The first and the last block have missing neighbours, hence a w of their own.
        ends = sorted({0, int(first == 0), max(0, inner - int(first + inner == count)), inner} if alike else {0, inner})
        parts = []
        for start, stop in pairwise(ends):
            rows = torch.arange((first + start) * length, (first + stop) * length, device=k.device).view(-1, length)
            keys = rows[:, :1] + torch.arange(-length, (len(near) - 1) * length, device=k.device)
            seen_k, seen_v = (torch.cat([x[..., start + i : stop + i, :, :] for i in near], -2) for x in (k, v))
            parts.append(read(seen_k, seen_v, bias(rows, keys)))
        sums = parts[0] if len(parts) == 1 else Sums(*(torch.cat(part, -3) for part in zip(*parts, strict=True)))
        return join(sums, _triangles(first, k[..., 1:-1, :, :], v[..., 1:-1, :, :], bias)) if causal else sums

    sums = _piecewise(work, k, v, around=True)
    if count > 2:
        whole = Sums(*(x.squeeze(-2) for x in read(k, v)))
        sums = join(sums, _before(running(*whole), 2))
        if not causal:
            back = _before(running(*(x.flip(-2) for x in whole)), 2)
            sums = join(sums, Sums(*(x.flip(-3) for x in back)))
    return Sums(*(x.flatten(-3, -2)[..., :n, :] for x in sums))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
