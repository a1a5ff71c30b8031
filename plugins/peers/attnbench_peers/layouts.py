"""How to hand q, k and v to a package that expects tokens with their heads inside, or that projects them itself."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Generator, Tensor, nn

from attnbench import Shape
from attnbench.catalogue.inputs.synthetic import gaussian
from attnbench.contract.inputs import register_input


@register_input("heads-inside")
def heads_inside(
    shape: Shape,
    generator: Generator,
    *,
    logit_std: Annotated[float, Field(gt=0, le=100, description="standard deviation of the logits q·k/√D")] = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gaussian, with the heads of a token side by side in memory, as a layer's projections leave them.

    The numbers are those of ``gaussian``. Code that takes ``(B, N, H·D)`` gets a view, and code that takes
    ``(B, H, N, D)`` gets the strided views that it would get in a model.
    """
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in gaussian(shape, generator, logit_std=logit_std))
    return q, k, v


def merged(x: Tensor) -> Tensor:
    """``(B, H, N, D)`` as ``(B, N, H·D)``: a view for ``heads-inside`` inputs, a copy for others."""
    return x.transpose(1, 2).flatten(2)


def separated(x: Tensor, heads: int) -> Tensor:
    """``(B, N, H·D)`` as ``(B, H, N, D)``, a view."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


class Given(nn.Module):
    """Takes the place of a projection: returns once what it was handed, whatever it is applied to."""

    def __init__(self) -> None:
        super().__init__()
        self._value: object = None

    def hand(self, value: object) -> None:
        self._value = value

    def forward(self, x: Tensor) -> object:
        value, self._value = self._value, None  # so that nothing is kept alive between calls
        return value


class Parts(NamedTuple):
    """q, k and v instead of their concatenation, which a package would split again."""

    q: Tensor
    k: Tensor
    v: Tensor

    def chunk(self, count: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def copy_into(target: Tensor, source: Tensor) -> None:
    """Overwrite a weight that a package drew for itself."""
    with torch.no_grad():
        target.copy_(source)
