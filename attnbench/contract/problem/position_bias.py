"""Biases on the logit of a pair of tokens by their distance."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from attnbench.contract.problem.shape import Shape

BUCKETS = 32
MAX_DISTANCE = 128

_TABLE_SEED = 0


def position_bias(shape: Shape) -> PositionBias | None:
    """The bias that ``shape`` asks for, for all H heads; every call gives the same numbers."""
    kinds: dict[str, type[PositionBias]] = {"alibi": Alibi, "relative": Relative}
    return None if shape.bias == "none" else kinds[shape.bias](shape)


class PositionBias(nn.Module, ABC):
    """A function of j - i for each head, where i is the query's position and j the key's."""

    @abstractmethod
    def along(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        """The bias ``(H, n)`` at whole numbers j - i ``(n,)``."""

    def forward(self, queries: slice, keys: slice, dtype: torch.dtype, heads: Tensor | None = None) -> Tensor:
        """The tile ``(H, n, m)`` for the n queries and m keys in two ranges of positions.

        Args:
            heads: indices ``(h,)`` of the wanted heads, repeats allowed; the tile is then ``(h, n, m)``.
        """
        device = next(iter((*self.parameters(), *self.buffers()))).device
        m = keys.stop - keys.start
        line = self.along(torch.arange(keys.start - queries.stop + 1, keys.stop - queries.start, device=device), dtype)
        if heads is not None:
            line = line[heads]
        # The window that starts at the r-th number is the row of the r-th last query.
        return line.unfold(-1, m, 1).flip(-2)

    def of_heads(self, heads: slice) -> PositionBias:
        """The bias of some of the H heads, for a module that has only these; the learned table keeps all heads."""
        return _OfHeads(self, heads)


class _OfHeads(PositionBias):
    def __init__(self, whole: PositionBias, heads: slice) -> None:
        super().__init__()
        self.whole, self.heads = whole, heads

    def along(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        return self.whole.along(distances, dtype)[self.heads]


class Alibi(PositionBias):
    """-slope·|i - j|, Press et al. 2022, arXiv:2108.12409.

    Slopes are 2^(-8h/H), h = 1..H, if H is a power of two. Otherwise they are those of the largest power of two P below
    H, then every other one of those of 2·P, from the first on, until there are H.

    Differs from the paper: there is a bidirectional form, by the distance in either direction, beside the causal one.
    """

    steps: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        power = 1 << (shape.H.bit_length() - 1)
        # Integers keep their values when a module is moved to bfloat16.
        steps = [2 * h for h in range(1, power + 1)] + list(range(1, 2 * power, 2))[: shape.H - power]
        self.register_buffer("steps", torch.tensor(steps))
        self.step = -4 / power

    def along(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        exponents = self.steps.to(torch.promote_types(dtype, torch.float32)) * self.step
        # Logits of hidden pairs are at a quarter of half precision's range or lower, and must stay below all others.
        lowest = torch.finfo(dtype).min / 8
        return (exponents.exp2()[:, None] * -distances.abs()).clamp_(min=lowest).to(dtype)


class Relative(PositionBias):
    """A learned number for each head and each of 32 buckets of j - i, Raffel et al. 2020, arXiv:1910.10683.

    Causal: one bucket for each distance i - j below 16, then 16 whose widths grow geometrically up to distance 128; the
    last one holds all distances beyond. Otherwise half of the buckets are for keys before the query and half for those
    after it.

    The numbers are drawn from N(0, 1) and do not depend on the seed: a bias is part of the problem, which all variants
    share.
    Differs from the paper: its attention has no factor 1/√D on the logits.
    """

    edges: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.causal = shape.causal
        self.table = nn.Parameter(torch.randn(shape.H, BUCKETS, generator=torch.Generator().manual_seed(_TABLE_SEED)))
        buckets = BUCKETS if self.causal else BUCKETS // 2
        exact = buckets // 2
        growth = MAX_DISTANCE / exact
        # Subtract a little before rounding up, for powers that are whole numbers.
        wide = [math.ceil(exact * growth ** (step / (buckets - exact)) - 1e-9) for step in range(1, buckets - exact)]
        self.register_buffer("edges", torch.tensor([*range(1, exact + 1), *wide]))

    def along(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        before = distances.neg().clamp(min=0) if self.causal else distances.abs()
        buckets = torch.bucketize(before, self.edges, right=True)
        if not self.causal:
            buckets = buckets + (distances > 0) * (BUCKETS // 2)
        return self.table[:, buckets].to(dtype)
