"""Random feature attention: a Gaussian or arc-cosine kernel of queries and keys of length one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.linear import expectations
from attnbench.catalogue.engines.linear.feature_attention import Chunk, FeatureAttention, Form
from attnbench.catalogue.engines.linear.feature_map import FeatureMap
from attnbench.catalogue.engines.linear.random_maps import (
    CosineSineFeatures,
    Features,
    Kernel,
    Projection,
    ReluFeatures,
    Temperature,
    draw_projection,
)
from attnbench.catalogue.engines.precision import accumulator, unit
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, Traits, register
from attnbench.errors import UsageError


@register(
    "rfa",
    family="kernel",
    source="Peng et al. 2021, arXiv:2103.02143, section 3.1",
    formula="φ(q̂)ᵀ Σ φ(k̂)vᵀ / φ(q̂)ᵀ Σ φ(k̂),  φ(x) = [sin(ωx), cos(ωx)],  x̂ = σ∘x/(‖x‖τ),  ω ~ N(0, I)",
    cost="O(n·R·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        stochastic=True,
        decode=True,
        shares="query by query",
        permutable=True,
        converges_with="features",
        knob=Knob("features"),
    ),
    settings=(
        "features=16,chunk=5",
        "features=16,kernel=arccos,chunk=5,projection=orthogonal",
        "features=16,chunk=5,temperature=1.5",
    ),
)
class RandomFeatureAttention(FeatureAttention):
    """RFA: random features of queries and keys of length one.

    Peng et al. 2021, "Random Feature Attention", section 3.1. q ``(B, H, N, D)``, k and v ``(B, H, M, D)``;
    x̂ = σ∘x/(‖x‖τ) with a learned σ ``(H, 1, D)``, 1 at first, and the temperature τ; one ω ``(R, D)`` for all heads.

    - ``kernel=gaussian``: φ(x) = [sin(ω·x̂), cos(ω·x̂)], 2R features, whose products are exp(-‖q̂ - k̂‖²/2) on average.
    - ``kernel=arccos``: φ(x) = max(ω·x̂, 0) + 0.001, which estimates the arc-cosine kernel of order 1.

    Its target: as long as σ is 1, exp(-‖q̂ - k̂‖²/2) is exp(q̂·k̂) up to a factor that cancels, so that the
    Gaussian kernel estimates softmax attention with the logits cos(q, k)/τ². These are the logits q·k/√D only where
    ‖q‖‖k‖ is √D/τ² for every pair; hence a difference from softmax attention is a distance, not an error.

    Gaussian denominators can be near 0 or negative at small τ and stay so: read medians.

    Differs from the authors' code: the denominator is neither clamped nor made positive (they do not let it fall below
    a constant, which shrinks the first tokens of a causal sequence); ω is drawn once and is the same for all heads;
    nothing is added to ‖x‖; arccos has a floor of 0.001, without which a denominator can be 0. The gate is in
    ``rfa-gated``.

    Raises:
        UsageError: a ``temperature`` with ``kernel=arccos``: it would scale the features as a whole, which cancels.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        features: Features = 64,
        kernel: Kernel = "gaussian",
        temperature: Temperature = 1.0,
        projection: Projection = "iid",
        chunk: Chunk = None,
        form: Form = "auto",
    ) -> None:
        super().__init__(shape, chunk, form)
        if kernel == "arccos" and temperature != 1.0:
            raise UsageError("rfa: temperature scales all arccos features alike, and the quotient cancels it")
        self.gaussian, self.temperature, self.independent = kernel == "gaussian", temperature, projection == "iid"
        self.sigma = nn.Parameter(torch.ones(shape.H, 1, shape.D))
        self.projection: Tensor
        self.register_buffer("projection", draw_projection(features, shape.D, projection))

    def pair_weights(self, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
        return self.kernel(q, k)

    def feature_map(self, dtype: torch.dtype) -> FeatureMap:
        weight = self.projection.to(accumulator(dtype)).t()
        return CosineSineFeatures(weight) if self.gaussian else ReluFeatures(weight)

    def prepare(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """x̂, with the σ given, else with that of the module."""
        (sigma,) = parameters or (self.sigma,)
        return unit(x.to(accumulator(x.dtype))) * (sigma / self.temperature)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return self.attend_prepared(q, k, v, key_mask, (self.sigma.expand(q.shape[0], -1, -1, -1),))

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """φ(q)·φ(k) / R."""
        omega = self.projection.to(q.dtype)
        u, w = (x / x.norm(dim=-1, keepdim=True) * self.sigma / self.temperature @ omega.mT for x in (q, k))
        if self.gaussian:
            phi_q, phi_k = (torch.cat([x.sin(), x.cos()], -1) for x in (u, w))
        else:
            phi_q, phi_k = (x.clamp(min=0.0) + ReluFeatures.floor for x in (u, w))
        return phi_q @ phi_k.mT / omega.shape[-2]

    def kernel_mean(self, q: Tensor, k: Tensor) -> Tensor:
        """exp(-‖q̂ - k̂‖²/2), or the arc-cosine kernel of q̂ and k̂ with the floor."""
        x, y = self.prepare(q), self.prepare(k)
        if self.gaussian:
            return (-expectations.squared_sums(x, -y) / 2).exp()
        return expectations.rectified(x, y, ReluFeatures.floor)

    def kernel_variance(self, q: Tensor, k: Tensor) -> Tensor | None:
        """The variance of φ(q)·φ(k) / R; None without a closed form: dependent rows of ω, arccos."""
        if not (self.gaussian and self.independent):
            return None
        return expectations.cosine_variance(self.prepare(q), self.prepare(k), self.projection.shape[-2])
