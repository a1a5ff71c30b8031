"""ETC attention: a long input that sees its neighbours, and a short global input that sees and is seen by all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.flex.block_mask import by_places
from attnbench.catalogue.engines.flex.flex_attention import Mod
from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, FlexPattern, Form
from attnbench.catalogue.engines.patterns.bands import around_global
from attnbench.catalogue.engines.patterns.keys import Beside, Window
from attnbench.catalogue.engines.patterns.pattern_softmax import attend
from attnbench.catalogue.engines.patterns.tiles import Label, Tile
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register


@register(
    "etc",
    family="fixed pattern",
    also=("memory",),
    source="Ainslie et al. 2020, arXiv:2004.08483, section 3",
    formula="softmax_j((q_i·k_j + q_i·a_l(i,j))/√D), long i: |i - j| ≤ r or j global; global i: all j; l = clip(j - i)",
    cost="O(n·(2r + g)·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        causal=No("global tokens see the whole sequence, and every token sees them"),
        cross=No("the window needs queries and keys at the same positions"),
        bias=No("the learned tables of relative positions are a bias of their own"),
        stochastic=True,
        exact_with=("window={n},max_distance=0", "window=1,global_tokens={n},max_distance=0"),
        knob=Knob("window"),
        given=(
            ("max_distance=0", {"target": "softmax", "stochastic": False}),
            COMPILED,
        ),
    ),
    settings=("window=3,global_tokens=2,max_distance=2", "window=2,global_tokens=3,max_distance=0"),
)
class Etc(nn.Module):
    """ETC: a long and a global input with relative positions.

    The sequence of n tokens is the concatenation of the paper's two inputs: the first g = ``global_tokens`` tokens are
    the global input, the others the long input. The output has the rows of both, as a layer in the paper has. (There
    are no projections here: global tokens that were parameters would be constants, with unused rows.) So
    g tokens of n are global; compare at equal n. A long token takes one softmax over all global tokens and the long
    tokens at most ``window`` away, r in the paper; a global token takes one over everything. A g above n counts as n.

    Logits are (q·k + q·a)/√D, where a comes from a learned table of each head. Within an input it has one entry for
    each distance j - i clipped to ± ``max_distance``, and it has one for all pairs of a long and a global token. Long
    rows and global rows have a table each, drawn from N(0, 0.02²). ``max_distance=0``: no tables; then it approximates
    softmax attention, and equals it once the window covers the long input. Both inputs share the projections of q, k
    and v.

    Differs from the authors' code: without the structure of a document, one label replaces those that tell whether a
    long token belongs to a global one, and no masks between the two inputs follow from it; the tables are drawn from a
    normal distribution that is not truncated.

    q, k, v: ``(B, H, N, D)`` -> ``(B, H, N, D)``, any N. Time N·(2·window + 64 + 2·g)·D.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        window: Annotated[int, Field(ge=1, description="long tokens seen on each side, the paper's radius")] = 84,
        global_tokens: Annotated[int, Field(ge=0, description="first tokens, which are the global input")] = 64,
        max_distance: Annotated[
            int, Field(ge=0, description="distances told apart by relative positions; 0: no relative positions")
        ] = 12,
        form: Form = "auto",
    ) -> None:
        super().__init__()
        self.window = window
        self.global_tokens = global_tokens
        self.max_distance = max_distance
        name = f"etc, window={window}, global_tokens={global_tokens}, max_distance={max_distance}"
        self.flex = FlexPattern(name, form)
        self.tables: nn.Parameter | None = None
        if max_distance:
            # Long rows, then global ones; distances -max_distance .. max_distance, then the other input.
            self.tables = nn.Parameter(torch.randn(2, shape.H, 2 * max_distance + 2, shape.D) * 0.02)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(q.shape[2], device=q.device)
        g, allowed = self.global_tokens, self._sees(i, j)
        allowed = allowed if key_mask is None else allowed & key_mask[:, None, None]
        logits = q @ k.mT
        if self.tables is not None:
            label = self._label(i, j)
            for rows, table in zip((i >= g, i < g), self.tables.to(q.dtype), strict=True):
                entry = table[:, label]  # (H, N, N, D)
                logits = logits + rows * (q[:, :, :, None] * entry).sum(-1)
        weights = (logits * q.shape[-1] ** -0.5).masked_fill(~allowed, float("-inf")).softmax(-1)
        return torch.matmul(weights.masked_fill(~allowed, 0), v)

    def _sees(self, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j).abs() <= self.window) | (i < self.global_tokens) | (j < self.global_tokens)

    def _label(self, i: Tensor, j: Tensor) -> Tensor:
        g, most = self.global_tokens, self.max_distance
        return torch.where((i < g) == (j < g), (j - i).clamp(-most, most) + most, 2 * most + 1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        seen, bias = partial(by_places, self._sees), None if self.tables is None else self._added
        return self.flex.attend(self._plain, seen, q, k, v, key_mask=key_mask, bias=bias)

    def _added(self, q: Tensor) -> tuple[Tensor, Mod]:
        """Each row's addition to the scores of each label ``(B, H, N, labels)``, and the function that adds it."""
        rows, label = self._of_labels(q.to(accumulator(q.dtype))), self._label
        return rows, lambda score, b, h, i, j: score + rows[b, h, i, label(i, j)]

    def _of_labels(self, x: Tensor) -> Tensor:
        assert self.tables is not None
        g = min(self.global_tokens, x.shape[2])
        of_long, of_global = (self.tables[:, : x.shape[1]].to(x.dtype) * x.shape[-1] ** -0.5).mT
        return torch.cat([x[:, :, :g] @ of_global, x[:, :, g:] @ of_long], 2)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        g = min(self.global_tokens, q.shape[2])
        if self.tables is None:
            return attend(q, k, v, around_global(q, g, self.window), key_mask=key_mask)
        # q enters two products: in this dtype its gradient is rounded once, after they are added.
        x = q.to(accumulator(q.dtype))
        labelled = self._of_labels(x)
        return attend(x, k, v, self._labelled(x, g), key_mask=key_mask, labelled=labelled).to(q.dtype)

    def _labelled(self, q: Tensor, g: int) -> Iterator[Tile]:
        known: dict[tuple[int, int, int], tuple[Label, ...]] = {}
        for tile in around_global(q, g, self.window):
            first = tile.keys[0]
            assert isinstance(first, Beside | Window)
            window = first.own if isinstance(first, Beside) else first.blocks
            start = tile.rows.start
            inside = (start, tile.rows.size, g) if start < g else (start - window.start, tile.rows.size, window.size)
            if inside not in known:
                known[inside] = tuple(self._distances(q, *inside))
            width = sum(keys.width for keys in tile.keys)
            outside = ((slice(inside[2], width), 2 * self.max_distance + 1),) if inside[2] < width else ()
            yield replace(tile, labels=(*known[inside], *outside))

    def _distances(self, q: Tensor, shift: int, rows: int, columns: int) -> Iterator[Label]:
        """Labels of ``columns`` keys in the rows' own input; the first row's token is ``shift`` after the first key."""
        most = self.max_distance
        # Beyond the distances told apart every row has the same label: only a band is looked up pair by pair.
        first = min(columns, max(0, shift - most + 1))
        last = min(columns, max(first, shift + rows - 1 + most))
        if first:
            yield slice(0, first), 0
        if first < last:
            i = torch.arange(shift, shift + rows, device=q.device)[:, None]
            yield slice(first, last), (torch.arange(first, last, device=q.device) - i).clamp(-most, most) + most
        if last < columns:
            yield slice(last, columns), 2 * most
