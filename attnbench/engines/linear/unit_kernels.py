"""What kernels of vectors of length one share: their options, and the scaling to that length."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from attnbench.engines.precision import accumulator

Features = Annotated[int, Field(ge=1, description="random projections R; gaussian makes two features of each")]
Kernel = Annotated[Literal["gaussian", "arccos"], Field(description="which kernel of q̂ and k̂ the features estimate")]
Temperature = Annotated[
    float, Field(gt=0, description="τ: queries and keys have length 1/τ, the largest logit is 1/τ²")
]


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖ in float32 at least; 0 stays 0."""
    return nn.functional.normalize(x.to(accumulator(x.dtype)), dim=-1)
