"""Laws about gradients: against finite differences, against the formula's, and that they reach everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnbench.laws.laws import F64, Case, Measured, apart, gradients_along, law

STEP = 1e-6
"""Half width of a difference: its cut-off and its rounding are below 1e-9 of numbers around 1."""


@law("finite differences", applies=lambda case: case.dtype == F64)  # in fewer digits a difference says nothing
def finite_differences(case: Case) -> Iterator[Measured]:
    """Gradients match finite differences in float64, padded or not, each time they are taken."""
    shape = replace(case.shape, batch=1, heads=1, seq_len=7, head_dim=2)
    module, inputs = case.module(shape), case.draw(shape, grad=True)
    yield from _slopes(module, case.names, inputs, "")
    if case.traits.key_padding:
        mask = torch.tensor([[True] * 5 + [False] * 2])
        yield from _slopes(partial(module, key_mask=mask), case.names, inputs, "padded: ")


def _slopes(
    function: Callable[..., Tensor], names: Sequence[str], inputs: list[Tensor], padded: str
) -> Iterator[Measured]:
    """Slopes of one random direction in each input, by the gradient and by a difference.

    ``torch.autograd.gradcheck`` imports the modules of a compiler, half a second in each new process.
    """
    out = function(*inputs)
    generator = torch.Generator().manual_seed(6)
    weight, *directions = (torch.randn(x.shape, dtype=F64, generator=generator) for x in (out, *inputs))
    grads, again = (gradients_along(out, inputs, weight) for _ in range(2))
    for i, name in enumerate(names):
        ahead, behind = (
            function(*inputs[:i], inputs[i] + step * directions[i], *inputs[i + 1 :]) for step in (STEP, -STEP)
        )
        slope = float(((ahead - behind) * weight).detach().sum()) / (2 * STEP)
        says = float((grads[i].detach() * directions[i]).sum())
        yield Measured(
            abs(says - slope) / max(1.0, abs(slope)),
            1e-6,
            f"{padded}the gradient of {name} says a slope of {says:.3g}, the difference {slope:.3g}",
        )
        yield apart(again[i], grads[i], 0, f"{padded}a second backward pass gives {name} a gradient that differs")


@law("formula's gradients")
def formula_gradients(case: Case) -> Iterator[Measured]:
    """Gradients of inputs and parameters are those of the formula."""
    module = case.module()
    oracle = case.oracle(module)
    if oracle is None:
        return
    inputs = case.draw(grad=True)
    named = case.named(inputs) | dict(module.named_parameters())
    ours, theirs = (_gradients(function(*inputs), named) for function in (module, oracle))
    for name, expected in theirs.items():
        yield apart(ours[name], expected, 10 * case.close, f"the gradient of {name} differs from the formula's")


def _gradients(out: Tensor, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    weight = torch.randn(out.shape, dtype=F64, generator=torch.Generator().manual_seed(6))  # the same in every dtype
    return dict(zip(wanted, gradients_along(out, list(wanted.values()), weight.to(out.dtype)), strict=True))


@law("gradients reach", gates=False)
def gradients_reach(case: Case) -> Iterator[Measured]:
    """The values and every parameter have an effect."""
    module, inputs = case.module(), case.draw(grad=True)
    module(*inputs).square().sum().backward()
    trained = {name: x for name, x in module.named_parameters() if x.requires_grad}
    for name, tensor in {"the values" if case.operator else "x": inputs[:3][-1], **trained}.items():
        grad = tensor.grad
        size = 0.0 if grad is None else float(grad.abs().max())
        yield Measured(
            int(not 0 < size < torch.inf), 0, f"{name} has no effect on the output: its gradient is {size:g}"
        )
