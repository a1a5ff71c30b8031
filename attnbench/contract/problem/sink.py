"""A sink: a logit without a key, which takes weight from all keys and gives nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnbench.contract.problem.shape import Shape

_SEED = 1


def sink_of(shape: Shape) -> Sink | None:
    """The sink that ``shape`` asks for, of all H heads; every call gives the same numbers."""
    return None if shape.sink == "none" else Sink(shape)


class Sink(nn.Module):
    """A learned logit s for each head: oᵢ = Σⱼ exp(lᵢⱼ) vⱼ / (exp(s) + Σⱼ exp(lᵢⱼ)).

    OpenAI 2025, "gpt-oss-120b and gpt-oss-20b Model Card", arXiv:2508.10925, section 2.3. A head may so attend to
    nothing. The weights of the keys sum to less than one; a query that sees no key gives 0.

    The numbers are drawn from N(0, 1) and do not depend on the seed: a sink is part of the problem, which all variants
    share.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.randn(shape.H, generator=torch.Generator().manual_seed(_SEED)))

    def share(self, log_sums: Tensor) -> Tensor:
        """The share of the weight that the keys keep, of L = log Σ exp(l) ``(B, H, N, 1)``: 1 / (1 + exp(s - L))."""
        return torch.sigmoid(log_sums - self.logit.to(log_sums.dtype)[:, None, None])
