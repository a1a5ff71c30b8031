"""A shorter sequence made of a longer one: pooling over runs of tokens, and convolutions with kernel = stride."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnbench.catalogue.engines.low_rank.thin import attend_to_few_keys
from attnbench.catalogue.engines.precision import accumulator


class Segments:
    """At most ``count`` runs of the real tokens, longer ones first, with lengths that differ by at most 1.

    Padding is cut out before the runs are formed, so that they are those of the shorter sequence. With fewer real
    tokens than ``count``, each is a run, and the remaining runs are empty. ``key_mask`` is ``(B, tokens)`` bool.
    """

    def __init__(self, count: int, tokens: int, key_mask: Tensor | None = None) -> None:
        self.count = min(count, tokens)
        self.tokens = tokens
        self.filled: Tensor | None = None
        """``(B, R)`` bool: the runs that have a token; None: all."""
        if key_mask is None:
            return
        start, self.length = split(key_mask.sum(1), self.count)
        self.filled = self.length > 0
        slot = torch.arange(-(-tokens // self.count), device=key_mask.device)
        self.inside = slot < self.length[..., None]
        self.position = nth_real(key_mask, (start[..., None] + slot).flatten(1))

    def mean(self, x: Tensor) -> Tensor:
        """Averages of x ``(B, H, tokens, D)`` over the runs, ``(B, H, R, D)``; 0 for an empty run."""
        if self.filled is None:
            return torch.cat([runs.mean(3) for runs in self._unmasked(x)], 2)
        accumulate = accumulator(x.dtype)
        weights = self.inside.to(accumulate) / self.length.clamp(min=1)[..., None]
        means = torch.matmul(weights[:, None, :, None], self._slots(x).to(accumulate))
        return means.squeeze(3).to(x.dtype)

    def max(self, x: Tensor) -> Tensor:
        """Elementwise maxima of x ``(B, H, tokens, D)`` over the runs, ``(B, H, R, D)``; 0 for an empty run."""
        if self.filled is None:
            return torch.cat([runs.amax(3) for runs in self._unmasked(x)], 2)
        slots = self._slots(x).masked_fill_(~self.inside[:, None, ..., None], -torch.inf)
        return slots.amax(3).masked_fill(~self.filled[:, None, :, None], 0.0)

    def _unmasked(self, x: Tensor) -> list[Tensor]:
        short, longer = divmod(self.tokens, self.count)
        cut = longer * (short + 1)
        if not longer:
            return [torch.unflatten(x, 2, (self.count, short))]
        parts = (x[:, :, :cut], (longer, short + 1)), (x[:, :, cut:], (self.count - longer, short))
        return [torch.unflatten(part, 2, size) for part, size in parts]

    def _slots(self, x: Tensor) -> Tensor:
        return torch.unflatten(take(x, self.position), 2, self.inside.shape[1:])


def split(real: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Start and length ``(B, count)`` of the runs of ``real`` ``(B,)`` tokens; empty runs last."""
    runs = real.clamp(min=1, max=count)[:, None]
    index = torch.arange(count, device=real.device)
    short, longer = real[:, None] // runs, real[:, None] % runs
    length = (short + (index < longer)) * (index < runs)
    return index * short + index.clamp(max=longer), length


def nth_real(key_mask: Tensor, rank: Tensor) -> Tensor:
    """Position ``(B, R)`` of the real token after ``rank`` ``(B, R)`` real ones; the last token's if there is none."""
    return torch.searchsorted(key_mask.cumsum(1), rank + 1).clamp(max=key_mask.shape[1] - 1)


def take(x: Tensor, position: Tensor) -> Tensor:
    """The rows ``position`` ``(B, R)`` of x ``(B, H, n, D)``: ``(B, H, R, D)``."""
    B, H, n, D = x.shape
    heads = torch.arange(B * H, device=x.device).view(B, H, 1) * n
    # Whole rows of a matrix: six times faster on a CPU than gather, which looks up every element.
    rows = x.reshape(B * H * n, D).index_select(0, (position[:, None] + heads).flatten())
    return rows.view(B, H, position.shape[1], D)


def strided_convolution(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolution along the tokens of x ``(B, H, n, D)`` with stride = kernel length c, zeros after the last token.

    ``kernel`` is ``(c, D, D)`` for all heads or ``(H, c, D, D)``; [t, i, o] takes channel i of token t to channel o.
    Returns ``(B, H, ceil(n / c), D)``.
    """
    c = kernel.shape[-3]
    if x.shape[2] % c:
        x = pad(x, (0, 0, 0, -x.shape[2] % c))
    blocks = x.reshape(*x.shape[:2], x.shape[2] // c, c * x.shape[3])
    return torch.matmul(blocks, kernel.flatten(-3, -2))


def any_real(key_mask: Tensor, c: int) -> Tensor:
    """A mask ``(B, ceil(M / c))`` of the blocks of c tokens with a real one, from ``key_mask`` ``(B, M)``."""
    return torch.unflatten(pad(key_mask, (0, -key_mask.shape[1] % c)), 1, (-1, c)).any(2)


def attend_to_filled(q: Tensor, k: Tensor, v: Tensor, filled: Tensor | None) -> Tensor:
    """Softmax attention to the rows that ``filled`` ``(B, R)`` marks; the others must be zero."""
    # With no real key every row is zero: attending to all of them gives 0, attending to none NaN on some devices.
    mask = None if filled is None else (filled | ~filled.any(1, keepdim=True))[:, None, None]
    return attend_to_few_keys(q, k, v, mask, keep=True)
