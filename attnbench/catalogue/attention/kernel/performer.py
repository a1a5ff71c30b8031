"""Performer (FAVOR+): softmax attention from random features of queries and keys."""

from __future__ import annotations

from math import exp, lgamma, log, sqrt
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines.linear import expectations
from attnbench.catalogue.engines.linear.feature_attention import Chunk, FeatureAttention, Form
from attnbench.catalogue.engines.linear.feature_map import FeatureMap
from attnbench.catalogue.engines.linear.general_form import GeneralForm, Shift
from attnbench.catalogue.engines.linear.key_sums import KeySums
from attnbench.catalogue.engines.linear.random_maps import (
    HyperbolicFeatures,
    Norms,
    PositiveFeatures,
    Projection,
    ReluFeatures,
    TrigFeatures,
    draw_projection,
)
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register
from attnbench.errors import Unsupported

_ALL_TOKENS = "a mean over all tokens tells a query about later ones"


@register(
    "performer",
    family="kernel",
    source="Choromanski et al. 2021, arXiv:2009.14794, equations 4-7, lemma 1",
    formula="φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = exp(ωx - ‖x‖²/2),  x ← x/D^¼,  ω ~ N(0, I)",
    cost="O(n·R·d)",
    memory_exponent=1.0,
    traits=Traits(
        stochastic=True,
        decode=True,
        shares="query by query",
        permutable=True,
        converges_with="features",
        knob=Knob("features"),
        given=(
            ("kernel=relu", {"target": "other"}),
            ("shift=mean", {"causal": No(_ALL_TOKENS), "decode": No(_ALL_TOKENS), "shares": "head by head"}),
        ),
    ),
    settings=(
        "features=16,chunk=5",
        "features=16,kernel=hyperbolic,projection=iid,chunk=5",
        "features=16,kernel=trig,norms=quantile,chunk=5",
        "features=16,kernel=relu,chunk=5",
        "features=16,beta=1.5,projection=iid,chunk=5",
        "features=16,kernel=trig,beta=0.7,chunk=5",
        "features=16,gamma=1.2,shift=mean,projection=iid,chunk=5",
        "features=16,kernel=hyperbolic,gamma=1.1,chunk=5",
        "features=16,kernel=trig,gamma=0.9,beta=1.3,projection=iid,chunk=5",
    ),
)
class Performer(FeatureAttention):
    """Random features whose products are exp(q·k/√D) on average.

    Choromanski et al. 2021, "Rethinking Attention with Performers". q ``(B, H, N, D)``, k and v ``(B, H, M, D)``; one
    ω ``(R, D)`` for all heads. ``features`` counts rows of ω; trig and hyperbolic make two features of each. The 256
    orthogonal rows of the defaults are the paper's.

    - ``kernel=positive``: exp(ω·x - ‖x‖²/2), lemma 1 and equation 7; ``kernel=hyperbolic``: the same in pairs ±ω.
      ``kernel=trig``: cos and sin, which suit small logits; denominators can be near 0 or negative and stay so: read
      medians.
    - ``kernel=relu``: max(ω·x, 0) + 0.001, the paper's generalised attention, equation 5. It approximates another
      kernel (for Gaussian ω the arc-cosine kernel of order 1), so its error against softmax is only a distance.
    - ``norms=sqrt-d`` (the paper's SMREG) and ``quantile`` (Su Jianlin) are slightly biased and have lower variance.
    - ``beta`` is a free scale of the identity behind the features: exp(x·y) is the mean of exp(ω·(βx + y/β)) over
      exp(β²‖x‖²/2 + ‖y‖²/2β²) for every β > 0, and likewise of cosines. The variance is that of βx and y/β: where
      queries are smaller than keys, or larger, another β than the paper's 1 lowers it.
    - ``gamma`` and ``shift`` are the rest of what that identity leaves free, and the mean is exp(x·y) for all of them.
      ω is drawn from N(0, γ²I) and each pair of features is weighed by γ^D exp((1 - γ²)‖ω‖²/2) of the ω of N(0, I).
      Two vectors a and b are taken off queries and keys, and come back as the exact factors exp(b·x) and
      exp(a·y - a·b): with ``shift=mean`` they are the mean query and the mean key of each head and example, padding
      left out. The variance is then that of the differences x - a and y - b, which is far smaller where all queries, or
      all keys, have much in common.

    A denominator that underflows, at logits of several hundred, gives NaN.

    Differs from the authors' code: Q of QR gets the signs that make it uniform (else positive features are biased);
    no constant is added to an exponential, since it would pull every row towards the mean of V; the causal form
    subtracts a running maximum, so that no later key affects an earlier row; only :meth:`redraw` draws a new ω. In a
    module cast to half precision, ω itself is rounded to it.

    Raises:
        Unsupported: ``gamma`` or ``shift`` with ``kernel=relu``, or with ``norms`` that are not those of a normal ω;
            ``shift=mean`` where causal, since a mean of all tokens knows later ones.
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
        projection: Projection = "orthogonal",
        norms: Annotated[
            Norms,
            Field(description="lengths of the rows: random chi, all √D, or chi quantiles i/(R+1) in random order"),
        ] = "chi",
        beta: Annotated[
            float, Field(gt=0, description="queries times β, keys over β: the same mean, another variance")
        ] = 1.0,
        gamma: Annotated[
            float, Field(ge=0.75, le=4, description="how widely ω is drawn: the same mean, another variance")
        ] = 1.0,
        shift: Annotated[
            Shift, Field(description="vectors taken off queries and keys, and made up for: none, or their means")
        ] = "none",
        chunk: Chunk = None,
        form: Form = "auto",
    ) -> None:
        super().__init__(shape, chunk, form)
        general = gamma != 1.0 or shift != "none"
        if general and (kernel == "relu" or norms != "chi"):
            raise Unsupported("gamma and shift keep the mean of exponentials of a normal ω: no relu, no other norms")
        if shift == "mean" and shape.causal:
            raise Unsupported(f"shift=mean: {_ALL_TOKENS}")
        self.kernel_name, self.beta = kernel, beta
        self.general = GeneralForm(kernel, gamma, shift) if general else None
        self.drawn: tuple[Projection, Norms] = projection, norms
        self.projection: Tensor
        self.register_buffer("projection", draw_projection(features, shape.D, *self.drawn))

    def pair_weights(self, q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
        omega, gamma, D = self.projection.to(q.dtype), 1.0 if self.general is None else self.general.gamma, q.shape[-1]
        growth = (1 - gamma**2) / 4 * omega.square().sum(-1)[..., None, :] + D / 2 * log(gamma)
        x, y = self.scaled(q, k)
        sides, logs = self.shifted(x, y, allowed)
        phi = []
        for x, own in zip(sides, logs, strict=True):
            u, half = gamma * (x @ omega.mT), expectations.squares(x) / 2
            rest = own + growth + (half if self.kernel_name == "trig" else -half)
            match self.kernel_name:
                case "positive":
                    phi.append((u + rest).exp())
                case "hyperbolic":
                    phi.append(torch.cat([(u + rest).exp(), (rest - u).exp()], -1) * 0.5**0.5)
                case "trig":
                    phi.append(torch.cat([u.cos() * rest.exp(), u.sin() * rest.exp()], -1))
                case "relu":
                    phi.append(u.clamp(min=0) + ReluFeatures.floor)
        return phi[0] @ phi[1].mT / omega.shape[-2]

    def redraw(self) -> None:
        """Draw a new ω from the global CPU generator, in place."""
        with torch.no_grad():
            features, head_dim = self.projection.shape
            self.projection.copy_(draw_projection(features, head_dim, *self.drawn))

    def feature_map(self, dtype: torch.dtype) -> FeatureMap:
        if self.general is not None:
            return self.general.feature_map(self.projection.to(accumulator(dtype)), causal=self.causal)
        weight = (self.projection.to(accumulator(dtype)) * self.projection.shape[1] ** -0.25).t().contiguous()
        match self.kernel_name:
            case "positive":
                return PositiveFeatures(weight)
            case "hyperbolic":
                return HyperbolicFeatures(weight)
            case "trig":
                return TrigFeatures(weight)
            case "relu":
                return ReluFeatures(weight)

    def attend_as_it_is(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, by_triton: bool = False
    ) -> Tensor:
        return super().attend_as_it_is(*self._ready(q, k, key_mask), v, key_mask, by_triton=by_triton).to(q.dtype)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> KeySums:
        return super().begin(*self._ready(q, k), v)

    def step(self, state: KeySums, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, KeySums]:
        out, state = super().step(state, *self._ready(q, k), v)
        return out.to(q.dtype), state

    def _ready(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The inputs of φ: β q and k/β, or those of the general form."""
        if self.general is None:
            return self._balanced(q, k)
        dtype = accumulator(q.dtype)
        x, y = self.scaled(q.to(dtype), k.to(dtype))
        return self.general.inputs(x, y, key_mask)

    def _balanced(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.beta == 1.0 else (q * self.beta, k / self.beta)

    def scaled(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """β q and k/β over D^¼."""
        return [x * x.shape[-1] ** -0.25 for x in self._balanced(q, k)]

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """φ(q)·φ(k) / R, without any subtraction from exponents."""
        return self.pair_weights(q, k, None)

    def shifted(
        self, x: Tensor, y: Tensor, allowed: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """x - a and y - b, and the logarithms of their compensation: b·x and a·y - a·b, ``(B, H, n, 1)``."""
        if self.general is None or self.general.shift == "none":
            return (x, y), (x.new_zeros(1, 1), x.new_zeros(1, 1))
        keys = torch.ones_like(y[..., :1]) if allowed is None else allowed[:, :, -1, :, None].to(y.dtype)
        queries = keys if x.shape[2] == y.shape[2] else torch.ones_like(x[..., :1])
        a, b = (
            (each * real).sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp(min=1)
            for each, real in ((x, queries), (y, keys))
        )
        return (x - a, y - b), ((x * b).sum(-1, keepdim=True), ((y - b) * a).sum(-1, keepdim=True))

    def kernel_mean(self, q: Tensor, k: Tensor) -> Tensor:
        """exp(q·k/√D), or a little less if ω has fixed lengths; for relu the arc-cosine kernel of q and k over D^¼."""
        x, y = self.scaled(q, k)
        fixed = self.drawn[1] != "chi"
        if self.kernel_name == "relu":
            return self._relu_mean(x, y)
        if not fixed:
            return (x @ y.mT).exp()
        half = (expectations.squares(x) + expectations.squares(y).mT) / 2
        if self.kernel_name == "trig":
            return half.exp() * expectations.radial_mean(-expectations.squared_sums(x, -y), self.projection)
        return (-half).exp() * expectations.radial_mean(expectations.squared_sums(x, y), self.projection)

    def _relu_mean(self, x: Tensor, y: Tensor) -> Tensor:
        D, first, second = x.shape[-1], 1.0, 1.0
        if self.drawn[1] != "chi":
            lengths = self.projection.double().norm(dim=1)
            first = float(lengths.mean()) / (sqrt(2) * exp(lgamma((D + 1) / 2) - lgamma(D / 2)))
            second = float(lengths.square().mean()) / D
        return expectations.rectified(x, y, ReluFeatures.floor, first, second)

    def kernel_variance(self, q: Tensor, k: Tensor) -> Tensor | None:
        """None without a closed form: dependent rows of ω, lengths that are not chi, relu."""
        if self.drawn != ("iid", "chi"):
            return None
        (x, y), features = self.scaled(q, k), self.projection.shape[0]
        if self.general is not None:
            (x, y), (of_x, of_y) = self.shifted(x, y, None)
            second = expectations.general_second_moment(self.kernel_name, self.general.gamma, x, y)
            both = 2 * (of_x + of_y.mT)
            return (second - (2 * x @ y.mT).exp()) * both.exp() / features
        match self.kernel_name:
            case "positive":
                return expectations.positive_variance(x, y, features)
            case "hyperbolic":
                return expectations.hyperbolic_variance(x, y, features)
            case "trig":
                both = (expectations.squares(x) + expectations.squares(y).mT).exp()
                return both * expectations.cosine_variance(x, y, features)
            case _:
                return None
