"""What the tests of every fixed pattern need: drawn inputs, and the comparison with a dense mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnbench.contract.problem.reference import masked_attention


def draw(n: int, B: int = 2, H: int = 2, D: int = 4) -> list[Tensor]:
    """q, k and v ``(B, H, n, D)`` in float64, with gradients."""
    return [torch.randn(B, H, n, D, dtype=torch.float64, requires_grad=True) for _ in "qkv"]


def is_softmax_under(f: Callable[..., Tensor], allowed: Tensor, n: int, *, padded: bool = True) -> None:
    """Output and gradients of ``f`` equal those of the dense mask ``allowed``, also where keys are padding."""
    q, k, v = draw(n)
    weight = torch.randn_like(v)
    for mask in (None, torch.rand(2, n) < 0.6) if padded else (None,):
        dense = allowed if mask is None else allowed & mask[:, None, None]
        out, wanted = f(q, k, v, key_mask=mask), masked_attention(q, k, v, dense)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
        gradients, expected = (torch.autograd.grad(x, (q, k, v), weight) for x in (out, wanted))
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)
