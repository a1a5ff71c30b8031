"""Random projections ω, and their feature maps: exponentials, sines and cosines, or rectified values."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines.linear.feature_map import FeatureMap, LogKeys
from attnbench.catalogue.engines.precision import LOG2E
from attnbench.catalogue.engines.tiling import fill


class Projected(FeatureMap):
    """Feature maps that start from u = ω·x·D^(-1/4), for x ``(G, c, D)``.

    ``weight`` is ωᵀ D^(-1/4), ``(D, R)``, or ``(G, D, R)`` for one projection per pair of batch entry and head.
    """

    sides = 1
    """Features per row of ω."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.squared = weight.shape[-2] ** -0.5
        """(D^(-1/4))²"""
        self.width = self.sides * weight.shape[-1]

    def project(self, weight: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        if weight.dim() == 3:
            return torch.bmm(x, weight) if out is None else torch.bmm(x, weight, out=out)
        # As one matrix: a batched product would copy the weight for each pair.
        rows = x.flatten(0, 1)
        u = torch.mm(rows, weight) if out is None else torch.mm(rows, weight, out=out.view(len(rows), -1))
        return u.view(*x.shape[:2], -1)

    def pull_back(self, grad: Tensor) -> Tensor:
        return self.project(self.weight.mT, grad)

    def half_square(self, x: Tensor) -> Tensor:
        """log2(e)·‖x D^(-1/4)‖²/2, ``(G, c, 1)``."""
        square: Tensor = torch.linalg.vecdot(x, x)[..., None]
        return square.mul_(0.5 * LOG2E * self.squared)


class PositiveFeatures(Projected):
    """φ(x) = exp(ω·x - ‖x‖²/2): unbiased for exp(x·y), never negative (lemma 1 of the paper)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.binary = weight * LOG2E

    def exponents(self, x: Tensor, out: Tensor) -> None:
        self.project(self.binary, x, out)

    def exponentiate(self, x: Tensor, out: Tensor) -> Tensor:
        self.exponents(x, out)
        largest = out.amax(-1, keepdim=True)
        out.sub_(largest).exp2_()
        return largest

    def queries(self, x: Tensor, out: Tensor) -> None:
        self.exponentiate(x, out)

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        return self.exponentiate(x, out).sub_(self.half_square(x))

    def queries_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        return self.pull_exponents_back(grad.mul_(features))

    def keys_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        grad.mul_(features)
        return self.pull_exponents_back(grad).addcmul_(x, grad.sum(-1, keepdim=True), value=-self.squared)

    def pull_exponents_back(self, grad: Tensor) -> Tensor:
        return self.pull_back(grad)


class HyperbolicFeatures(PositiveFeatures):
    """φ(x) = exp(-‖x‖²/2)·[exp(ω·x), exp(-ω·x)]: positive features in pairs ±ω, half the variance or less."""

    sides = 2

    def exponents(self, x: Tensor, out: Tensor) -> None:
        u = self.project(self.binary, x)
        plus, minus = out.chunk(2, -1)
        plus.copy_(u)
        fill(minus, torch.neg, u)

    def pull_exponents_back(self, grad: Tensor) -> Tensor:
        plus, minus = grad.chunk(2, -1)
        return self.pull_back(plus - minus)


class ExponentialFeatures(PositiveFeatures):
    """φ(x) = exp(weightᵀ x), weight ``(D, R)``."""

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        return self.exponentiate(x, out)

    def keys_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        return self.queries_grad(x, features, grad)


class LogExponentials(ExponentialFeatures, LogKeys):
    """:class:`ExponentialFeatures`, each key feature relative to its own largest value over the keys.

    ``level`` ``(G, 1, R)`` are the exponents of these values, to the base 2, added to those of queries; None: 0.
    """

    def __init__(self, weight: Tensor, level: Tensor | None = None) -> None:
        super().__init__(weight)
        self.level = level

    def at(self, level: Tensor) -> FeatureMap:
        return LogExponentials(self.weight, level)

    def queries(self, x: Tensor, out: Tensor) -> None:
        self.exponents(x, out)
        if self.level is not None:
            out.add_(self.level)
        out.sub_(out.amax(-1, keepdim=True)).exp2_()

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        self.exponents(x, out)
        return out


class CosineSineFeatures(Projected):
    """φ(x) = [cos(ω·x), sin(ω·x)]: φ(x)·φ(y) averages cos(ω·(x - y)), about exp(-‖x - y‖²/2) for ω ~ N(0, I)."""

    sides = 2

    def queries(self, x: Tensor, out: Tensor) -> None:
        u = self.project(self.weight, x)
        cos, sin = out.chunk(2, -1)
        fill(cos, torch.cos, u)
        fill(sin, torch.sin, u)

    def queries_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        cos, sin = features.chunk(2, -1)
        d_cos, d_sin = grad.chunk(2, -1)
        return self.pull_back((cos * d_sin).sub_(d_cos.mul_(sin)))


class TrigFeatures(CosineSineFeatures):
    """φ(x) = exp(‖x‖²/2)·[cos(ω·x), sin(ω·x)]: unbiased for exp(x·y), of either sign."""

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        self.queries(x, out)
        return self.half_square(x)

    def keys_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        norm = torch.linalg.vecdot(features, grad)[..., None]
        return self.queries_grad(x, features, grad).addcmul_(x, norm, value=self.squared)


class ReluFeatures(Projected):
    """φ(x) = max(ω·x, 0) + 0.001: a kernel other than exp(x·y)."""

    floor = 1e-3

    def queries(self, x: Tensor, out: Tensor) -> None:
        self.project(self.weight, x, out).relu_().add_(self.floor)

    def queries_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        return self.pull_back(grad.mul_(features.sub_(self.floor).sign_()))


Features = Annotated[int, Field(ge=1, description="random projections R; gaussian makes two features of each")]
Kernel = Annotated[Literal["gaussian", "arccos"], Field(description="which kernel of q̂ and k̂ the features estimate")]
Temperature = Annotated[
    float, Field(gt=0, description="τ: queries and keys have length 1/τ, the largest logit is 1/τ²")
]


Projection = Annotated[
    Literal["orthogonal", "iid"], Field(description="rows of ω orthogonal in blocks of D, or independent")
]
Norms = Literal["chi", "sqrt-d", "quantile"]


def draw_projection(
    features: int, head_dim: int, projection: Projection = "orthogonal", norms: Norms = "chi"
) -> Tensor:
    """Rows ω_1 .. ω_R ``(R, D)`` float32, each a direction times a radius, from the global CPU generator.

    Args:
        projection: ``iid``: independent uniform directions. ``orthogonal``: independent blocks of D rows, each the
            rows of a Haar-distributed orthogonal matrix (the last block cut).
        norms: ``chi``: independent chi radii with D degrees of freedom, so that each row by itself is N(0, I).
            ``sqrt-d``: every radius is √D. ``quantile``: the chi quantiles i / (R + 1), i = 1 .. R, given to the rows
            by a random permutation.
    """
    if projection == "iid":
        gaussian = torch.randn(features, head_dim, dtype=torch.float64)
        if norms == "chi":
            return gaussian.float()
        directions = torch.nn.functional.normalize(gaussian, dim=1)
    else:
        directions = haar(-(-features // head_dim), head_dim).flatten(0, 1)[:features]
    return (directions * _radii(features, head_dim, norms)[:, None]).float()


def haar(count: int, size: int) -> Tensor:
    """``(count, size, size)`` float64 orthogonal matrices, uniformly distributed.

    QR alone is not uniform, since LAPACK fixes the signs by its own rule; Q · sign(diag R) is. (So is sign(diag R) · Q:
    in the reflections behind Q, the sign of R_jj goes with the sign of row j as it goes with that of column j.)
    """
    q, r = torch.linalg.qr(torch.randn(count, size, size, dtype=torch.float64))
    signs = torch.where(r.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0)
    uniform: Tensor = q * signs[:, None, :]
    return uniform


def _radii(features: int, head_dim: int, norms: Norms) -> Tensor:
    if norms == "chi":
        # Drawn apart from the directions: the norms of the matrix behind Q are not independent of Q.
        return torch.randn(features, head_dim, dtype=torch.float64).square().sum(1).sqrt()
    if norms == "sqrt-d":
        return torch.full((features,), head_dim**0.5, dtype=torch.float64)
    import numpy as np
    from scipy.special import gammaincinv  # loads slowly, and only this option needs it

    # No tensors in between: this may run where only shapes are traced.
    levels = np.arange(1, features + 1) / (features + 1)
    quantiles = torch.tensor(np.sqrt(2 * gammaincinv(head_dim / 2, levels)).tolist(), dtype=torch.float64)
    return quantiles[torch.randperm(features)]
