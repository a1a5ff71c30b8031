"""A depthwise convolution along the tokens: the baseline of attention if only neighbours matter."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.recurrent.short_convolution import ShortConvolution
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
class Convolution(ShortConvolution):
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
        super().__init__(shape.C, width, bias=True)
        if width % 2 == 0 and not shape.causal:
            raise UsageError(f"conv: option width={width} must be odd: it is centred on the token")
        if not shape.causal:
            self.before = self.after = width // 2

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        assert self.b is not None
        (x,) = emptied(key_mask, x)
        i = torch.arange(x.shape[1], device=x.device)[:, None]
        matrix = self.weight[:, (i.mT - i + self.before).clamp(0, self.before + self.after)]
        matrix = matrix.triu(-self.before).tril(self.after)
        return torch.einsum("cij,bjc->bic", matrix, x) + self.b

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        return super().forward(x)

    def step(self, last: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat((last, x), 1)
        return self.inside(window.mT, x.dtype), window[:, x.shape[1] :]
