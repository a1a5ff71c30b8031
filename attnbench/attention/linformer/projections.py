"""The ways in which M keys and values become R rows; what they multiply by belongs to the module, and is handed in."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from attnbench.engines.low_rank.segments import Segments, any_real, strided_convolution
from attnbench.errors import Unsupported

Rows = tuple[Tensor, Tensor, Tensor | None]
"""Keys and values ``(B, H, R, D)``; which rows are filled, ``(B, R)`` bool, None: all."""


class Projection(Protocol):
    """One way; ``drawn`` is the matrix or kernel for keys and the one for values, or one for both, or nothing."""

    scales: tuple[float, float] = (1.0, 1.0)
    """What the dense rows of keys and of values are multiplied by."""

    def rows(self, k: Tensor, v: Tensor, key_mask: Tensor | None, *drawn: Tensor) -> Rows:
        """The rows of k and v ``(B, H, M, D)``, which are 0 at padded keys."""
        ...

    def dense(self, x: Tensor, real: Tensor, *drawn: Tensor) -> Tensor:
        """The rows ``(H, R, D)`` of the ``real`` keys or values of x ``(H, M, D)``, by the first of ``drawn``."""
        ...


class Learned(Projection):
    """A matrix ``(R, M)`` or ``(H, R, M)``, from N(0, 1/R)."""

    def __init__(self, rank: int, tokens: int) -> None:
        self.rank, self.tokens = rank, tokens

    def draw(self, *heads: int) -> Tensor:
        drawn: Tensor = torch.randn(*heads, self.rank, self.tokens) * self.rank**-0.5
        return drawn

    def dense(self, x: Tensor, real: Tensor, *drawn: Tensor) -> Tensor:
        return drawn[0][..., real.nonzero()[:, 0]] @ x[:, real]

    def rows(self, k: Tensor, v: Tensor, key_mask: Tensor | None, *drawn: Tensor) -> Rows:
        if (M := k.shape[2]) > self.tokens:
            raise Unsupported(f"{M} keys, but the projection was made for at most {self.tokens}")
        columns = [W[..., :M] for W in drawn]
        return self._project(columns[0], k), self._project(columns[-1], v), None

    @staticmethod
    def _project(E: Tensor, x: Tensor) -> Tensor:
        # einsum folds the axes that share E into the columns of one product; matmul would repeat E for each of them.
        return torch.einsum("hrm,bhmd->bhrd" if E.ndim == 3 else "rm,bhmd->bhrd", E, x)


class Random(Learned):
    """Theorem 2: E = δ·G and F = exp(-δ)·G, with one G from N(0, 1/R)."""

    def __init__(self, rank: int, tokens: int, delta: float) -> None:
        super().__init__(rank, tokens)
        self.scales = delta, math.exp(-delta)

    def rows(self, k: Tensor, v: Tensor, key_mask: Tensor | None, *drawn: Tensor) -> Rows:
        keys, values, _ = super().rows(k, v, key_mask, *drawn)
        return self.scales[0] * keys, self.scales[1] * values, None


class Convolution(Projection):
    """A kernel ``(c, D, D)`` or ``(H, c, D, D)`` over all channels, with stride c = ceil(M / R)."""

    def __init__(self, rank: int, tokens: int, channels: int) -> None:
        self.length, self.channels = -(-tokens // rank), channels

    def draw(self, *heads: int) -> Tensor:
        c, D = self.length, self.channels
        drawn: Tensor = torch.randn(*heads, c, D, D) * (c * D) ** -0.5
        return drawn

    def dense(self, x: Tensor, real: Tensor, *drawn: Tensor) -> Tensor:
        rows: dict[int, Tensor | int] = {}
        for t in real.nonzero()[:, 0].tolist():
            r, offset = divmod(t, self.length)
            rows[r] = rows.get(r, 0) + x[:, t, None] @ drawn[0][..., offset, :, :]
        return torch.cat([row for row in rows.values() if isinstance(row, Tensor)], 1)

    def rows(self, k: Tensor, v: Tensor, key_mask: Tensor | None, *drawn: Tensor) -> Rows:
        filled = None if key_mask is None else any_real(key_mask, self.length)
        return strided_convolution(k, drawn[0]), strided_convolution(v, drawn[-1]), filled


class Pooling(Projection):
    """Averages, or elementwise maxima, of runs of real keys; nothing is drawn."""

    def __init__(self, rank: int, *, largest: bool) -> None:
        self.rank, self.largest = rank, largest

    def dense(self, x: Tensor, real: Tensor, *drawn: Tensor) -> Tensor:
        runs = x[:, real].tensor_split(min(self.rank, int(real.sum())), 1)
        return torch.stack([run.amax(1) if self.largest else run.mean(1) for run in runs], 1)

    def rows(self, k: Tensor, v: Tensor, key_mask: Tensor | None, *drawn: Tensor) -> Rows:
        runs = Segments(self.rank, k.shape[2], key_mask)
        pool = runs.max if self.largest else runs.mean
        return pool(k), pool(v), runs.filled
