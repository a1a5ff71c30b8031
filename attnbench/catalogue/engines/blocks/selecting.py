"""A base for variants that choose blocks of keys, and then take one softmax over these."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.blocks.block_softmax import attend_in_form
from attnbench.catalogue.engines.blocks.selection import BlockPairs, BlockSelection
from attnbench.catalogue.engines.flex.pair_pattern import FlexPattern, Form
from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.reference import masked_attention, of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.sink import sink_of


class BlockSelecting(nn.Module):
    """Choose with :meth:`choose`, which alone differs between subclasses, and attend by one engine.

    q ``(B, H, N, D)``, k ``(B, K, N, D)``, v ``(B, K, N, E)`` -> ``(B, H, N, E)``. No gradient flows through a choice.

    Args:
        name: of the variant with its options, for the cache of verdicts.
    """

    def __init__(self, shape: Shape, name: str, form: Form) -> None:
        super().__init__()
        self.causal, self.flex = shape.causal, FlexPattern(f"{name}, causal={shape.causal}", form)
        self.sink = sink_of(shape)
        """It does not influence the choice."""

    def choose(self, q: Tensor, k: Tensor, real: Tensor) -> tuple[BlockPairs, ...]:
        """The pairs of blocks that are kept.

        Args:
            q: ``(B, H, N, D)``; k: ``(B, K, N, D)``; in float32 at least, 0 at padded tokens.
            real: ``(B, N)`` bool, True where a token is no padding.
        """
        raise NotImplementedError

    def select(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> BlockSelection:
        dtype = accumulator(q.dtype)
        B, H, N, _ = q.shape
        real = torch.ones(B, N, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
        with torch.no_grad():
            x, y = (one.to(dtype) for one in emptied(key_mask, q, k))
            chosen = self.choose(x, y, real)
        selection = BlockSelection((B, H, N), self.causal, chosen, key_mask)
        if self.flex.may_run(q):
            selection.block_mask  # noqa: B018  # made here, as a part of the choice, and kept
        return selection

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection) -> Tensor:
        return attend_in_form(self.flex, q, k, v, selection, self.sink)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return self.attend(q, k, v, self.select(q, k, key_mask=key_mask))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Softmax over the pairs that :meth:`read` gives for one head of one example after the other."""
        B, H, N, _ = q.shape
        x, y = q.detach(), of_query_heads(k.detach(), H)
        allowed = torch.zeros(B, H, N, N, dtype=torch.bool, device=q.device)
        for b, h in product(range(B), range(H)):
            real = torch.ones(N, dtype=torch.bool, device=q.device) if key_mask is None else key_mask[b]
            for rows, columns in self.read(x[b, h], y[b, h], real):
                allowed[b, h, rows, columns] = True
        return self.over(allowed, (q, k, v), key_mask)

    def read(self, q: Tensor, k: Tensor, real: Tensor) -> Iterator[tuple[slice, slice]]:
        """By the formula, ranges of queries of one head, and of keys that they read; it need not look at causality.

        q, k: ``(N, D)``; real: ``(N,)`` bool.
        """
        raise NotImplementedError

    def over(self, allowed: Tensor, inputs: tuple[Tensor, Tensor, Tensor], key_mask: Tensor | None) -> Tensor:
        """Dense softmax attention over the visible pairs among ``allowed`` ``(B, H, N, N)`` bool, for formulas."""
        q, k, v = inputs
        k, v = (of_query_heads(x, q.shape[1]) for x in (k, v))
        sink = None if self.sink is None else self.sink.logit
        return masked_attention(q, k, v, allowed & visible_pairs(q, k, self.causal, key_mask), sink=sink)


def block_range(number: int, size: int) -> slice:
    """The tokens of a block."""
    return slice(number * size, (number + 1) * size)
