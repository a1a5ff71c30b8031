"""A recurrence over the real tokens only, in one direction or in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.masks import emptied


class FromEitherEnd(nn.Module):
    """An operator whose tokens read those before them: q, k, v and gates ``(B, H, N, ·)`` to ``(B, H, N, E)``.

    A padded token is passed over as if it were absent. Not causal: what :meth:`one_way` gives from either end is added,
    a token's reading of itself twice. A subclass says in ``written_out`` its formula for one way.
    """

    causal: bool

    def one_way(self, *parts: Tensor) -> Tensor:
        raise NotImplementedError

    def written_out(self, *parts: Tensor) -> Tensor:
        raise NotImplementedError

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self._of_real(self.written_out, key_mask, q, k, v, *gates)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self._of_real(self.one_way, key_mask, q, k, v, *gates)

    def _of_real(self, read: Callable[..., Tensor], key_mask: Tensor | None, *parts: Tensor) -> Tensor:
        return each_way(lambda _, *x: read(*x), emptied(key_mask, *parts), key_mask, causal=self.causal)


def both_ways(run: Callable[[Tensor, int], Tensor], x: Tensor, key_mask: Tensor | None, *, causal: bool) -> Tensor:
    """``run(x, 0)``, plus ``run(x, 1)`` over the reversed tokens unless causal; padding is cut out.

    Args:
        run: maps tokens ``(B, N, C)`` to ``(B, N, ·)``, each from itself and those before it.
        x: ``(B, N, C)``, zeros at padded tokens.
        key_mask: ``(B, N)`` bool, True for a real token. Outputs of padded tokens mean nothing.
    """
    return each_way(lambda direction, tokens: run(tokens, direction), (x,), key_mask, causal=causal)


def each_way(run: Callable[..., Tensor], parts: Sequence[Tensor], key_mask: Tensor | None, *, causal: bool) -> Tensor:
    """As :func:`both_ways` for ``run(direction, *parts)`` of tensors ``(B, ..., N, ·)``, or ``(N, ·)`` unpadded."""
    if key_mask is None:
        return run(0, *parts) if causal else run(0, *parts) + run(1, *(x.flip(-2) for x in parts)).flip(-2)
    order = (~key_mask).to(torch.uint8).argsort(stable=True, dim=1)  # real tokens first
    parts = [_rows(x, order) for x in parts]
    out = run(0, *parts)
    if not causal:
        place, length = torch.arange(key_mask.shape[1], device=out.device), key_mask.sum(1, keepdim=True)
        turned = torch.where(place < length, length - 1 - place, place)
        out = out + _rows(run(1, *(_rows(x, turned) for x in parts)), turned)
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
    places = order[..., None] if x.ndim == 3 else order[:, None, :, None]
    return x.gather(-2, places.expand(x.shape))
