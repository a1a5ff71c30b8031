"""A selection of blocks of keys for each block of queries: a list of the kept pairs, chosen by their scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from attnbench.catalogue.engines.flex.block_mask import BLOCK, Seen
from attnbench.catalogue.engines.forms import on_device
from attnbench.catalogue.engines.tiling import budget


@dataclass(frozen=True)
class BlockPairs:
    """Pairs of a block of queries and a block of keys, each at most once, in any order."""

    rows: int
    columns: int
    queries: Tensor
    """``(P,)``, numbers of blocks of queries: (b·H + h)·I + i for block i of I, of head h of example b."""
    keys: Tensor
    """``(P,)``, numbers of blocks of keys within that head of that example."""


class Grid(BlockPairs):
    """A dense form of the pairs, listed only on demand: on a GPU, the host waits for a list's length."""

    def __init__(self, rows: int, columns: int, kept: Tensor) -> None:
        """``kept``: ``(B, H, blocks of queries, blocks of keys)`` bool."""
        self.__dict__.update(rows=rows, columns=columns, kept=kept)

    kept: Tensor

    @cached_property
    def _lists(self) -> tuple[Tensor, Tensor]:
        head, at, keys = self.kept.flatten(0, 1).nonzero(as_tuple=True)
        return head * self.kept.shape[2] + at, keys

    @property
    def queries(self) -> Tensor:
        return self._lists[0]

    @property
    def keys(self) -> Tensor:
        return self._lists[1]


