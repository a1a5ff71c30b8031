"""FAVOR++: positive random features with a free parameter that gives the least variance for the data."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines.linear import expectations
from attnbench.catalogue.engines.linear.feature_attention import Chunk, FeatureAttention, Form
from attnbench.catalogue.engines.linear.feature_map import FeatureMap
from attnbench.catalogue.engines.linear.random_maps import (
    ExponentialFeatures,
    LogExponentials,
    Projection,
    draw_projection,
)
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, Traits, register


@register(
    "favor-plus-plus",
    family="kernel",
    source="Likhosherstov et al. 2022, arXiv:2205.15317, equations 4-8",
    formula="φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = exp(A‖ω‖² + √(1-4A)·ωx - ‖x‖²/2),  x ← x/D^¼,  ω ~ N(0, I)",
    cost="O(n·R·d)",
    memory_exponent=1.0,
    traits=Traits(stochastic=True, decode=True, permutable=True, converges_with="features", knob=Knob("features")),
    settings=("features=16,chunk=5", "features=16,projection=iid,spread=3.0,chunk=5"),
)
class FavorPlusPlus(FeatureAttention):
    """FAVOR++: positive features of bounded size and least variance.

    Likhosherstov et al. 2022, "Chefs' Random Tables": optimal positive random features (OPRF), section 3. With
    x = q/D^¼ and y = k/D^¼, f(x) = (1 - 4A)^(D/4)·exp(A‖ω‖² + √(1 - 4A)·ω·x - ‖x‖²/2) satisfies f(x)·f(y) = exp(x·y)
    on average for every A < 1/8 (theorem 3.1). A = 0 gives the Performer's positive features, and A < 0 bounds f. The A
    of least variance depends only on S = ‖x + y‖²: with t = (D + 2S + √((D + 2S)² + 8DS)) / 2D it is (1 - t) / 8.

    S is the mean over all pairs of query and key, separately for each batch entry and head. It follows from the means
    of x, y, ‖x‖² and ‖y‖² in O(n·d), and gradients pass through it. Padded keys are left out, and where N = M so are
    the queries at the same positions. Whatever S is, the products stay unbiased; only their variance changes.

    Causal: the mean over all pairs would tell a query about later tokens, and sums that grow token by token need one A
    for all. So S is the fixed number ``spread``, or 2√D, its mean for standard normal q and k.

    q ``(B, H, N, D)``, k and v ``(B, H, M, D)``; one ω ``(R, D)`` for all heads. Each key feature is taken relative to
    its own largest value: no denominator underflows as long as the exponents are finite. If causal, keys are relative
    to the largest of all features so far: a denominator underflows, and gives NaN, where a query is large in other
    features than its keys are, in float32 from logits of about 200 on.

    Differs from the authors' code: Q of QR gets the signs that make it uniform; one S for each head and example, so
    that no example depends on another; nothing is added to the denominator.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        features: Annotated[int, Field(ge=1, description="random projections R")] = 256,
        projection: Projection = "orthogonal",
        spread: Annotated[
            float | None, Field(ge=0, description="mean of ‖q+k‖²/√D to tune for; none: from the data, 2√D if causal")
        ] = None,
        chunk: Chunk = None,
        form: Form = "auto",
    ) -> None:
        super().__init__(shape, chunk, form)
        self.independent = projection == "iid"
        self.spread = 2 * shape.D**0.5 if spread is None and shape.causal else spread
        self.projection: Tensor
        self.register_buffer("projection", draw_projection(features, shape.D, projection))

    def pair_weights(self, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
        D, scale, omega = q.shape[-1], float(q.shape[-1] ** -0.25), self.projection.to(q.dtype)
        x, y = q * scale, k * scale
        S = torch.as_tensor(self.spread or 0.0, dtype=q.dtype, device=q.device)
        if self.spread is None:
            keys = allowed[:, :, -1]
            counted = keys[..., None, :] & (keys[..., None] if q.shape[2] == k.shape[2] else True)
            each = (x[:, :, :, None] + y[:, :, None]).square().sum(-1) * counted
            total = counted.expand(-1, -1, q.shape[2], -1).sum((2, 3), keepdim=True)
            S = each.sum((2, 3), keepdim=True) / total.clamp(min=1)
        A = (1 - (D + 2 * S + ((D + 2 * S).square() + 8 * D * S).sqrt()) / (2 * D)) / 8
        f_q, f_k = (
            (1 - 4 * A).pow(D / 4)
            * (
                A * omega.square().sum(-1)[..., None, :]
                + (1 - 4 * A).sqrt() * (z @ omega.mT)
                - z.square().sum(-1, keepdim=True) / 2
            ).exp()
            for z in (x, y)
        )
        return f_q @ f_k.mT / omega.shape[-2]

    def feature_map(self, dtype: torch.dtype) -> FeatureMap:
        omega = self.projection.to(accumulator(dtype)).t()
        rows = (omega, omega.square().sum(0, keepdim=True), torch.ones_like(omega[:1]))
        return (ExponentialFeatures if self.causal else LogExponentials)(torch.cat(rows))

    def prepare(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """√(1 - 4A)·x, A and -‖x‖²/2, joined to ``(B, H, N, D + 2)``, in which the exponent is linear."""
        x = x.to(accumulator(x.dtype))
        factor, constant = parameters or _parameters(x.new_full((), self.spread or 0.0), x.shape[-1])
        half_square = expectations.squares(x) * (-0.5 * x.shape[-1] ** -0.5)
        return torch.cat([factor * x, constant.expand_as(half_square), half_square], -1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        parameters = () if self.spread is not None else _parameters(_mean_spread(q, k, key_mask), q.shape[-1])
        return self.attend_prepared(q, k, v, key_mask, parameters)

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """f(q)·f(k) / R."""
        every = torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        return self.pair_weights(q, k, every)

    def kernel_variance(self, q: Tensor, k: Tensor) -> Tensor | None:
        """The variance of f(q)·f(k) / R; None for orthogonal ω, which have no closed form.

        E f(x)²f(y)² = (1 - 4A)^D (1 - 8A)^(-D/2) exp(2(1 - 4A)/(1 - 8A)·‖z‖² - ‖x‖² - ‖y‖²).
        """
        if not self.independent:
            return None
        D, scale = q.shape[-1], float(q.shape[-1] ** -0.25)
        x, y = q * scale, k * scale
        square, lengths = expectations.squared_sums(x, y), expectations.squares(x) + expectations.squares(y).mT
        spread = square.mean((2, 3), keepdim=True) if self.spread is None else torch.full_like(square, self.spread)
        t = inverse_rho(spread, D)  # 1 - 8A, and 1 - 4A = (1 + t) / 2
        second = (D * ((1 + t) / 2).log() - D / 2 * t.log() + (1 + t) / t * square - lengths).exp()
        return (second - (2 * x @ y.mT).exp()) / self.projection.shape[-2]


def inverse_rho(spread: Tensor, head_dim: int) -> Tensor:
    """t = 1 - 8A for the A of least variance at S = ``spread``."""
    linear = head_dim + 2 * spread
    return (linear + (linear.square() + 8 * head_dim * spread).sqrt()) / (2 * head_dim)


def _parameters(spread: Tensor, head_dim: int) -> tuple[Tensor, ...]:
    """√(1 - 4A) / D^¼ and A."""
    t = inverse_rho(spread, head_dim)
    return ((1 + t) / 2).sqrt() * head_dim**-0.25, (1 - t) / 8


def _mean_spread(q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Mean of ‖q + k‖²/√D over the pairs, ``(B, H, 1, 1)``, float32 at least."""
    (mean_q, square_q), (mean_k, square_k) = (
        _moments(x, key_mask if x.shape[2] == k.shape[2] else None) for x in (q, k)
    )
    product = torch.linalg.vecdot(mean_q, mean_k)[..., None]
    spread: Tensor = (square_q + square_k + 2 * product) * q.shape[-1] ** -0.5
    return spread.clamp(min=0)


_TOKENS = 2048
"""Tokens added up at a time, which stay in a CPU's cache."""


def _moments(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean of x over the tokens ``(B, H, 1, D)`` and of ‖x‖² ``(B, H, 1, 1)``."""
    dtype = accumulator(x.dtype)
    mean, square = x.new_zeros(*x.shape[:2], 1, x.shape[3], dtype=dtype), x.new_zeros(*x.shape[:2], 1, 1, dtype=dtype)
    count = x.shape[2] if real is None else real.sum(1).clamp(min=1).to(dtype)[:, None, None, None]
    for start, tokens in enumerate(torch.split(x, _TOKENS, 2)):
        wide = tokens.to(dtype)
        if real is not None:
            (wide,) = emptied(real[:, start * _TOKENS :][:, : wide.shape[2]], wide)
        mean = mean + wide.sum(2, keepdim=True)
        square = square + wide.square().sum((2, 3), keepdim=True)
    return mean / count, square / count
