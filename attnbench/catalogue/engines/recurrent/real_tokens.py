"""A recurrence over the real tokens only, in one direction or in both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def both_ways(run: Callable[[Tensor, int], Tensor], x: Tensor, key_mask: Tensor | None, *, causal: bool) -> Tensor:
    """``run(x, 0)``, plus ``run(x, 1)`` over the reversed tokens unless causal; padding is cut out.

    Args:
        run: maps tokens ``(B, N, C)`` to ``(B, N, ·)``, each from itself and those before it.
        x: ``(B, N, C)``, zeros at padded tokens.
        key_mask: ``(B, N)`` bool, True for a real token. Outputs of padded tokens mean nothing.
    """
    if key_mask is None:
        return run(x, 0) if causal else run(x, 0) + run(x.flip(1), 1).flip(1)
    order = (~key_mask).to(torch.uint8).argsort(stable=True, dim=1)  # real tokens first
    x = _rows(x, order)
    out = run(x, 0)
    if not causal:
        place, length = torch.arange(x.shape[1], device=x.device), key_mask.sum(1, keepdim=True)
        turned = torch.where(place < length, length - 1 - place, place)
        out = out + _rows(run(_rows(x, turned), 1), turned)
    return _rows(out, order.argsort(1))


def alone(formula: Callable[[Any, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Make a dense form ``(module, x, *, key_mask)`` of one that computes the real tokens of one example.

    ``formula`` is a method from tokens ``(n, C)``, n >= 1, to ``(n, C)``, called for each example; padded tokens get 0.
    """

    def dense(self: Any, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
        rows = []
        for example, own in zip(x, real, strict=True):
            row = torch.zeros_like(example)
            if bool(own.any()):
                row = row.index_put((own,), formula(self, example[own]))
            rows.append(row)
        return torch.stack(rows)

    dense.__doc__ = formula.__doc__
    return dense


def _rows(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))
