"""The law about rounding: what is added up over the tokens is added up in more digits than the inputs have."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from attnbench.reference import relative_error
from attnbench.shape import Shape
from attnbench.spec import Spec
from attnbench.testing.laws import Case, Measured, gradients_along, law

ROUNDING = 2**-9
"""Largest relative error of a number rounded to bfloat16."""

GROWTH = 3.0
"""How much errors may grow from 64 to 1024 tokens. Sums in bfloat16, one term at a time, make it 4 and more."""

FEW = 16
"""Tensors of fewer numbers are left out: chance decides how well they are met."""


@law(
    "low precision",
    applies=lambda case: case.first and {"bfloat16", "float64"} <= set(case.traits.dtypes),
)
def low_precision(case: Case) -> Iterator[Measured]:
    """In bfloat16 errors do not grow with n: sums over tokens are taken in float32."""
    if (case.variant.time_exponent or 0.0) > 1.6:
        case = replace(case, spec=Spec(case.variant.name))  # tiles of the small setting would make 10,000s of steps
    short, long = 64, 1024
    few, many = _errors(case, short), _errors(case, long)
    if many.keys() - few.keys():  # parameters that so few tokens do not reach have no error to compare with
        few = {**_errors(case, 4 * short), **few}
    for name, error in many.items():
        growth = error / max(few.get(name, 0.0), 1.0)
        yield Measured(
            growth,
            GROWTH,
            f"{name} is {error:.0f} times its rounding off at n = {long}, {few.get(name, 0.0):.1f} times at {short}",
        )


def _errors(case: Case, n: int) -> dict[str, float]:
    """Errors of output and gradients, against float64 on the same rounded inputs and parameters, in roundings."""
    shape = Shape(1, 1, n, FEW, causal=case.causal)
    module = case.module(shape, dtype=torch.bfloat16)
    inputs, direction = (case.draw(shape, dtype=torch.bfloat16, seed=seed) for seed in (n, n + 1))
    exact = _results(copy.deepcopy(module).double(), [x.double() for x in inputs], direction[0])
    found = _results(module, inputs, direction[0])
    return {name: relative_error(found[name], x) / ROUNDING for name, x in exact.items() if x.norm() > 0}


def _results(module: nn.Module, inputs: list[Tensor], direction: Tensor) -> dict[str, Tensor]:
    names = ("q", "k", "v") if len(inputs) == 3 else ("x",)
    wanted = dict(zip(names, (x.requires_grad_() for x in inputs), strict=True)) | dict(module.named_parameters())
    out: Tensor = module(*inputs)
    grads = gradients_along(out, list(wanted.values()), direction.to(out.dtype))
    found = {f"the gradient of {name}": x for name, x in zip(wanted, grads, strict=True) if x.numel() >= FEW}
    return {"the output": out.detach(), **found}