@dataclass(frozen=True)
class BlockSelection:
    """The pairs of query and key to compute, as lists of pairs of blocks.

    Several lists must have no pair of tokens in common. All have blocks of as many queries, and their numbers of keys
    divide the largest of them.
    """

    size: tuple[int, int, int]
    causal: bool
    """A query sees no later key, whatever its blocks hold."""
    parts: tuple[BlockPairs, ...]
    real: Tensor | None = None
    """``(B, N)`` bool: the keys that are no padding; None: all."""

    def pairs(self, queries: slice) -> Tensor:
        """``(B, H, n, N)`` bool: the keys that each of these n queries attends to."""
        B, H, N = self.size
        start, stop, _ = queries.indices(N)
        like = self.parts[0].queries
        seen = torch.zeros(B * H, stop - start, N, dtype=torch.bool, device=like.device)
        for part in self.parts:
            total = -(-N // part.rows)
            first, last = start // part.rows, -(-stop // part.rows)
            head, at = part.queries // total, part.queries % total
            inside = (first <= at) & (at < last)
            chosen = seen.new_zeros(B * H, last - first, -(-N // part.columns))
            chosen[head[inside], at[inside] - first, part.keys[inside]] = True
            rows = chosen.repeat_interleave(part.rows, 1)[:, start - first * part.rows :][:, : stop - start]
            seen |= rows.repeat_interleave(part.columns, 2)[:, :, :N]
        if self.causal:
            i = torch.arange(start, stop, device=like.device)
            seen &= torch.arange(N, device=like.device) <= i[:, None]
        seen = seen.view(B, H, stop - start, N)
        return seen if self.real is None else seen & self.real[:, None, None]

    def of(self, B: int, H: int, N: int) -> BlockSelection:
        if self.size == (B, H, N):
            return self
        heads, tokens = self.size[1:]
        parts = []
        for part in self.parts:
            total, fewer = -(-tokens // part.rows), -(-N // part.rows)
            head, at = part.queries // total, part.queries % total
            b, h = head // heads, head % heads
            kept = (b < B) & (h < H) & (at < fewer) & (part.keys * part.columns < N)
            parts.append(BlockPairs(part.rows, part.columns, ((b * H + h) * fewer + at)[kept], part.keys[kept]))
        return BlockSelection((B, H, N), self.causal, tuple(parts), None if self.real is None else self.real[:B, :N])

    def repeated(self, B: int, H: int) -> BlockSelection:
        if self.size[:2] == (B, H):
            return self
        parts, device = [], self.parts[0].queries.device
        for part in self.parts:
            heads = torch.arange(B * H, device=device)[:, None] * -(-self.size[2] // part.rows)
            queries, keys = (heads + part.queries).flatten(), part.keys.repeat(B * H)
            parts.append(BlockPairs(part.rows, part.columns, queries, keys))
        real = None if self.real is None else self.real.expand(B, -1)
        return BlockSelection((B, H, self.size[2]), self.causal, tuple(parts), real)

    @cached_property
    def block_mask(self) -> BlockMask:
        return self.seen().mask(self.real)

    def seen(self) -> Seen:
        """Blocks by number of kept pairs; a bit for each kept pair of blocks marks these."""
        B, H, N = self.size
        kept, counts = [], []
        for part in self.parts:
            grid = _kept(part, self.size)
            rows, columns = (_overlaps(one, N, grid.device) for one in (part.rows, part.columns))
            # Whole numbers up to 128, which eight bits hold.
            counts.append(torch.matmul(rows.bfloat16(), grid.bfloat16()).float() @ columns.mT)
            bits = torch.unflatten(pad(grid, (0, -grid.shape[3] % 32)), 3, (-1, 32))
            places = torch.arange(32, dtype=torch.int32, device=grid.device)
            kept.append(((bits.int() << places).sum(4, dtype=torch.int32), part.rows, part.columns))
        held = torch.stack(counts).sum(0)
        ends = torch.arange(0, N + BLOCK, BLOCK, device=held.device).clamp(max=N)
        sizes, causal = ends[: held.shape[2] + 1].diff(), self.causal
        full, some = held == sizes[:, None] * sizes, held > 0

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            seen = i < 0
            for table, rows, columns in kept:
                unit, block = i // rows, j // columns
                seen = seen | ((table[b % B, h % H, unit, block // 32] >> (block % 32)) & 1 > 0)
            return seen & (j <= i) if causal else seen

        if causal:
            full, some = full.tril(-1), some.tril()
        return Seen(full, some, sees, N)


def _kept(part: BlockPairs, size: tuple[int, int, int]) -> Tensor:
    if isinstance(part, Grid):
        return part.kept
    (B, H, N), keys = size, part.keys
    kept = torch.zeros(B * H * -(-N // part.rows), -(-N // part.columns), dtype=torch.bool, device=keys.device)
    kept[part.queries, keys] = True
    return kept.view(B, H, -1, kept.shape[1])


def _overlaps(size: int, N: int, device: torch.device) -> Tensor:
    """Number of tokens that each block of FlexAttention shares with each block of ``size``, ``(Q, blocks)``."""
    ends, others = (
        torch.arange(0, N + one, one, device=device)[: -(-N // one) + 1].clamp(max=N) for one in (BLOCK, size)
    )
    here = torch.minimum(ends[1:, None], others[1:]) - torch.maximum(ends[:-1, None], others[:-1])
    return here.clamp(min=0).float()


def listed(sizes: tuple[int, int], total: int, width: int, choose: Callable[[slice], Tensor], q: Tensor) -> BlockPairs:
    """The pairs that ``choose`` keeps, asked for some blocks of queries at a time.

    Args:
        sizes: queries and keys of a block.
        total: blocks of queries in each head.
        width: numbers that ``choose`` computes for a block of queries of one head.
        choose: maps blocks of queries to a mask of the kept blocks of keys, ``(B, H, n, blocks)`` bool.
        q: ``(B, H, N, D)``; no more numbers than it has are computed at a time.
    """
    # No more than q has, or memory would grow faster than n until a cache is full.
    step = max(1, min(budget("blocks.scores", q.device), q.numel()) // (q.shape[0] * q.shape[1] * width))
    every = (slice(first, min(first + step, total)) for first in range(0, total, step))
    if on_device(q):
        return Grid(*sizes, torch.cat([choose(blocks) for blocks in every], 2))
    found = []
    for blocks in every:
        head, at, keys = choose(blocks).flatten(0, 1).nonzero(as_tuple=True)
        found.append((head * total + at + blocks.start, keys))
    queries, keys = (torch.cat(parts) for parts in zip(*found, strict=True))
    return BlockPairs(*sizes, queries, keys)


def largest(scores: Tensor, count: int, *, allowed: Tensor, forced: Tensor) -> Tensor:
    """A mask of the ``count`` largest allowed scores ``(..., J)`` in each row, forced ones first; ties go to the first.

    ``allowed`` and ``forced`` are bool and broadcastable to the scores.
    """
    ranked = scores.masked_fill(forced, torch.inf).masked_fill(~allowed, -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, order, True) & allowed


def heaviest(masses: Tensor, share: float, *, allowed: Tensor, forced: Tensor, least: int = 0) -> Tensor:
    """A mask of the fewest allowed entries in each row that hold ``share`` of its mass, the largest first.

    Forced entries are kept, and their mass counts. A share of 1 keeps all that is allowed: sums of rounded masses reach
    1 too early.

    Args:
        masses: ``(..., J)``, 0 or more; ties go to the first.
        allowed, forced: bool, broadcastable to it.
        least: fewest entries kept, if so many are allowed.
    """
    forced = (forced & allowed).expand(masses.shape)
    if share >= 1:
        return allowed.expand(masses.shape)
    masses = masses.masked_fill(~allowed, 0.0)
    ranked = masses.masked_fill(forced, torch.inf).masked_fill(~allowed, -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    ordered = masses.gather(-1, order)
    before = ordered.cumsum(-1) - ordered
    enough = before >= share * ordered.sum(-1, keepdim=True)
    wanted = ~enough | (torch.arange(masses.shape[-1], device=masses.device) < least)
    return (torch.zeros_like(forced).scatter(-1, order, wanted) | forced) & allowed


def within(masses: Tensor, share: float, *, allowed: Tensor) -> Tensor:
    """A mask of the allowed entries in each row ``(..., J)`` that, the largest first, add up to at most ``share``.

    The largest is kept in any case. A share of 1 keeps all that is allowed, despite rounding.
    """
    if share >= 1:
        return allowed.expand(masses.shape)
    ordered, order = masses.masked_fill(~allowed, -1.0).sort(dim=-1, descending=True, stable=True)
    kept = ordered.cumsum(-1) <= share
    kept[..., 0] = True
    return torch.zeros_like(masses, dtype=torch.bool).scatter(-1, order, kept) & allowed


def in_blocks(x: Tensor, size: int, dim: int = -1) -> Tensor:
    """x with one axis cut into blocks, ``(..., blocks, size, ...)``; the last one is padded with zeros, or False."""
    dim %= x.ndim
    short = -x.shape[dim] % size
    return torch.unflatten(pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, short)), dim, (-1, size))


def means(x: Tensor, real: Tensor, size: int) -> Tensor:
    """Means of the real tokens of each block, ``(B, H, blocks, D)``; 0 for none. x is 0 at padded tokens.

    ``real`` is ``(B or 1, n)`` bool.
    """
    count = in_blocks(real, size).sum(-1).clamp(min=1)
    return in_blocks(x, size, 2).sum(3) / count[:, None, :, None]


def products(q: Tensor, k: Tensor) -> Tensor:
    """q·k of each head, ``(B, H, n, m)``, from q ``(B, H, n, D)`` and k ``(B, K, m, D)``; head h reads h // (H / K)."""
    (B, H, n, _), K = q.shape, k.shape[1]
    return torch.matmul(q.reshape(B, K, H // K * n, -1), k.mT).view(B, H, n, -1)


def own_blocks(blocks: slice, rows: int, total: int, columns: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Masks ``(n, total)`` of blocks of keys that share tokens with these blocks of queries, and of those not later."""
    i = torch.arange(blocks.start, blocks.stop, device=like.device)[:, None] * rows
    j = torch.arange(total, device=like.device) * columns
    before = j < i + rows
    return before & (j + columns > i), before


class LastQueries(NamedTuple):
    """The last real queries of each example, for one head."""

    rows: Tensor
    """``(B, r, D)``, 0 where an example has fewer than r real tokens."""
    at: Tensor
    """``(B, r)``, their places in order; -1 for none."""
    weights: Tensor
    """``(B, r, N)``, their softmax weights; 0 for no query or nothing to see."""


def of_last_queries(q: Tensor, k: Tensor, real: Tensor, count: int, *, causal: bool) -> LastQueries:
    """The weights of the last ``count`` real queries of q and k ``(B, N, D)``, which are 0 at padded tokens."""
    N, D = q.shape[1:]
    places = torch.arange(N, device=q.device)
    at = torch.where(real, places, -1).sort(1).values[:, -count:]
    rows = q.gather(1, at.clamp(min=0)[..., None].expand(-1, -1, D)).masked_fill((at < 0)[..., None], 0.0)
    hidden = ~real[:, None] | (at < 0)[..., None]
    if causal:
        hidden = hidden | (places > at[..., None])
    logits = torch.bmm(rows * D**-0.5, k.mT).masked_fill_(hidden, -torch.inf)
    return LastQueries(rows, at, logits.softmax(-1).nan_to_num_(0.0))


def by_distance(found: LastQueries, side: int) -> Tensor:
    """Sums of weights by distance, ``(B, 2·side)``: distance δ (key before query) is at δ + side, side >= tokens."""
    B, r, N = found.weights.shape
    distance = found.at[..., None] - torch.arange(N, device=found.at.device) + side
    sums = found.weights.new_zeros(B, 2 * side)
    return sums.scatter_add_(1, distance.clamp_(min=0).view(B, r * N), found.weights.view(B, r * N))
