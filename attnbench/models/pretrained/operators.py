"""The variants that take the place of a trained model's attention, one for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from attnbench.catalogue.build import build
from attnbench.contract.spec import Spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported
from attnbench.models.encoder import tied
from attnbench.models.pretrained.subject import Exact, Intercept, Layer

Operators = Mapping[int, nn.Module]
"""Layer -> the module of its attention."""

_A_MIXER = "a mixer replaces the projections as well, so that nothing of the trained layer would be left"


def build_operators(
    variant: Spec, layers: Sequence[Layer], chosen: Sequence[int], *, seed: int
) -> dict[int, nn.Module]:
    """The variant for each of the chosen layers, in float32 on the CPU, each layer with random numbers of its own.

    Equal random features in all layers would make errors that add up instead of cancelling each other. Raises
    UsageError, and Unsupported for a mixer or if its mathematics does not allow these layers.
    """
    if VARIANTS.get(variant.name).kind == "mixer":
        raise Unsupported(_A_MIXER)
    built = {place: build(variant, layers[place].shape, seed=1000 * seed + place) for place in chosen}
    if built:
        tied(*built.values())
    return built


def replaced(operators: Operators) -> Intercept:
    """Replace the attention of the layers that have an operator; the others keep theirs."""

    def intercept(place: int, q: Tensor, k: Tensor, v: Tensor, exact: Exact) -> Tensor:
        if place not in operators:
            return exact()
        answer: Tensor = operators[place](q, k, v)
        return answer

    return intercept
