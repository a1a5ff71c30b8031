"""A depthwise convolution along the tokens: the baseline of attention if only neighbours matter."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad

from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register
from attnbench.errors import UsageError


@register(
    "conv",
    kind="mixer",
    family="mixing",
    source="Wu et al. 2019, arXiv:1901.10430, section 2",
    formula="yᵢ = b + Σ_t w_t ⊙ x_(i+t),  |t| <= (width - 1)/2, or -width < t <= 0 if causal",
    cost="O(n·w·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        cross=No("a token is mixed with its own neighbours; there is no second sequence"),
        bias=No("there are no logits: the weight of a distance is learned as it is"),
        stochastic=True,
        rows_sum_to_one=False,
        decode=True,
    ),
    settings=("width=5", "width=3"),
)
class Convolution(nn.Module):
    """A depthwise convolution; no token looks at another's content.

    A reference line that is no attention, the depthwise convolution of Wu et al. 2019, "Pay Less Attention with
    Lightweight and Dynamic Convolutions", section 2: every channel has ``width`` weights of its own, one for each
    distance. x is ``(B, N, C)`` and so is the output. The window is centred, or holds the last ``width`` tokens if
    ``shape.causal``. What lies outside of the sequence or is padding counts as 0. Decoding keeps the last
    ``width - 1`` tokens.

    Weights and b are drawn from U(-1/√width, 1/√width). There are no projections.

    Differs from the paper: a bias is added; the paper's own proposals share weights between channels, normalise them by
    a softmax, or make them from the token.

    Raises:
        UsageError: an even ``width``, unless causal.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        width: Annotated[int, Field(ge=1, description="tokens under the kernel, the token itself included")] = 7,
    ) -> None:
        super().__init__()
        if width % 2 == 0 and not shape.causal:
            raise UsageError(f"conv: option width={width} must be odd: it is centred on the token")
        self.before, self.after = (width - 1, 0) if shape.causal else (width // 2, width // 2)
        self.weight = nn.Parameter(torch.empty(shape.C, width).uniform_(-1, 1) * width**-0.5)
        self.b = nn.Parameter(torch.empty(shape.C).uniform_(-1, 1) * width**-0.5)

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        i = torch.arange(x.shape[1], device=x.device)[:, None]
        matrix = self.weight[:, (i.mT - i + self.before).clamp(0, self.before + self.after)]
        matrix = matrix.triu(-self.before).tril(self.after)
        return torch.einsum("cij,bjc->bic", matrix, x) + self.b

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        return self._convolved(pad(x.mT, (self.before, self.after)), x.dtype)

    def _convolved(self, channels: Tensor, out: torch.dtype) -> Tensor:
        """Windows of channels ``(B, C, n)`` that lie inside, as tokens ``(B, n - width + 1, C)``."""
        dtype = accumulator(out)
        weight, b = self.weight.to(dtype)[:, None], self.b.to(dtype)
        return conv1d(channels.to(dtype), weight, b, groups=len(b)).mT.to(out)

    def begin(self, x: Tensor) -> tuple[Tensor]:
        """The last ``width - 1`` tokens of x ``(B, n, C)``, n >= 0, with zeros in front of the first."""
        short = max(0, self.before - x.shape[1])
        return (pad(x[:, max(0, x.shape[1] - self.before) :], (0, 0, short, 0)).clone(),)

    def step(self, state: tuple[Tensor], x: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        window = torch.cat((state[0], x), 1)
        return self._convolved(window.mT, x.dtype), (window[:, 1:],)
