"""Performer (FAVOR+): softmax attention from random features of queries and keys."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.attention.feature_tiles import FeatureMap, accumulator
from attnbench.attention.key_sums import attend_all
from attnbench.attention.performer_features import (
    HyperbolicFeatures,
    PositiveFeatures,
    ReluFeatures,
    TrigFeatures,
)
from attnbench.attention.prefix_sums import attend_causally
from attnbench.attention.random_features import Norms, Projection, draw_projection
from attnbench.errors import Unsupported
from attnbench.shape import Shape
from attnbench.variant import Traits, register


@register(
    "performer",
    family="kernel",
    source="Choromanski et al. 2021, arXiv:2009.14794",
    formula="φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = exp(ωx - ‖x‖²/2),  x ← x/D^¼,  ω ~ N(0, I)",
    cost="O(n·R·d)",
    time_exponent=1.0,
    memory_exponent=1.0,
    traits=Traits(
        target="softmax",
        target_with=(("kernel", "relu", "other"),),
        causal=True,
        cross=True,
        key_padding=True,
        stochastic=True,
    ),
    settings=("features=16,chunk=5", "features=16,kernel=hyperbolic,chunk=5", "features=16,kernel=relu,chunk=5"),
)
class Performer(nn.Module):
    """Random features whose products are exp(q·k/√D) on average.

    Choromanski et al. 2021, "Rethinking Attention with Performers". q ``(B, H, N, D)``, k and v ``(B, H, M, D)``; one
    ω ``(R, D)`` for all heads. ``features`` counts rows of ω; trig and hyperbolic make two features of each.

    - ``kernel=positive``: exp(ω·x - ‖x‖²/2), lemma 1; ``hyperbolic``: the same in pairs ±ω. ``trig``: cos and sin,
      which suits small logits; its denominators can be near 0 or negative and are left so: read medians.
    - ``kernel=relu``: max(ω·x, 0) + 0.001, the paper's generalised attention. It approximates another kernel (for
      Gaussian ω the arc-cosine kernel of order 1), so its error against softmax is only a distance.
    - ``norms=sqrt-d`` (the paper's SMREG) and ``quantile`` (Su Jianlin) are slightly biased, of lower variance.
    - ``eps`` is the paper's stabiliser: added to each exponential after the largest exponent was subtracted, of a
      query over its features, of keys over all that are visible. It pulls every row towards the mean of V, and where
      the variance is large that alone lowers the error. 0 leaves the products unbiased. A denominator that underflows,
      at logits of several hundred, gives NaN.

    Differs from the authors' code: Q of QR gets the signs that make it uniform (else positive features are biased);
    eps is 0 unless asked for; the causal form subtracts a running maximum, so that no later key reaches an earlier
    row; ω is redrawn by :meth:`redraw` only. In a module cast to half precision ω itself is rounded to it.

    Raises:
        Unsupported: eps with a kernel that is not an exponential.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        features: Annotated[int, Field(ge=1, description="random projections R")] = 256,
        kernel: Annotated[
            Literal["positive", "trig", "hyperbolic", "relu"],
            Field(description="feature map; relu has another target than softmax"),
        ] = "positive",
        projection: Annotated[
            Projection, Field(description="rows of ω orthogonal in blocks of D, or independent")
        ] = "orthogonal",
        norms: Annotated[
            Norms,
            Field(description="lengths of the rows: random chi, all √D, or chi quantiles i/(R+1) in random order"),
        ] = "chi",
        eps: Annotated[
            float, Field(ge=0, description="added to each exponential; pulls the output towards the mean of V")
        ] = 0.0,
        chunk: Annotated[
            int | None,
            Field(ge=1, description="tokens taken at a time; none: what is fast. Moves time and memory only"),
        ] = None,
    ) -> None:
        super().__init__()
        if eps and kernel in ("trig", "relu"):
            raise Unsupported(f"eps stabilises exponentials; the {kernel} features have none")
        self.causal = shape.causal
        self.kernel, self.eps, self.chunk = kernel, eps, chunk
        self.drawn: tuple[Projection, Norms] = projection, norms
        self.projection: Tensor
        self.register_buffer("projection", draw_projection(features, shape.D, *self.drawn))

    def redraw(self) -> None:
        """Draw a new ω from the global CPU generator, in place."""
        with torch.no_grad():
            features, head_dim = self.projection.shape
            self.projection.copy_(draw_projection(features, head_dim, *self.drawn))

    def feature_map(self, dtype: torch.dtype) -> FeatureMap:
        """φ for inputs of this dtype."""
        weight = (self.projection.to(accumulator(dtype)) * self.projection.shape[1] ** -0.25).t()
        match self.kernel:
            case "positive":
                return PositiveFeatures(weight, self.eps)
            case "hyperbolic":
                return HyperbolicFeatures(weight, self.eps)
            case "trig":
                return TrigFeatures(weight)
            case "relu":
                return ReluFeatures(weight)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        features = self.feature_map(q.dtype)
        if self.causal:
            return attend_causally(q, k, v, features, key_mask=key_mask, chunk=self.chunk)
        return attend_all(q, k, v, features, key_mask=key_mask, rows=self.chunk)
