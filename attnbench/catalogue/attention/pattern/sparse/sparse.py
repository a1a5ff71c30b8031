"""Sparse Transformer attention: strided and fixed factorised patterns, merged in one softmax or head by head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.catalogue.attention.pattern.local import Local
from attnbench.catalogue.attention.pattern.sparse.fixed import Fixed, SummaryTokens
from attnbench.catalogue.attention.pattern.sparse.strided import Stride, Strided
from attnbench.catalogue.engines.decoding import kv_cache
from attnbench.catalogue.engines.flex.block_mask import by_places
from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, FlexPattern, Form
from attnbench.catalogue.engines.head_groups import HeadGroups
from attnbench.catalogue.engines.patterns.pattern_softmax import attend
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.position_bias import position_bias
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, Needs, No, Traits, register
from attnbench.errors import UsageError

_SUMMARISED = Needs("pattern=fixed or pattern=summary")


@register(
    "sparse",
    family="fixed pattern",
    source="Child et al. 2019, arXiv:1904.10509, sections 4.3 and 5.1",
    formula="softmax over A¹ ∪ A²; strided: i - l ≤ j ≤ i, or l | i - j; fixed: own block, or j mod l ≥ l - c",
    cost="O(n·√n·d)",
    memory_exponent=1.5,
    traits=Traits(
        cross=No("both patterns need queries and keys at the same positions"),
        decode=True,
        bias=True,
        exact_with=("length={n}", "pattern=fixed,length={n},summary=1", "pattern=stride,length=1"),
        given=(
            ("causal=false", {"own_form": "the mask is symmetrised; the paper's patterns are causal"}),
            ("pattern=fixed", {"knob": Knob("summary")}),
            ("pattern=summary", {"knob": Knob("summary")}),
            COMPILED,
        ),
    ),
    settings=(
        "length=4",
        "pattern=fixed,length=4,summary=1",
        "pattern=stride,length=4",
        "pattern=summary,length=5,summary=2",
        "length=4,heads=split",
        "pattern=fixed,length=4,summary=2,heads=split",
    ),
)
class Sparse(nn.Module):
    """Sparse Transformer: a local part and a strided or summary part.

    With l = ``length`` (about √n) and j <= i throughout:

    - ``pattern=strided``: A¹ = {i - l .. i}, A² = {j : (i - j) mod l = 0};
    - ``pattern=fixed``: A¹ = {j : ⌊j / l⌋ = ⌊i / l⌋}, A² = {j : j mod l >= l - c}, c = ``summary``;
    - ``pattern=stride``, ``pattern=summary``: only A² of strided, or of fixed. Tokens i < l - c, for which the latter
      is empty, see themselves.

    ``heads=merged``: every head takes one softmax over the union; a key that lies in both parts counts once.
    ``heads=split``: the first half of the heads (the larger one if their number is odd) takes A¹, the others A². The
    patterns are causal by definition. Without ``causal`` the mask is symmetrised: i and j see each other where the
    later of them sees the earlier. With ``pattern=fixed``, summary tokens then see all that follows; outside their
    block, the others see only the summaries before it.

    q, k, v: ``(B, H, N, D)`` -> ``(B, H, N, D)``, any N. Time N·√N·D, or N·(l + c·N / l)·D. The paper's memory is
    that of its N·√N scores; here they exist for one tile at a time, forward and backward, which is O(N). (Strided, not
    causal and N not a multiple of l: k and v are copied to pad them.) Decoding keeps every key with ``strided`` and
    ``stride``, which see it again l tokens later, else one block and the summaries.

    Differs from the authors' code: there the strided window is l wide including i, here l + 1 as in the paper; the form
    that is not causal is this project's. The paper takes c of 8, 16 or 32 with l of 128 or 256.

    Raises:
        UsageError: ``summary`` above ``length``; ``heads=split`` with a single part.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        pattern: Annotated[
            Literal["strided", "fixed", "stride", "summary"],
            Field(description="pattern of both parts, or stride, summary: the second part alone"),
        ] = "strided",
        length: Annotated[int | None, Field(ge=1, description="stride or block length l; none: √N")] = None,
        summary: Annotated[int, Field(ge=1, description="tokens c per block that later blocks see"), _SUMMARISED] = 8,
        heads: Annotated[
            Literal["merged", "split"],
            Field(description="merged: every head takes both parts; split: half the heads each"),
        ] = "merged",
        form: Form = "auto",
    ) -> None:
        super().__init__()
        strided = pattern in ("strided", "stride")
        if length is not None and not strided and summary > length:
            raise UsageError(f"sparse: summary={summary} does not fit into blocks of length={length}")
        if heads == "split" and pattern in ("stride", "summary"):
            raise UsageError(f"sparse: pattern={pattern} is one part, which heads=split cannot divide")
        self.causal, self.tokens, self.position_bias = shape.causal, shape.N, position_bias(shape)
        self.length = length or max(1, isqrt(shape.N))
        summary = min(summary, self.length)
        self.pattern: Strided | Fixed = Strided(self.length) if strided else Fixed(self.length, summary)
        self.far: Stride | SummaryTokens = Stride(self.length) if strided else SummaryTokens(self.length, summary)
        if pattern in ("stride", "summary"):
            self.pattern = self.far
        self.flex = FlexPattern(f"sparse, {pattern}, length={self.length}, {summary}, causal={shape.causal}", form)
        self.groups: HeadGroups | None = None
        if heads == "split":
            sizes = [size for size in (shape.H - shape.H // 2, shape.H // 2) if size]
            first, *others = (replace(shape, heads=size) for size in sizes)
            of_near: dict[str, Any] = {"window" if strided else "block": self.length}
            near = Local(first, form=form, **of_near)
            alone: dict[str, Any] = {"pattern": "stride"} if strided else {"pattern": "summary", "summary": summary}
            alone["form"] = form
            self.groups = HeadGroups([near, *(Sparse(one, length=self.length, **alone) for one in others)], sizes)
            if self.position_bias is not None:
                self.groups.share(self.position_bias)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        n = q.shape[2]
        i, j = torch.arange(n, device=q.device)[:, None], torch.arange(n, device=q.device)
        if self.groups is None:
            allowed = self.pattern.sees(i, j)
        else:
            first = torch.arange(q.shape[1], device=q.device)[:, None, None] < self.groups.heads[0]
            allowed = torch.where(first, self.pattern.near(i, j), self.far.sees(i, j))
        allowed = allowed & (j <= i)
        if not self.causal:
            allowed = allowed | allowed.mT
        allowed = allowed if key_mask is None else allowed & key_mask[:, None, None]
        whole, bias = slice(0, n), self.position_bias
        return masked_attention(q, k, v, allowed, None if bias is None else bias(whole, whole, q.dtype))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if self.groups is not None:
            out: Tensor = self.groups(q, k, v, key_mask=key_mask)
            return out
        seen, bias = partial(by_places, self._sees), self.position_bias
        return self.flex.attend(self._plain, seen, q, k, v, key_mask=key_mask, bias=bias)

    def _sees(self, i: Tensor, j: Tensor) -> Tensor:
        if self.causal:
            return self.pattern.sees(i, j) & (j <= i)
        return self.pattern.sees(torch.maximum(i, j), torch.minimum(i, j))

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        if missing := self.pattern.padding(q.shape[2], self.causal):
            k, v = pad(k, (0, 0, 0, missing)), pad(v, (0, 0, 0, missing))
            key_mask = None if key_mask is None else pad(key_mask, (0, missing))
        tiles = self.pattern.tiles(q, self.causal)
        return attend(q, k, v, tiles, key_mask=key_mask, position_bias=self.position_bias)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        """The state after q, k, v ``(B, H, n, D)``: a Cache, Summaries, or a state for each half of the heads."""
        return self.pattern.begin(k, v, self.tokens) if self.groups is None else self.groups.begin(q, k, v)

    def step(self, state: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        if self.groups is not None:
            return self.groups.step(state, q, k, v)
        keys, values, new = self.pattern.step(state, k, v)
        added = None
        if self.position_bias is not None:
            position = torch.arange(state.length + 1, device=q.device)
            seen = self.pattern.sees(position[-1:], position).nonzero()[:, 0]
            added = self.position_bias.along(seen - state.length, accumulator(q.dtype))[:, None]
        return kv_cache.attend(q, keys, values, added), new
