"""Every variant on a GPU, where its tiles are others than on a processor, gives what the processor gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import attnbench.attention
from attnbench.errors import Unsupported, UsageError
from attnbench.testing.laws import SHAPE, Case, cases, gap
from attnbench.variant import VARIANTS

assert attnbench.attention  # fills the table
CASES = [case for entry in VARIANTS for case in cases(entry) if not entry.traits.compiled]


@pytest.mark.cuda
@pytest.mark.parametrize("length", [SHAPE.N, 300])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.variant.name}:{case}")
def test_a_gpu_gives_the_same_output_and_gradients(case: Case, length: int) -> None:
    case = replace(case, length=length)
    try:
        module = case.module()
    except (Unsupported, UsageError) as reason:  # options that go with the few tokens of a law
        pytest.skip(str(reason))
    masks: list[Tensor | None] = [None]
    if case.traits.key_padding:
        masks.append(torch.rand(2, length, generator=torch.Generator().manual_seed(2)) < 0.7)
    there = copy.deepcopy(module).cuda()
    for mask in masks:
        wanted = results(module, case.draw(), mask)
        got = results(there, [x.cuda() for x in case.draw()], None if mask is None else mask.cuda())
        for name, expected in wanted.items():
            assert gap(got[name].cpu(), expected) < 10 * case.close, name


def results(module: nn.Module, inputs: list[Tensor], mask: Tensor | None) -> dict[str, Tensor]:
    """Output, and gradients of inputs and parameters."""
    attend: Callable[..., Tensor] = module
    wanted = dict(zip("qkv" if len(inputs) == 3 else "x", (x.requires_grad_() for x in inputs), strict=True))
    wanted |= dict(module.named_parameters())
    out = attend(*inputs, key_mask=mask)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    grads = torch.autograd.grad(out, list(wanted.values()), weight.to(out), allow_unused=True, materialize_grads=True)
    return {"the output": out.detach(), **dict(zip(wanted, grads, strict=True))}
