"""MLP-Mixer: each channel passes through one feed-forward layer along the tokens."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import gelu

from attnbench.catalogue.engines.masks import at_most, emptied
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register


@register(
    "mlp-mixer",
    kind="mixer",
    family="mixing",
    source="Tolstikhin et al. 2021, arXiv:2105.01601, section 2",
    formula="W₂ GELU(W₁ X + b₁) + b₂,  W₁ ∈ ℝ^(S×n), W₂ ∈ ℝ^(n×S)",
    cost="O(n·S·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        mask=No("each hidden unit mixes tokens of the whole sequence, and a mixture cannot be hidden in part"),
        causal=No("each hidden unit mixes tokens of the whole sequence, so that every output sees the future"),
        cross=No("the columns of W₁ and the rows of W₂ belong to positions of one sequence"),
        bias=No("there are no logits that a bias could be added to"),
        longer=No("the columns of W₁ and the rows of W₂ belong to positions"),
        stochastic=True,
        rows_sum_to_one=False,
        knob=Knob("hidden"),
    ),
    settings=("hidden=5",),
)
class MLPMixer(nn.Module):
    """A feed-forward layer along the tokens, fixed maximum length.

    Tolstikhin et al. 2021, "MLP-Mixer", section 2, token mixing: ``W₂ GELU(W₁ X + b₁) + b₂`` (erf form), where W₁ is
    S × N and W₂ is N × S, the same for every channel. x is ``(B, N, C)`` and so is the output.

    A shorter input uses the first columns of W₁ and the first rows of W₂ and b₂. Padded tokens are set to 0, which
    gives exactly the output of the shorter input. W₁ is drawn from N(0, 1/N), W₂ from N(0, 1/S); the biases are 0.

    Differs from the paper: token mixing only. The encoder adds the LayerNorm before it and the residual path around it,
    and its feed-forward layer is the channel mixing. Padding and shorter inputs are not in the paper.

    Raises:
        Unsupported: in ``forward``, an input longer than ``shape.N``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        hidden: Annotated[
            int | None, Field(ge=1, description="hidden units S of each channel; none: C/2, as in the paper")
        ] = None,
    ) -> None:
        super().__init__()
        N, S = shape.N, hidden or max(1, shape.C // 2)
        self.longest = N
        self.W1, self.b1 = nn.Parameter(torch.randn(S, N) * N**-0.5), nn.Parameter(torch.zeros(S))
        self.W2, self.b2 = nn.Parameter(torch.randn(N, S) * S**-0.5), nn.Parameter(torch.zeros(N))

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        n = x.shape[1]
        examples = []
        for b, example in enumerate(x):
            real = torch.ones(n, dtype=torch.bool, device=x.device) if key_mask is None else key_mask[b]
            channels = []
            for channel in example.T:
                units = self.W1[:, :n][:, real] @ channel[real] + self.b1
                units = units * (1 + torch.erf(units * 0.5**0.5)) / 2
                channels.append(self.W2[:n] @ units + self.b2[:n])
            examples.append(torch.stack(channels, -1))
        return torch.stack(examples)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """x ``(B, N, C)`` with N at most ``shape.N``; ``key_mask`` ``(B, N)``, True for a real token."""
        B, n, _ = x.shape
        at_most(self.longest, n, "the layer was")
        (x,) = emptied(key_mask, x)
        # One product for the whole batch: the weights are the same for all of it.
        columns = x.transpose(0, 1).reshape(n, -1)
        units = gelu(torch.addmm(self.b1[:, None], self.W1[:, :n], columns))
        out = torch.addmm(self.b2[:n, None], self.W2[:n], units)
        return out.view(n, B, -1).transpose(0, 1)
