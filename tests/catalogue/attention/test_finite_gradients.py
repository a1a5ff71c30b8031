"""Gradients of every variant stay finite in few bits: behind padding on the left, and at tokens of zeros."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.engines.precision import unit
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import VARIANTS, Variant
from attnbench.errors import Unsupported
from attnbench.laws.laws import SHAPE, Case, cases

ALL = [
    one
    for one in VARIANTS
    if one.make.__module__.startswith("attnbench.catalogue.attention.") and not one.traits.compiled
]
each = pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
LEFT = torch.arange(40) >= torch.tensor([[7], [0]])
LARGE = torch.finfo(torch.float16).max / 4


def gradients(case: Case, shape: Shape, dtype: torch.dtype, mask: Tensor | None) -> dict[str, Tensor]:
    """Those of the inputs and parameters; two tokens are zeros where there is no mask."""
    module, leaves = case.module(shape, dtype=dtype), case.draw(shape, dtype=dtype)
    if mask is None:
        for x in leaves[:3]:
            x[..., 0, :] = x[..., 5, :] = 0
    wanted = dict(zip(case.names, [x.requires_grad_() for x in leaves], strict=True)) | dict(module.named_parameters())
    out = module(*leaves) if mask is None else module(*leaves, key_mask=mask)
    if mask is not None:  # nobody asks for the output of a padded token
        out = torch.where(mask.view(2, *[1] * (out.ndim - 3), -1, 1), out, 0)
    grads = torch.autograd.grad(out.double().square().sum(), list(wanted.values()), allow_unused=True)
    return {name: grad for name, grad in zip(wanted, grads, strict=True) if grad is not None}


def broken(entry: Variant, shape: Shape, mask: Tensor | None) -> list[tuple[str, torch.dtype, list[str]]]:
    """The cases with gradients that are not finite, though float16 could hold the same one of float64."""
    found = []
    for case in cases(entry):
        at = replace(shape, causal=case.causal)
        for dtype in (torch.float32, torch.float16):
            if str(dtype)[6:] not in case.traits.dtypes or not (mask is None or case.traits.key_padding):
                continue
            try:
                grads = gradients(case, at, dtype, mask)
            except Unsupported:  # at this width, say
                continue
            bad = [name for name, grad in grads.items() if not bool(grad.isfinite().all())]
            wide = gradients(case, at, torch.float64, mask) if bad else {}
            if bad := [name for name in bad if float(wide[name].abs().max()) < LARGE]:
                found.append((str(case), dtype, bad))
    return found


@each
def test_padding_on_the_left_leaves_gradients_finite(entry: Variant) -> None:
    assert broken(entry, replace(SHAPE, seq_len=40, head_dim=8), LEFT) == []


@each
def test_a_token_of_zeros_leaves_gradients_finite(entry: Variant) -> None:
    assert broken(entry, SHAPE, None) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_vector_of_zeros_is_divided_by_no_small_number(dtype: torch.dtype) -> None:
    x = torch.zeros(3, dtype=dtype, requires_grad=True)
    unit(x).sum().backward()
    assert unit(x).tolist() == [0, 0, 0]
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 1]
    assert unit(torch.tensor([3e-4, 4e-4], dtype=dtype)).tolist() == pytest.approx([0.6, 0.8], rel=1e-2)
