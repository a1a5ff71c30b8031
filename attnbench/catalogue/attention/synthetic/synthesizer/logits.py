"""The sources of a Synthesizer's logits, a class each.

A source gives ``rows``, the queries' part: ``(H, B, N, ·)``, or ``(H, 1, N, ·)`` if it is the same for every example.
From any slice of these it gives the logits of that slice over the first keys.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnbench.contract.problem.shape import Shape


class LogitSource(nn.Module):
    """Logits ``(H, B or 1, rows, keys)``."""

    per_example = True

    def rows(self, x: Tensor, start: int = 0) -> Tensor:
        """The part of the tokens x ``(B, n, C)`` at the positions ``start, start + 1, ...``."""
        raise NotImplementedError

    def logits(self, rows: Tensor, keys: int, key_rows: Tensor | None) -> Tensor:
        """The logits of ``rows`` over the first ``keys``; ``key_rows`` ``(H, B, >= keys, D)`` are for DotProduct."""
        raise NotImplementedError

    def of_pairs(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class DenseLogits(LogitSource):
    """``W₂ ReLU(W₁ x_i + b₁) + b₂``, from token i alone."""

    def __init__(self, shape: Shape, units: int, logits: int | None = None) -> None:
        super().__init__()
        H, columns = shape.H, logits or shape.N
        self.heads = H
        self.W1 = nn.Linear(shape.C, H * units)
        self.W2 = nn.Parameter(torch.randn(H, units, columns) * units**-0.5)
        self.b2 = nn.Parameter(torch.zeros(H, 1, columns))

    def rows(self, x: Tensor, start: int = 0) -> Tensor:
        units: Tensor = self.W1(x).relu_()
        return units.view(*x.shape[:2], self.heads, -1).permute(2, 0, 1, 3)

    def logits(self, rows: Tensor, keys: int, key_rows: Tensor | None) -> Tensor:
        logits = torch.baddbmm(self.b2[..., :keys], rows.flatten(1, 2), self.W2[..., :keys])
        return logits.view(*rows.shape[:3], keys)

    def of_pairs(self, x: Tensor) -> Tensor:
        N = x.shape[1]
        units = torch.relu(self.W1(x)).view(*x.shape[:2], self.heads, -1)
        return torch.einsum("bnhu,hum->bhnm", units, self.W2[..., :N]) + self.b2[..., :N]


class FactorizedDense(DenseLogits):
    """``A_i[j mod a] · B_i[j div a]``, with A_i and B_i from token i as in :class:`DenseLogits`."""

    def __init__(self, shape: Shape, units: int, a: int) -> None:
        super().__init__(shape, units, a + -(-shape.N // a))
        self.a = a

    def rows(self, x: Tensor, start: int = 0) -> Tensor:
        units = self.W1(x).relu_().view(x.shape[0] * x.shape[1], self.heads, -1)
        both: Tensor = torch.baddbmm(self.b2, units.transpose(0, 1), self.W2)
        return both.view(self.heads, *x.shape[:2], -1)

    def logits(self, rows: Tensor, keys: int, key_rows: Tensor | None) -> Tensor:
        first, second = rows[..., : self.a], rows[..., self.a : self.a + -(-keys // self.a)]
        return (second[..., :, None] * first[..., None, :]).flatten(-2)[..., :keys]

    def of_pairs(self, x: Tensor) -> Tensor:
        j = torch.arange(x.shape[1], device=x.device)
        units = torch.relu(self.W1(x)).view(*x.shape[:2], self.heads, -1)
        both = torch.einsum("bnhu,hum->bhnm", units, self.W2) + self.b2
        return both[..., j % self.a] * both[..., self.a + torch.div(j, self.a, rounding_mode="floor")]


class RandomLogits(LogitSource):
    """Row i of a learned matrix, the same for every input."""

    per_example = False

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.R = nn.Parameter(torch.randn(shape.H, shape.N, shape.N))

    def rows(self, x: Tensor, start: int = 0) -> Tensor:
        return self.R[:, None, start : start + x.shape[1]]

    def logits(self, rows: Tensor, keys: int, key_rows: Tensor | None) -> Tensor:
        return rows[..., :keys]

    def of_pairs(self, x: Tensor) -> Tensor:
        B, N, _ = x.shape
        return self.R[:, :N, :N].expand(B, -1, N, N)


class FactorizedRandom(LogitSource):
    """Row i of ``R₁ R₂ᵀ``."""

    per_example = False

    def __init__(self, shape: Shape, columns: int) -> None:
        super().__init__()
        self.R1, self.R2 = (nn.Parameter(torch.randn(shape.H, shape.N, columns) * columns**-0.25) for _ in range(2))

    def rows(self, x: Tensor, start: int = 0) -> Tensor:
        return self.R1[:, None, start : start + x.shape[1]]

    def logits(self, rows: Tensor, keys: int, key_rows: Tensor | None) -> Tensor:
        return torch.matmul(rows, self.R2[:, None, :keys].mT)

    def of_pairs(self, x: Tensor) -> Tensor:
        B, N, _ = x.shape
        return torch.einsum("hnf,hmf->hnm", self.R1[:, :N], self.R2[:, :N]).expand(B, -1, N, N)


class DotProduct(LogitSource):
    """``q_i · k_j / √D``, as in softmax attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.width, self.scale = shape.H, shape.D, shape.D**-0.5
        self.q, self.k = nn.Linear(shape.C, shape.C, bias=False), nn.Linear(shape.C, shape.C, bias=False)

    def rows(self, x: Tensor, start: int = 0) -> Tensor:
        return self._heads(self.q(x) * self.scale)

    def keys(self, x: Tensor) -> Tensor:
        return self._heads(self.k(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, self.width).permute(2, 0, 1, 3)

    def logits(self, rows: Tensor, keys: int, key_rows: Tensor | None) -> Tensor:
        assert key_rows is not None
        return torch.matmul(rows, key_rows[:, :, :keys].mT)

    def of_pairs(self, x: Tensor) -> Tensor:
        q, k = (y.view(*x.shape[:2], self.heads, -1) for y in (self.q(x), self.k(x)))
        pairs: Tensor = torch.einsum("bnhd,bmhd->bhnm", q, k) / self.width**0.5
        return pairs
