"""Laws about gradients: against finite differences, against the formula's, and that they reach everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

from attnbench.testing.laws import F64, Case, Measured, gap, law


@law("finite differences", applies=lambda case: case.dtype == F64)  # in fewer digits a difference says nothing
def finite_differences(case: Case) -> Iterator[Measured]:
    """Gradients match finite differences in float64, padded or not."""
    shape = replace(case.shape, batch=1, heads=1, seq_len=7, head_dim=2)
    module, inputs = case.module(shape), case.draw(shape, grad=True)
    masks: list[Tensor | None] = [None]
    if case.traits.key_padding:
        masks.append(torch.tensor([[True] * 5 + [False] * 2]))
    for mask in masks:
        try:
            torch.autograd.gradcheck(lambda *x, mask=mask: module(*x, key_mask=mask), inputs, fast_mode=True)
        except GradcheckError as wrong:
            text = str(wrong).strip().splitlines()[0]
            yield Measured(1, 0, f"{'padded: ' if mask is not None else ''}{text}")
        else:
            yield Measured(0, 0)


@law("formula's gradients")
def formula_gradients(case: Case) -> Iterator[Measured]:
    """Gradients of inputs and parameters are those of the formula."""
    module = case.module()
    oracle = case.oracle(module)
    if oracle is None:
        return
    inputs = case.draw(grad=True)
    ours, theirs = (_gradients(module, function(*inputs), inputs) for function in (module, oracle))
    for name, expected in theirs.items():
        far = gap(ours[name], expected)
        yield Measured(far, 10 * case.close, f"the gradient of {name} differs from the formula's by {far:.2g}")


def _gradients(module: nn.Module, out: Tensor, inputs: list[Tensor]) -> dict[str, Tensor]:
    wanted = dict(zip(("q", "k", "v") if len(inputs) == 3 else ("x",), inputs, strict=True))
    wanted |= dict(module.named_parameters())
    weight = torch.randn(out.shape, dtype=F64, generator=torch.Generator().manual_seed(6))  # the same in every dtype
    found = torch.autograd.grad((out * weight.to(out.dtype)).sum(), list(wanted.values()), allow_unused=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(wanted.items(), found, strict=True)}


@law("gradients reach", gates=False)
def gradients_reach(case: Case) -> Iterator[Measured]:
    """The values and every parameter have an effect."""
    module, inputs = case.module(), case.draw(grad=True)
    module(*inputs).square().sum().backward()
    for name, tensor in {"the values" if case.operator else "x": inputs[-1], **dict(module.named_parameters())}.items():
        grad = tensor.grad
        size = 0.0 if grad is None else float(grad.abs().max())
        yield Measured(
            int(not 0 < size < torch.inf), 0, f"{name} has no effect on the output: its gradient is {size:g}"
        )
