"""The keys that each query may see by its position: causality, a mask, and queries that start behind the first key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.contract.problem.mask import Mask, mask_of
from attnbench.contract.problem.shape import Shape


@dataclass(frozen=True, slots=True)
class Visible:
    """Query i, which stands at position ``start`` + i of the keys, sees one range of neighbouring keys.

    Both ends of the range never fall as i grows.
    """

    causal: bool = False
    mask: Mask = Mask()
    start: int = 0

    @classmethod
    def of(cls, shape: Shape) -> Visible:
        return cls(shape.causal, mask_of(shape.mask).among(shape.M), shape.q_start)

    def span(self, query: int, keys: int) -> tuple[int, int]:
        """The first key that a query sees, and the one after the last, of ``keys`` in all."""
        return self.mask.span(self.start + query, keys, causal=self.causal)

    def seen_by_some(self, queries: slice, keys: int) -> slice:
        """The range of keys outside of which none of these queries sees a key."""
        return slice(self.span(queries.start, keys)[0], self.span(queries.stop - 1, keys)[1])

    def seen_by_all(self, queries: slice, keys: int) -> slice:
        """The range of keys that every one of these queries sees; empty if its end is not behind its start."""
        return slice(self.span(queries.stop - 1, keys)[0], self.span(queries.start, keys)[1])

    def spans(self, queries: slice, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """:meth:`span` of several queries, ``(n,)`` each."""
        at = torch.arange(self.start + queries.start, self.start + queries.stop, device=device)
        sizes = self.mask.sizes
        first, stop = torch.zeros_like(at), at + 1 if self.causal else torch.full_like(at, keys)
        if self.mask.kind == "prefix":
            stop = stop.clamp(min=sizes[0])
        elif self.mask.kind == "sliding":
            first, stop = (at - sizes[0] + 1).clamp(min=0), torch.minimum(stop, at + sizes[0])
        elif self.mask.kind == "document":
            ends = torch.tensor(self.mask.ends, device=device)
            round_ = at // ends[-1] * ends[-1]
            number = torch.searchsorted(ends, at - round_, right=True)
            starts = torch.cat((ends.new_zeros(1), ends))
            first, stop = round_ + starts[number], torch.minimum(stop, round_ + ends[number])
        return first, stop.clamp(max=keys)

    def pairs(self, queries: slice, keys: slice, total: int, device: torch.device) -> Tensor:
        """True for each of n queries that sees each of m keys in a range, of ``total`` keys in all: ``(n, m)`` bool."""
        first, stop = (x[:, None] for x in self.spans(queries, total, device))
        j = torch.arange(keys.start, keys.stop, device=device)
        return (first <= j) & (j < stop)

    def seeing(self, key_mask: Tensor, queries: int) -> Tensor:
        """The queries that see a key that ``key_mask`` ``(B, M)`` calls real: ``(B, 1, N, 1)`` bool."""
        first, stop = self.spans(slice(0, queries), key_mask.shape[1], key_mask.device)
        count = torch.nn.functional.pad(key_mask.cumsum(1), (1, 0))
        return (count[:, stop] > count[:, first])[:, None, :, None]


def masked(shape: Shape) -> Visible | None:
    """The keys that ``shape`` hides; None if none, or only later ones for queries that start at the first key."""
    return None if shape.mask == "none" and not shape.q_start else Visible.of(shape)
