"""Random exponentials in their general form: ω of any spread, and two shifts.

x ``(B, H, N, D)`` and y ``(B, H, M, D)`` are queries and keys over D^¼. For all vectors a and b

    x·y = (x - a)·(y - b) + b·x + a·y - a·b,

and for ω ~ N(0, I) and every γ > √½ the product of the two shifted vectors x' and y' has

    exp(x'·y') = E γ^D exp((1 - γ²)/2·‖ω‖² + γω·(x' + y') - ‖x'‖²/2 - ‖y'‖²/2)
               = E γ^D exp((1 - γ²)/2·‖ω‖² + ‖x'‖²/2 + ‖y'‖²/2) cos(γω·(x' - y')),

since γω is drawn more widely, or less, than N(0, I), and the first factor weighs it as if it were not. What one query
has in common with all keys, b·x among it, cancels in its row, and so does what all pairs have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attnbench.catalogue.engines.linear.feature_map import FeatureMap
from attnbench.catalogue.engines.linear.random_maps import CosineSineFeatures, ExponentialFeatures, LogExponentials
from attnbench.catalogue.engines.masks import emptied, token_mean
from attnbench.catalogue.engines.precision import LOG2E

Shift = Literal["none", "mean"]


@dataclass(frozen=True)
class GeneralForm:
    """A kind of features with its γ and shifts."""

    kernel: str
    """``positive``, ``hyperbolic`` or ``trig``."""
    gamma: float
    shift: Shift

    def inputs(self, x: Tensor, y: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Inputs of :meth:`feature_map`, γ(x - a) and γ(y - b) with further numbers of each token.

        x is ``(B, H, N, D)``, y ``(B, H, M, D)``, float32 at least; ``key_mask`` is of queries too if N = M.
        """
        (y,) = emptied(key_mask, y)
        of_keys = torch.zeros_like(y[..., :1])
        if self.shift == "mean":
            a = token_mean(x, key_mask if x.shape[2] == y.shape[2] else None)
            b = token_mean(y, key_mask)
            x, y = x - a, y - b
            of_keys = (y * a).sum(-1, keepdim=True)
        half_square = y.square().sum(-1, keepdim=True) / 2
        of_keys = of_keys + half_square if self.kernel == "trig" else of_keys - half_square
        return self._beside(x, torch.zeros_like(x[..., :1])), self._beside(y, of_keys)

    def _beside(self, x: Tensor, own: Tensor) -> Tensor:
        columns = [x * self.gamma, own] if self.kernel == "trig" else [x * self.gamma, own, torch.ones_like(own)]
        return torch.cat(columns, -1)

    def feature_map(self, omega: Tensor, *, causal: bool) -> FeatureMap:
        """φ for the outputs of :meth:`inputs`; ``omega`` is ``(R, D)``, float32 at least.

        If not causal, exponentials are relative to the largest of each feature.
        """
        rows = omega.mT.contiguous()
        growth = omega.square().sum(-1) * ((1 - self.gamma**2) / 4)
        if self.kernel == "trig":
            return WeighedWaves(rows, (growth - growth.amax()).exp())
        columns = torch.cat([rows, torch.ones_like(rows[:1]), growth[None]])
        if self.kernel == "hyperbolic":
            columns = torch.cat([columns, torch.cat([-rows, columns[-2:]])], -1)
        return ExponentialFeatures(columns) if causal else LogExponentials(columns)


class WeighedWaves(CosineSineFeatures):
    """cos(ω·x) and sin(ω·x) times a factor of each ω; the last number of a key is its log weight.

    Args:
        weight: ωᵀ ``(D, R)``.
        factor: ``(R,)``.
    """

    def __init__(self, weight: Tensor, factor: Tensor) -> None:
        super().__init__(weight)
        self.factor = torch.cat([factor, factor])

    def queries(self, x: Tensor, out: Tensor) -> None:
        super().queries(x[..., :-1], out)
        out.mul_(self.factor)

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        self.queries(x, out)
        return x[..., -1:] * LOG2E

    def queries_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        d_x = super().queries_grad(x, features, grad)
        return torch.cat([d_x, torch.zeros_like(d_x[..., :1])], -1)

    def keys_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        of_weight = torch.linalg.vecdot(features, grad)[..., None]
        d_x = self.queries_grad(x, features, grad)
        d_x[..., -1:] = of_weight
        return d_x
