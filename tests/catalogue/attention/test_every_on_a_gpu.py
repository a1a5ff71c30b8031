"""Every variant on a GPU, where its tiles are others than on a processor, gives what the processor gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from attnbench.contract.variant import VARIANTS, Variant
from attnbench.errors import Unsupported, UsageError
from attnbench.laws.laws import SHAPE, Case, cases, gap

VARIANTS_OF_TORCH = [entry for entry in VARIANTS if not entry.traits.compiled]


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS", "ignore:RNN module weights are not part")
@pytest.mark.parametrize("entry", VARIANTS_OF_TORCH, ids=lambda entry: entry.name)
def test_a_gpu_gives_the_same_output_and_gradients(entry: Variant) -> None:
    """In each setting, causal or not, with few tokens and with several tiles of them, padded or not."""
    held = [holds(replace(case, length=length)) for case, length in product(cases(entry), (SHAPE.N, 300))]
    assert any(held)


def holds(case: Case) -> bool:
    """Whether there is such a case: there may be no such form, or options go with the few tokens of a law."""
    masks: list[Tensor | None] = [None]
    if case.traits.key_padding:
        masks.append(torch.rand(2, case.length, generator=torch.Generator().manual_seed(2)) < 0.7)
    try:
        module = case.module()
        expected = [results(module, case.draw(), mask) for mask in masks]
    except (Unsupported, UsageError):
        return False
    there = copy.deepcopy(module).cuda()
    for mask, wanted in zip(masks, expected, strict=True):
        got = results(there, [x.cuda() for x in case.draw()], None if mask is None else mask.cuda())
        for name, one in wanted.items():
            assert gap(got[name].cpu(), one) < 10 * case.close, f"{case}, {case.length} tokens: {name}"
    return True


def results(module: nn.Module, inputs: list[Tensor], mask: Tensor | None) -> dict[str, Tensor]:
    """Output, and gradients of inputs and parameters."""
    attend: Callable[..., Tensor] = module
    wanted = dict(zip("qkv" if len(inputs) == 3 else "x", (x.requires_grad_() for x in inputs), strict=True))
    wanted |= dict(module.named_parameters())
    out = attend(*inputs, key_mask=mask)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    grads = torch.autograd.grad(out, list(wanted.values()), weight.to(out), allow_unused=True, materialize_grads=True)
    return {"the output": out.detach(), **dict(zip(wanted, grads, strict=True))}
