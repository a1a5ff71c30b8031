"""Longformer attention: a sliding (dilated) window and global tokens."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.flex.block_mask import by_places
from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, FlexPattern, Form
from attnbench.catalogue.engines.patterns.bands import around_global
from attnbench.catalogue.engines.patterns.pattern_softmax import attend
from attnbench.contract.problem.position_bias import position_bias
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.sink import sink_of
from attnbench.contract.variant import Knob, No, Traits, register
from attnbench.errors import Unsupported

_ONE_WIDTH = "own projections map values to themselves, head by head, as wide as keys"


@register(
    "longformer",
    family="fixed pattern",
    also=("memory",),
    source="Beltagy et al. 2020, arXiv:2004.05150, section 3.1",
    formula="softmax over {j : |i - j| ∈ {0, δ, …, w·δ}} ∪ {0 … g - 1}; the g global rows over all j",
    cost="O(n·(w + g)·d)",
    memory_exponent=1.0,
    fused="flex:window={window},global_tokens={global_tokens}",
    traits=Traits(
        causal=No("global tokens see the whole sequence, and every token sees them"),
        cross=No("the window needs queries and keys at the same positions"),
        bias=True,
        sink=True,
        exact_with=("window={n}", "window={n},global_tokens=0", "window=1,global_tokens={n}"),
        knob=Knob("window"),
        given=(("projections=own", {"v_dim": No(_ONE_WIDTH)}), COMPILED),
    ),
    settings=("window=2,global_tokens=2", "window=1,dilation=2,projections=own"),
)
class Longformer(nn.Module):
    """Longformer: sliding window and global tokens.

    The first g = ``global_tokens`` tokens see every token and are seen by every token. Any other token i takes one
    softmax over these g and its window: i ± t·δ for t = 0 .. ``window``, δ = ``dilation``; a global token inside the
    window counts once. ``window`` is one-sided: the paper's window of 512 is 256 here, the default. It counts places,
    padded ones too: one that holds padding has fewer keys.

    The paper gives global rows projections of their own. Here q, k, v come projected, so ``projections=own`` applies
    learned (D, D) maps per head to q, k, v where they serve the global rows. They start as the identity, as the paper
    initialises its own from the local ones. All heads have the same window and dilation.

    Differs from the authors' code: global rows share the projections of the others unless asked for; ``window`` counts
    one side, not both; N need not be a multiple of it. Their form in chunks has no dilation, and adds -10000 to the
    logits of keys that are left out here.

    q, k, v: ``(B, H, N, D)`` -> ``(B, H, N, D)``, any N. Time N·(2·window + 64 + 2·g)·D,
    without global tokens that of :class:`~attnbench.catalogue.attention.pattern.local.Local`.

    Raises:
        Unsupported: with ``projections=own``, values that are wider or narrower than keys.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        window: Annotated[int, Field(ge=1, description="tokens seen on each side")] = 256,
        global_tokens: Annotated[int, Field(ge=0, description="first tokens that are global")] = 1,
        dilation: Annotated[int, Field(ge=1, description="distance between the window's tokens")] = 1,
        projections: Annotated[
            Literal["tied", "own"],
            Field(description="tied: global rows take q, k, v as they are; own: learned maps of them"),
        ] = "tied",
        form: Form = "auto",
    ) -> None:
        super().__init__()
        self.window = window
        self.global_tokens = global_tokens
        self.dilation = dilation
        self.flex = FlexPattern(f"longformer, window={window}*{dilation}, global_tokens={global_tokens}", form)
        self.position_bias, self.sink = position_bias(shape), sink_of(shape)
        self.maps: nn.ParameterList | None = None
        if projections == "own":
            if shape.E != shape.D:
                raise Unsupported(_ONE_WIDTH)
            identity = torch.eye(shape.D).expand(shape.H, -1, -1)
            self.maps = nn.ParameterList(nn.Parameter(identity.clone()) for _ in "qkv")

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(q.shape[2], device=q.device)
        allowed = self._sees(i, j)
        allowed = allowed if key_mask is None else allowed & key_mask[:, None, None]
        n, bias = q.shape[2], self.position_bias
        added = None if bias is None else bias(slice(0, n), slice(0, n), q.dtype)
        sink = None if self.sink is None else self.sink.logit
        out = masked_attention(q, k, v, allowed, added, sink)
        if self.maps is None:
            return out
        q, k, v = (x @ m.to(x.dtype) for x, m in zip((q, k, v), self.maps, strict=True))
        return torch.where(i < self.global_tokens, masked_attention(q, k, v, allowed, added, sink), out)

    def _sees(self, i: Tensor, j: Tensor) -> Tensor:
        near = ((i - j).abs() <= self.window * self.dilation) & ((i - j) % self.dilation == 0)
        return near | (i < self.global_tokens) | (j < self.global_tokens)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        g = min(self.global_tokens, q.shape[2])
        if self.maps is None or g == 0:
            return self._attend(q, k, v, key_mask)
        map_q, map_k, map_v = (m.to(q.dtype) for m in self.maps)
        # (q Wq)(k Wk)ᵀ = (q Wq Wkᵀ) kᵀ and P (v Wv) = (P v) Wv: only the g rows are mapped, never all keys.
        q = torch.cat([q[:, :, :g] @ map_q @ map_k.transpose(1, 2), q[:, :, g:]], 2)
        out = self._attend(q, k, v, key_mask)
        return torch.cat([out[:, :, :g] @ map_v, out[:, :, g:]], 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        seen, bias, sink = partial(by_places, self._sees), self.position_bias, self.sink
        return self.flex.attend(self._plain, seen, q, k, v, key_mask=key_mask, bias=bias, sink=sink)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        tiles = around_global(q, min(self.global_tokens, q.shape[2]), self.window, self.dilation)
        return attend(q, k, v, tiles, key_mask=key_mask, position_bias=self.position_bias, sink=self.sink)
