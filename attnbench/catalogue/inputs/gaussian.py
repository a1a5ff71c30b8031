"""Independent normal numbers, the usual benchmark input, with the one setting that decides who wins on it."""

from __future__ import annotations

from math import sqrt
from typing import Annotated

import torch
from pydantic import Field
from torch import Generator, Tensor

from attnbench.contract.inputs import register_input
from attnbench.contract.problem.shape import Shape

LogitStd = Annotated[float, Field(gt=0, le=100, description="standard deviation of the logits q·k/√D")]


@register_input("gaussian")
def gaussian(shape: Shape, generator: Generator, *, logit_std: LogitStd = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Independent normal q, k and v; the logits have the given spread.

    q and k ~ N(0, logit_std), so that q·k/√D has standard deviation ``logit_std``; v ~ N(0, 1). For long sequences,
    answering every query with the mean of v has relative error √(1 - exp(-logit_std²)): at 0.1 there is nothing to
    compute, at 4 a few keys decide. It is neither low rank, local nor clustered, the hardest input for most variants.
    """
    scale = sqrt(logit_std)
    q = torch.randn(shape.B, shape.H, shape.N, shape.D, generator=generator) * scale
    k = torch.randn(shape.B, shape.K, shape.M, shape.D, generator=generator) * scale
    v = torch.randn(shape.B, shape.K, shape.M, shape.E, generator=generator)
    return q, k, v
