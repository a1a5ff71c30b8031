"""The modes of AFT: the pairs of positions that have a bias, and the sums over keys for each.

Learned tensors belong to the module and are handed in by name. k and v are ``(B, n, C)``, in the accumulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from attnbench.catalogue.attention.synthetic.aft.sums import (
    EMPTY,
    Bias,
    Sums,
    Weighed,
    blocks,
    join,
    power_of_two,
    read,
    running,
    triangles,
    windowed,
)
from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.masks import at_most
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.tiling import recomputed
from attnbench.contract.problem.shape import Shape

Learned = Mapping[str, Tensor]


class BoundedState(NamedTuple):
    """State of decoding with a bias of bounded reach: one sum over the tokens beyond it, and those within it."""

    log: Tensor
    """``(B, 1, C)``."""
    mean: Tensor
    k: Tensor
    """``(B, r, C)``."""
    v: Tensor
    length: int


class Simple:
    """No pair has a bias."""

    back, ahead = 0, 0

    def __init__(self, causal: bool) -> None:
        self.causal = causal

    def draw(self) -> dict[str, Tensor]:
        """Initial values of the learned tensors; biases have variance 1."""
        return {}

    def w(self, learned: Learned, i: int, j: int) -> Tensor | float:
        """The bias of query i and a key j within reach, one number or one for each head."""
        return 0.0

    def mean(self, k: Tensor, v: Tensor, key_mask: Tensor | None, learned: Learned) -> Tensor:
        """The weighted means ``(B, n, C)`` of the values; ``(B, 1, C)`` if all queries share them."""
        return (running(k, v) if self.causal else read(k, v)).mean

    def begin(self, k: Tensor, v: Tensor) -> Cache | BoundedState:
        """The state after these tokens; those out of reach are kept as one sum."""
        old = max(0, k.shape[1] - self.back)
        far = Sums(k.new_full((k.shape[0], 1, k.shape[2]), EMPTY), v.new_zeros(v.shape[0], 1, v.shape[2]))
        if old:
            far = read(k[:, :old], v[:, :old])
        return BoundedState(*far, k[:, old:].clone(), v[:, old:].clone(), k.shape[1])

    def step(self, state: Any, k: Tensor, v: Tensor, learned: Learned) -> tuple[Tensor, Cache | BoundedState]:
        """The mean ``(B, 1, C)`` for the next token, and the state after it."""
        far = join(Sums(state.log, state.mean), Sums(k, v))
        return far.mean, BoundedState(*far, state.k, state.v, state.length + 1)


class Full(Simple):
    """Every pair has a bias, u_i · u'_j with ``factors`` columns or, with 0, an entry: O(n²·d) time, O(n·d) memory."""

    groups = 1
    """Groups of channels that have biases of their own."""

    def __init__(self, shape: Shape, factors: int) -> None:
        super().__init__(shape.causal)
        self.longest = self.width = self.back = shape.N
        self.ahead = 0 if shape.causal else shape.N
        self.factors = factors

    def draw(self) -> dict[str, Tensor]:
        if self.factors:
            return {name: torch.randn(self.longest, self.factors) * self.factors**-0.25 for name in ("rows", "columns")}
        return {"w": torch.randn(self.longest, self.width)}

    def w(self, learned: Learned, i: int, j: int) -> Tensor | float:
        return learned["rows"][i] @ learned["columns"][j] if self.factors else learned["w"][i, self.column(i, j - i)]

    def column(self, i: Any, distance: Any) -> Any:
        """Index of the bias of i and i + distance among the ``width`` entries of row i."""
        return i + distance

    def bias(self, learned: Learned, rows: Tensor, keys: Tensor) -> Tensor:
        """w ``(groups, squares, r, s)`` for the positions ``(squares, r)`` and ``(squares, s)``."""
        return self.entries(learned, rows, keys, keys[:, None] - rows[:, :, None])

    def entries(self, learned: Learned, rows: Tensor, keys: Tensor, distance: Tensor) -> Tensor:
        """u_i · u'_j, or the table's entry; ``distance`` is ``(squares, r, s)``."""
        last = self.longest - 1
        column = self.column(rows[:, :, None], distance).clamp(0, self.width - 1)
        rows, keys = rows.clamp(0, last), keys.clamp(0, last)
        if not self.factors:
            w = learned["w"][rows[:, :, None], column]
            return w[None].to(accumulator(w.dtype))
        dtype = accumulator(learned["rows"].dtype)  # converted first: gradients of one number are summed in it
        left, right = embedding(rows, learned["rows"].to(dtype)), embedding(keys, learned["columns"].to(dtype))
        return torch.matmul(left, right.mT)[None]

    def mean(self, k: Tensor, v: Tensor, key_mask: Tensor | None, learned: Learned) -> Tensor:
        B, n, C = k.shape
        self.check(n)
        k, v = (self._fold(y, key_mask) for y in (k, v))
        mean = self.folded(k, v, partial(self._seen, n, key_mask, learned), key_mask, learned)
        if key_mask is None:
            mean = torch.unflatten(mean, -1, (B, -1)).movedim(2, 0)
        return mean.transpose(1, 2).reshape(B, n, C)

    def folded(self, k: Tensor, v: Tensor, bias: Bias, key_mask: Tensor | None, learned: Learned) -> Tensor:
        """The means for k and v in the layout of :meth:`_fold`, which they keep."""
        parts = [learned[name][: k.shape[-2]].to(k.dtype) for name in ("rows", "columns", "w") if name in learned]
        padded = None if key_mask is None else ~key_mask[:, None, None]
        return full(k, v, parts[0], parts[1] if self.factors else None, bias, padded, causal=self.causal)

    def check(self, tokens: int) -> None:
        """Raise if there are more tokens than biases."""
        at_most(self.longest, tokens, "the biases were")

    def _fold(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """``(B, N, C)`` as ``(G, N, B·C/G)``: one row of w serves the batch; with padding ``(B, G, N, C/G)``."""
        B, N, _ = x.shape
        heads = x.view(B, N, self.groups, -1)
        if key_mask is not None:
            return heads.transpose(1, 2)
        return heads.permute(2, 1, 0, 3).reshape(self.groups, N, -1)

    def _seen(self, tokens: int, key_mask: Tensor | None, learned: Learned, rows: Tensor, keys: Tensor) -> Tensor:
        """:meth:`bias` for keys that may be padded, or lie outside of 0 .. ``tokens`` - 1."""
        inside = keys.clamp(0, tokens - 1)
        if key_mask is None:
            return self.bias(learned, rows, inside)
        real = key_mask[:, inside] & (inside == keys)
        return self.bias(learned, rows, keys).masked_fill(~real[:, None, :, None], -torch.inf)

    def begin(self, k: Tensor, v: Tensor) -> Cache | BoundedState:
        return Cache.of(k[:, None], v[:, None], self.longest)

    def step(self, state: Any, k: Tensor, v: Tensor, learned: Learned) -> tuple[Tensor, Cache | BoundedState]:
        self.check(state.length + 1)
        rows = torch.full((1, 1), state.length, device=k.device)
        state = state.append(k[:, None], v[:, None])
        w = self.bias(learned, rows, torch.arange(state.length, device=k.device)[None])
        return read(state.keys[:, 0], state.values[:, 0], w[0]).mean, state


class LocalMode(Full):
    """Pairs within ``window`` tokens have a bias: O(n·w·d)."""

    alike = False
    """The distance alone counts."""

    begin = Simple.begin

    def __init__(self, shape: Shape, factors: int, window: int) -> None:
        super().__init__(shape, factors)
        self.back, self.ahead = window, 0 if shape.causal else window
        self.width = self.back + 1 + self.ahead

    def column(self, i: Any, distance: Any) -> Any:
        return distance + self.back

    def bias(self, learned: Learned, rows: Tensor, keys: Tensor) -> Tensor:
        distance = keys[:, None] - rows[:, :, None]
        w = self.entries(learned, rows, keys, distance)
        return w.masked_fill((distance < -self.back) | (distance > self.ahead), 0.0)

    def folded(self, k: Tensor, v: Tensor, bias: Bias, key_mask: Tensor | None, learned: Learned) -> Tensor:
        return windowed(k, v, max(self.back, self.ahead), bias, alike=self.alike, causal=self.causal).mean

    def step(self, state: Any, k: Tensor, v: Tensor, learned: Learned) -> tuple[Tensor, Cache | BoundedState]:
        self.check(state.length + 1)
        rows, far = torch.full((1, 1), state.length, device=k.device), Sums(state.log, state.mean)
        k, v = torch.cat((state.k, k), 1), torch.cat((state.v, v), 1)
        keys = rows + torch.arange(1 - k.shape[1], 1, device=k.device)
        heads_k, heads_v = (torch.unflatten(y, 2, (self.groups, -1)).transpose(1, 2) for y in (k, v))
        near = read(heads_k, heads_v, self.bias(learned, rows, keys)[:, 0])
        mean = join(far, Sums(*(y.transpose(1, 2).flatten(2) for y in near))).mean
        if k.shape[1] > self.back:
            far, k, v = join(far, Sums(k[:, :1], v[:, :1])), k[:, 1:], v[:, 1:]
        return mean, BoundedState(*far, k, v, state.length + 1)


class Conv(LocalMode):
    """Pairs within reach of a kernel have a bias for their head and distance: O(n·kernel·d)."""

    alike = True

    def __init__(self, shape: Shape, kernel: int) -> None:
        super().__init__(shape, 0, kernel - 1 if shape.causal else kernel // 2)
        self.groups = shape.H

    def draw(self) -> dict[str, Tensor]:
        return {"w": torch.randn(self.groups, self.width)}

    def w(self, learned: Learned, i: int, j: int) -> Tensor | float:
        return learned["w"][:, self.column(i, j - i)]

    def bias(self, learned: Learned, rows: Tensor, keys: Tensor) -> Tensor:
        distance = keys[:1, None] - rows[:1, :, None]  # the same in every square
        w = learned["w"].to(accumulator(learned["w"].dtype))[:, (distance + self.back).clamp(0, self.width - 1)]
        return w.masked_fill((distance < -self.back) | (distance > self.ahead), 0.0)

    def check(self, tokens: int) -> None:
        """Accept any length."""


_ROWS = 128
"""Rows taken at a time."""


def full(
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    columns: Tensor | None,
    bias: Bias,
    padded: Tensor | None = None,
    *,
    causal: bool,
) -> Tensor:
    """Means of every row over all keys, or those up to its own, with a bias for each pair: O(n²) time, O(n) memory.

    Args:
        k, v: ``(..., 1, n, X)``.
        rows, columns: w is ``rows @ columnsᵀ``, ``(n, F)`` each; if ``columns`` is None, w is ``rows``, ``(n, n)``.
        bias: the same w.
        padded: ``(..., 1, 1, n)`` bool, True for no key; None if all are there.
    """
    n = k.shape[-2]
    length = min(_ROWS, power_of_two(n))
    inside = triangles(blocks(k, length, EMPTY), blocks(v, length, 0.0), bias) if causal else None
    keys: tuple[Tensor, Tensor] = (k, v) if causal else Weighed.of(k, v)
    means = []
    # split, not slices: the gradient of each slice would be as large as the whole.
    for block, part in enumerate(torch.split(rows, length)):
        own = inside and Sums(*(x[..., block, : part.shape[0], :] for x in inside))
        if own and not block:
            means.append(own.mean)
            continue
        seen = [x[..., : block * length, :] for x in keys] if own else keys
        means.append(recomputed(_rows_of_full, part, columns, padded, own, *seen))
    return torch.cat(means, -2)


def _rows_of_full(
    rows: Tensor, columns: Tensor | None, padded: Tensor | None, own: Sums | None, *keys: Tensor
) -> Tensor:
    weighed = Weighed.of(*keys) if own else Weighed(*keys)
    n = weighed.both.shape[-2]
    w = rows[:, :n] if columns is None else rows @ columns[:n].mT
    sums = weighed.read(w if padded is None else w.masked_fill(padded[..., :n], -torch.inf))
    return join(own, sums).mean if own else sums.mean
