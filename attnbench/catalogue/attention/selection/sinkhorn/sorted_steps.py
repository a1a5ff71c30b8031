"""Sorted blocks one query at a time: a row of the balanced sort matrix whenever a block begins."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.catalogue.attention.selection.sinkhorn.mixing import learned_scores
from attnbench.catalogue.engines.decoding.kv_cache import Cache, attend
from attnbench.catalogue.engines.precision import accumulator


class Sorted(NamedTuple):
    """The state after some tokens; the last of them belong to a block that may still be open."""

    cache: Cache
    """Every token: the source of later mixtures, and the open block."""
    total: Tensor
    """``(B, H, 1, D)``: sum over all tokens of the vectors, queries or keys, whose means are scored."""
    columns: Tensor
    """``(B, H, iterations, n)``: log of the sum of each of the n columns over all rows so far, in each iteration."""
    keys: Tensor
    """``(B, H, b, D)``: the open block's mixture; no rows for the first block."""
    values: Tensor


def balanced_row(scores: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The next row of S, and the column sums that include it.

    Column sums of a causal S run only over rows so far, and so do those in each iteration: a new row changes no
    earlier one.

    Args:
        scores: ``(B, H, 1, n)`` of the new block with all n before it, n >= 1.
        columns: ``(B, H, iterations, n - 1)``, logarithms.

    Returns:
        ``(B, H, 1, n)`` and ``(B, H, iterations, n)``.
    """
    columns = pad(columns, (0, 1), value=-torch.inf)
    balanced, sums = scores, []
    for before in torch.split(columns, 1, 2):
        sums.append(torch.logaddexp(before, balanced))
        share = scores - sums[-1]
        row = share.logsumexp(-1, keepdim=True)
        balanced = scores - row
    return (share - row).exp(), torch.cat(sums, 2)


class SinkhornDecoding:
    """``begin`` and ``step`` of a module with the options of Sinkhorn attention."""

    block: int
    iterations: int
    temperature: float
    tokens: int
    net: nn.ParameterDict

    @torch.no_grad()
    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Sorted:
        B, H, n, D = k.shape
        b, dtype = self.block, accumulator(k.dtype)
        nothing = k.new_empty((B, H, 0, D))
        columns = k.new_empty((B, H, self.iterations, 0), dtype=dtype)
        total = k.new_zeros((B, H, 1, D), dtype=dtype)
        state = Sorted(Cache.of(k, v, self.tokens), total, columns, nothing, nothing)
        seen = k if self.net else q
        for start in range(0, n, b):
            state = self._begin_block(state, seen[:, :, start : start + 1], start, mix=start + b >= n)
            inside = seen[:, :, start : start + b].sum(2, keepdim=True, dtype=dtype)
            state = state._replace(total=state.total + inside)
        return state

    @torch.no_grad()
    def step(self, state: Sorted, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Sorted]:
        start, seen = state.cache.length - state.cache.length % self.block, k if self.net else q
        if start == state.cache.length:
            state = self._begin_block(state, seen, start)
        state = state._replace(cache=state.cache.append(k, v), total=state.total + seen)
        keys = torch.cat([state.keys, state.cache.keys[:, :, start:]], 2)
        return attend(q, keys, torch.cat([state.values, state.cache.values[:, :, start:]], 2)), state

    def _begin_block(self, state: Sorted, first: Tensor, start: int, *, mix: bool = True) -> Sorted:
        n = start // self.block
        if not n:
            return state
        keys, values = (x[:, :, :start].view(*x.shape[:2], n, self.block, -1) for x in state.cache[:2])
        mean = (state.total + first) / (start + 1)
        if self.net:
            scores = learned_scores(self.net, mean, n + 1)[..., :n]
        else:
            scores = mean * mean.shape[-1] ** -0.5 @ keys.mean(3, dtype=mean.dtype).mT
        row, columns = balanced_row(scores / self.temperature, state.columns)
        if not mix:
            return state._replace(columns=columns)
        mixed = ((row @ x.flatten(3).to(row.dtype)).view_as(x[:, :, 0]).to(x.dtype) for x in (keys, values))
        return Sorted(state.cache, state.total, columns, *mixed)
