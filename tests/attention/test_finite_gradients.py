"""Gradients of every variant stay finite in few bits: behind padding on the left, and at tokens of zeros."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import attnbench.attention  # noqa: F401  # registers the variants
from attnbench.engines.precision import unit
from attnbench.errors import Unsupported
from attnbench.testing.laws import SHAPE, Case, cases
from attnbench.variant import VARIANTS, Variant

ALL = [one for one in VARIANTS if one.make.__module__.startswith("attnbench.attention.") and not one.traits.compiled]
each = pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)


def modules(entry: Variant, head_dim: int, seq_len: int) -> Iterator[tuple[Case, nn.Module, list[Tensor]]]:
    """Its cases in each of the smaller dtypes that it takes, and inputs."""
    for case in cases(entry):
        shape = replace(SHAPE, causal=case.causal, head_dim=head_dim, seq_len=seq_len)
        for dtype in (torch.float32, torch.float16):
            if str(dtype)[6:] not in case.traits.dtypes:
                continue
            try:
                yield case, case.module(shape, dtype=dtype), case.draw(shape, dtype=dtype)
            except Unsupported:  # with a key mask, say, or at this width
                continue


def unfinite(module: nn.Module, inputs: list[Tensor], key_mask: Tensor | None = None) -> list[str]:
    """The inputs and parameters whose gradient is not finite."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = module(*leaves) if key_mask is None else module(*leaves, key_mask=key_mask)
    wanted = dict(zip("qkvx"[:3] if len(leaves) == 3 else "x", leaves, strict=True)) | dict(module.named_parameters())
    grads = torch.autograd.grad(out.float().square().sum(), list(wanted.values()), allow_unused=True)
    found = zip(wanted, grads, strict=True)
    return [name for name, grad in found if grad is not None and not bool(grad.isfinite().all())]


@each
def test_padding_on_the_left_leaves_gradients_finite(entry: Variant) -> None:
    mask = torch.arange(40) >= torch.tensor([[7], [0]])
    padded = [found for found in modules(entry, 8, 40) if found[0].traits.key_padding]
    assert [(str(case), bad) for case, module, inputs in padded if (bad := unfinite(module, inputs, mask))] == []


@each
def test_a_token_of_zeros_leaves_gradients_finite(entry: Variant) -> None:
    broken = []
    for case, module, inputs in modules(entry, 4, 23):
        for x in inputs:
            x[..., 0, :] = x[..., 5, :] = 0
        if bad := unfinite(module, inputs):
            broken.append((str(case), bad))
    assert broken == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_vector_of_zeros_is_divided_by_no_small_number(dtype: torch.dtype) -> None:
    x = torch.zeros(3, dtype=dtype, requires_grad=True)
    unit(x).sum().backward()
    assert unit(x).tolist() == [0, 0, 0]
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 1]
    assert unit(torch.tensor([3e-4, 4e-4], dtype=dtype)).tolist() == pytest.approx([0.6, 0.8], rel=1e-2)
