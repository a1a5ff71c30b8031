"""Softmax over any score of a query and a key, tile by tile: the scores of all pairs are never in memory at once.

A score is a function of tiles. The backward pass computes each tile again and differentiates it there, so that a
score's own intermediates, a hidden layer say, exist for one tile at a time in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.catalogue.engines.masks import added_to_logits
from attnbench.catalogue.engines.precision import accumulator, hidden, softmax_and_log_sum
from attnbench.catalogue.engines.tiling import budget
from attnbench.contract.problem.sink import Sink
from attnbench.contract.problem.visible import Visible


class PairScore(NamedTuple):
    """The score of a query and a key."""

    of: Callable[..., Tensor]
    """Maps q ``(G, n, ·)``, k ``(G, m, ·)``, totals ``(G, n, 1)`` and ``(G, m, 1)`` if there are any, and weights
    ``(G, ·)`` to new scores ``(G, n, m)``."""
    weights: tuple[Tensor, ...] = ()
    """Its parameters, ``(H, ·)`` each."""
    width: int = 1
    """Numbers computed for a pair."""
    totals: Tensor | None = None
    """A running sum of each token, ``(B, H, N)`` in float64, for scores made of differences; so are its gradients: a
    token's gradient is a small difference of sums over all pairs.
    """


Chunk = Annotated[
    int | None, Field(ge=1, description="queries and keys of a tile; none: what is fast. Moves time and memory only")
]
"""The option of all variants on :func:`attend_by_score`."""

ROWS = 64
"""Queries of a tile, and fewest keys."""


def _product(q: Tensor, k: Tensor) -> Tensor:
    return torch.bmm(q, k.mT)


PRODUCT = PairScore(_product)
"""q_i·k_j."""


def attend_by_score(
    score: PairScore,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | Visible,
    key_mask: Tensor | None,
    chunk: int | None = None,
    sink: Sink | None = None,
) -> Tensor:
    """Σ_j softmax_j(score(q_i, k_j)) v_j.

    Args:
        q: the score's input of the queries, ``(B, H, N, ·)``; k: of the keys, ``(B, H, M, ·)``.
        v: ``(B, H, M, E)``. At padded keys, v and k must be finite.
        causal: query i sees keys j <= i; or the keys that each query sees.
        key_mask: ``(B, M)`` bool, True for a real key.
        chunk: queries and keys of a tile; None: a cache's worth. It changes nothing in the result but rounding.
        sink: a logit of each head without a key.

    Returns:
        ``(B, H, N, E)`` in v's dtype, summed in float32 at least. A query that sees no key gives 0.
    """
    B, H, N = q.shape[:3]
    dtype = accumulator(v.dtype)
    flat = [one.to(dtype).flatten(0, 1) for one in (v, q, k)]
    if score.totals is not None:
        flat += [score.totals.flatten(0, 1)[..., None]] * 2
    sides = len(flat) // 2
    flat += [one.to(dtype).expand(B, *one.shape).flatten(0, 1) for one in score.weights]
    padding = None if key_mask is None else added_to_logits(key_mask, dtype).repeat_interleave(H, 0)[:, None]
    visible = causal if isinstance(causal, Visible) else Visible(causal)
    sizes = _sizes(N, k.shape[2], score.width, budget("pair_scores.hidden", q.device), chunk)
    logits = None if sink is None else sink.logit.to(dtype).expand(B, H).reshape(-1, 1, 1)
    out: Tensor = _PairSoftmax.apply(_Tiling(score.of, sides, visible, padding, *sizes), logits, *flat)  # type: ignore[no-untyped-call]  # untyped in torch
    out = out.view(B, H, N, -1).to(v.dtype)
    return out if key_mask is None else out.masked_fill(~visible.seeing(key_mask, N), 0)


def _sizes(N: int, M: int, width: int, most: int, chunk: int | None) -> tuple[int, int, int]:
    if chunk is not None:
        return max(1, most // (chunk * chunk * width)), chunk, chunk
    rows = min(N, ROWS)
    keys = min(M, max(ROWS, most // (rows * width)))
    rows = min(N, max(rows, most // (keys * width)))
    return max(1, most // (rows * keys * width)), rows, keys


@dataclass(frozen=True)
class _Tiling:
    score: Callable[..., Tensor]
    sides: int
    """Number of tensors of queries, followed by as many of keys in turn; all others are of heads."""
    visible: Visible
    padding: Tensor | None
    """``(G, 1, M)``, added to the scores."""
    heads: int
    rows: int
    columns: int

    def blocks(self, x: Tensor, y: Tensor) -> Iterator[tuple[slice, slice, slice]]:
        count, N = x.shape[:2]
        for first in range(0, count, self.heads):
            for start in range(0, N, self.rows):
                rows = slice(start, min(start + self.rows, N))
                yield slice(first, min(first + self.heads, count)), rows, self.visible.seen_by_some(rows, y.shape[1])

    def keys(self, seen: slice) -> Iterator[slice]:
        for start in range(seen.start, seen.stop, self.columns):
            yield slice(start, min(start + self.columns, seen.stop))

    def hiding(self, heads: slice, rows: slice, keys: slice, y: Tensor) -> Tensor | None:
        added, total = None if self.padding is None else self.padding[heads, :, keys], y.shape[1]
        every = self.visible.seen_by_all(rows, total)
        if every.start <= keys.start and keys.stop <= every.stop:
            return added
        unseen = ~self.visible.pairs(rows, keys, total, y.device)
        below = torch.zeros_like(unseen, dtype=y.dtype).masked_fill_(unseen, hidden(y.dtype))
        return below if added is None else added + below

    def places(self, heads: slice, rows: slice, keys: slice, inputs: Sequence[Tensor]) -> list[tuple[slice, ...]]:
        of_tokens: list[tuple[slice, ...]] = [(heads, rows), (heads, keys)] * self.sides
        return of_tokens + [(heads,)] * (len(inputs) - len(of_tokens))

    def scores(self, heads: slice, rows: slice, keys: slice, inputs: Sequence[Tensor]) -> Tensor:
        places = self.places(heads, rows, keys, inputs)
        tile = self.score(*(one[place] for one, place in zip(inputs, places, strict=True)))
        added = self.hiding(heads, rows, keys, inputs[1])
        return tile if added is None else tile.add_(added)


class _PairSoftmax(torch.autograd.Function):
    """v ``(G, M, E)``, and the score's x ``(G, N, ·)``, y ``(G, M, ·)``, perhaps totals, weights ``(G, ·)``.

    The sink is ``(G, 1, 1)`` or None.
    """

    @staticmethod
    def forward(ctx: Any, how: _Tiling, sink: Tensor | None, v: Tensor, *inputs: Tensor) -> Tensor:
        x, y, *_ = inputs
        out, log_sums = v.new_empty(*x.shape[:2], v.shape[2]), v.new_empty(*x.shape[:2], 1)
        for heads, rows, seen in how.blocks(x, y):
            tiles = [how.scores(heads, rows, keys, inputs) for keys in how.keys(seen)]
            kept, total = softmax_and_log_sum(tiles[0] if len(tiles) == 1 else torch.cat(tiles, -1))
            if sink is not None:
                both = torch.logaddexp(total, sink[heads])
                kept, total = kept.mul_((total - both).exp_()), both
            out[heads, rows], log_sums[heads, rows] = torch.bmm(kept, v[heads, seen]), total
        ctx.save_for_backward(v, out, log_sums, sink, *inputs)
        ctx.how = how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        v, out, log_sums, sink, *inputs = ctx.saved_tensors
        how: _Tiling = ctx.how
        _, _, of_v, *of_inputs = ctx.needs_input_grad
        wanted = [i for i, needed in enumerate(of_inputs) if needed]
        found = {i: torch.zeros_like(inputs[i]) for i in wanted}
        dv, d_sink = torch.zeros_like(v), None if sink is None else torch.zeros_like(sink)
        for heads, rows, seen in how.blocks(*inputs[:2]):
            above = grad[heads, rows]
            mean = (above * out[heads, rows]).sum(-1, keepdim=True)  # of the values' gradients under the weights
            if sink is not None and d_sink is not None:  # its value is 0
                d_sink[heads] -= (sink[heads] - log_sums[heads, rows]).exp_().mul_(mean).sum(1, keepdim=True)
            for keys in how.keys(seen):
                places = how.places(heads, rows, keys, inputs)
                leaves = [one[place].detach() for one, place in zip(inputs, places, strict=True)]
                for i in wanted:
                    leaves[i].requires_grad_()
                with torch.enable_grad():
                    tile = how.score(*leaves)
                added = how.hiding(heads, rows, keys, v)
                # In its memory: no score keeps its result for its gradient.
                kept = tile.detach().sub_(log_sums[heads, rows])
                kept = (kept if added is None else kept.add_(added)).exp_()
                dv[heads, keys] += torch.bmm(kept.mT, above)
                if wanted:
                    d_tile = torch.bmm(above, v[heads, keys].mT).sub_(mean).mul_(kept)
                    parts = torch.autograd.grad(tile, [leaves[i] for i in wanted], d_tile)
                    for i, part in zip(wanted, parts, strict=True):
                        found[i][places[i]] += part
        return None, d_sink, dv if of_v else None, *(found.get(i) for i in range(len(inputs)))
