"""A cache of keys and values in pages of a pool, as servers keep it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Paged(NamedTuple):
    """Keys and values in pages of some tokens, with a table of the pages that each sequence holds.

    The pages of a sequence are set aside when room is made, in a fixed order of chance: those of a served pool do not
    lie side by side either. A token then takes the next free place of its sequence's last page, or of its next one.
    """

    k: Tensor
    """The pool, ``(P, K, page, D)``."""
    v: Tensor
    table: Tensor
    """``(B, pages)``: number in the pool of each page of a sequence, in the order of its tokens."""
    length: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, capacity: int, page: int) -> Paged:
        """Pages with room for at least ``capacity`` tokens of each sequence that hold k and v ``(B, K, n, ·)``."""
        pools = [x.new_empty(0, x.shape[1], page, x.shape[3]) for x in (k, v)]
        table = torch.empty(len(k), 0, dtype=torch.long, device=k.device)
        return cls(pools[0], pools[1], table, 0).grown(capacity).append(k, v)

    def append(self, k: Tensor, v: Tensor) -> Paged:
        """Append keys and values ``(B, K, n, ·)`` in place; a pool without room for them doubles."""
        end = self.length + k.shape[2]
        paged = self.grown(end)
        paged.put(torch.arange(self.length, end, device=k.device).expand(len(k), -1), k, v)
        return paged._replace(length=end)

    def grown(self, end: int) -> Paged:
        """Pages with room for ``end`` tokens of each sequence: itself, if it has that."""
        B, count = self.table.shape
        missing = -(-end // self.k.shape[2]) - count
        if missing <= 0:
            return self
        more = B * max(missing, count)
        chosen = len(self.k) + torch.randperm(more, generator=torch.Generator().manual_seed(more))
        k, v = (torch.cat((x, x.new_zeros(more, *x.shape[1:]))) for x in (self.k, self.v))
        return Paged(k, v, torch.cat((self.table, chosen.view(B, -1).to(self.table)), 1), self.length)

    def put(self, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v ``(B, K, n, ·)`` in place, each sequence at ``places`` ``(B, n)`` of its own."""
        page = self.k.shape[2]
        pages, within = self.table.gather(1, places // page), places % page
        self.k[pages, :, within], self.v[pages, :, within] = k.transpose(1, 2), v.transpose(1, 2)

    @property
    def keys(self) -> Tensor:
        return self._gathered(self.k)

    @property
    def values(self) -> Tensor:
        return self._gathered(self.v)

    def _gathered(self, pool: Tensor) -> Tensor:
        """The tokens of a pool in the order of each sequence, ``(B, K, length, ·)``, in one copy."""
        _, K, page, D = pool.shape
        pages = self.table[:, None, : -(-self.length // page)]
        heads = pages * K + torch.arange(K, device=pool.device)[:, None]
        rows = pool.view(-1, page, D).index_select(0, heads.flatten())
        return rows.view(len(pages), K, -1, D)[:, :, : self.length]

    def unused(self) -> tuple[Tensor, ...]:
        full, part = divmod(self.length, self.k.shape[2])
        ends = [(number, part) for number in self.table[:, full : full + 1].flatten().tolist()]
        ends += [(number, 0) for number in self.table[:, full + 1 :].flatten().tolist()]
        return tuple(pool[number, :, first:] for pool in (self.k, self.v) for number, first in ends)

    def held_bytes(self, lengths: Tensor | None = None) -> int:
        """Bytes of the pages that hold tokens, and of the table; ``lengths`` ``(B,)``, if they are not equal."""
        tokens = [self.length] * len(self.table) if lengths is None else lengths.tolist()
        pages = sum(-(-count // self.k.shape[2]) for count in tokens)
        return pages * (self.k[:1].nbytes + self.v[:1].nbytes) + self.table.nbytes
