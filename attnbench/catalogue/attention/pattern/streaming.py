"""StreamingLLM: the first tokens and the last ones, at the places that they have in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding import kv_cache
from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.decoding.ring import Ring
from attnbench.catalogue.engines.flex.block_mask import by_places
from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, FlexPattern, Form
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.patterns.bands import with_first
from attnbench.catalogue.engines.patterns.pattern_softmax import attend
from attnbench.catalogue.engines.patterns.rule import Rule
from attnbench.catalogue.engines.patterns.tiles import Tile
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.rotation import angles, rotate
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register
from attnbench.errors import Unsupported


class Streamed(NamedTuple):
    """The state of decoding: keys, turned by their places in the text if at all, and values."""

    first: Cache
    recent: Ring


@register(
    "streaming",
    family="fixed pattern",
    source="Xiao et al. 2023, arXiv:2309.17453, section 3.2",
    formula="softmax over {j <= i : j < a or i - j < w}; places in the cache: j, and min(i, a + w - 1) for i if j < a",
    cost="O(n·(a + w)·d)",
    memory_exponent=1.0,
    traits=Traits(
        cross=No("the window needs queries and keys at the same positions"),
        decode=True,
        bias=No("a bias counts places in the text, and a token of the cache has another place there"),
        exact_with=("window={n}", "window=1,sinks={n}"),
        knob=Knob("window"),
        own_form_both_ways="the window lies on both sides of a token; the paper is causal",
        given=(("rotary=true", {"target": "other"}), COMPILED),
    ),
    settings=("window=3,sinks=2", "window=4,sinks=3,rotary=true", "window=2,sinks=0"),
)
class Streaming(nn.Module):
    """StreamingLLM: a few first tokens and a window, in a bounded cache.

    Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks". Token i sees the first a = ``sinks``
    tokens and the last w = ``window`` ones, itself among them. Trained models give the first tokens much weight,
    whatever they say; without them a window fails as soon as it leaves the start. Here it is a softmax over these a + w
    keys, by default 256 in all. q, k, v ``(B, H, N, D)`` -> ``(B, H, N, D)``, any N.

    ``rotary=true`` turns q and k by their places in the cache, not in the text: however long the text is, the query
    stands at most a + w - 1 places after the first token, as in training. Within the window both ways of counting give
    the same distance; to a first token the distance stops growing when the window leaves it. It is then no longer an
    approximation of softmax attention of the same q and k. In a model with rotary positions of its own, q and k come
    turned by their places in the text, which the paper finds to fail on long texts; leave those out and set ``rotary``.

    Scores exist for one tile at a time, forward and backward: time N·(a + w + 64)·D, and O(N) memory. Decoding keeps
    a + w keys and values, however many tokens come.

    First tokens and window count places, padded ones too: padding among them leaves fewer keys. Not causal: token i
    sees the window's tokens after it as well, |i - j| < w.

    Differs from the authors' code: whole sequences are computed at once, with the pattern and the places that decoding
    token by token would give them (there prompts are read by full attention); keys are kept turned by their places in
    the text, and the excess is taken off the first ones in each step.

    Raises:
        Unsupported: ``rotary`` with an odd D, or with ``form=flex``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        window: Annotated[int, Field(ge=1, description="last tokens seen, w, the token itself included")] = 252,
        sinks: Annotated[int, Field(ge=0, description="first tokens that are always seen, a")] = 4,
        rotary: Annotated[bool, Field(description="turn q and k by their places in the cache")] = False,
        form: Form = "auto",
    ) -> None:
        super().__init__()
        if rotary and shape.D % 2:
            raise Unsupported(f"rotary pairs the channels: head_dim {shape.D} must be even")
        self.causal, self.window, self.sinks, self.rotary, self.room = shape.causal, window, sinks, rotary, shape.N
        name = f"streaming, window={window}, sinks={sinks}, causal={shape.causal}"
        self.flex = FlexPattern(name, form, fits=not rotary)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(q.shape[2], device=q.device)
        a, w, allowed = self.sinks, self.window, self._sees(i, j)
        allowed = allowed if key_mask is None else allowed & key_mask[:, None, None]
        if not self.rotary:
            return masked_attention(q, k, v, allowed)
        D = q.shape[3]
        theta = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64, device=q.device) / D)
        apart = (torch.where(j < a, i.clamp(max=a + w - 1), i) - j)[..., None] * theta
        x, y = (torch.complex(*part.double().chunk(2, -1)) for part in (q, k))
        turned = torch.einsum("bhic,bhjc,ijc->bhij", x, y.conj(), torch.polar(torch.ones_like(apart), apart)).real
        logits: Tensor = (turned * D**-0.5).masked_fill(~allowed, torch.finfo(torch.float64).min)
        return (logits.softmax(-1).masked_fill(~allowed, 0.0) @ v.double()).to(v.dtype)

    def _sees(self, i: Tensor, j: Tensor) -> Tensor:
        near = (j < self.sinks) | ((i - j).abs() < self.window)
        return near & (j <= i) if self.causal else near

    def pairs_by_place(self, keys: int, device: torch.device) -> Rule | None:
        """The pairs that count; None if turned q and k decide their weights."""
        return None if self.rotary else Rule(self._sees, keys, device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return self.flex.attend(self._plain, partial(by_places, self._sees), q, k, v, key_mask=key_mask)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        n = q.shape[2]
        a = min(self.sinks, n)
        tiles = with_first(q, a, self.window - 1, causal=self.causal)
        if not self.rotary:
            return attend(q, k, v, tiles, key_mask=key_mask)
        k, v = emptied(key_mask, k, v)  # before padded keys enter products
        dtype = accumulator(q.dtype)
        x, y = q.to(dtype), k.to(dtype)
        cos, sin = angles(0, n, x)
        y = rotate(y, cos, sin)
        if a == 0:
            return attend(rotate(x, cos, sin), y, v.to(dtype), tiles, key_mask=key_mask).to(q.dtype)
        # The logits of the first keys come from queries at other places: the tiles add them where the key is 0.
        place = torch.arange(n, device=q.device).clamp(max=a + self.window - 1)
        scale = float(q.shape[3] ** -0.5)
        to_first = (rotate(x, cos[place], sin[place]) * scale) @ y[:, :, :a].mT
        y = torch.cat((torch.zeros_like(y[:, :, :a]), y[:, :, a:]), 2)
        labelled = _labelled(tiles, a, q.device)
        out = attend(rotate(x, cos, sin), y, v.to(dtype), labelled, key_mask=key_mask, labelled=to_first)
        return out.to(q.dtype)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Streamed:
        k = self._turned(k, 0)
        first = Cache.of(k[:, :, : self.sinks], v[:, :, : self.sinks], self.sinks)
        return Streamed(first, Ring.of(k[:, :, self.sinks :], v[:, :, self.sinks :], self.window, self.room))

    def step(self, state: Streamed, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Streamed]:
        first, recent = state
        place = first.length + recent.length
        q, k = self._turned(q, place), self._turned(k, place)
        if first.length < self.sinks:
            first = first.append(k, v)
        else:
            recent = recent.append(k, v)
        left = max(0, place - (self.sinks + self.window - 1))  # the difference between the counts of text and cache
        keys = torch.cat((self._turned(first.keys, left, alike=True), recent.keys), 2)
        values = torch.cat((first.values, recent.values), 2)
        return kv_cache.attend(q, keys, values), Streamed(first, recent)

    def _turned(self, x: Tensor, start: int, *, alike: bool = False) -> Tensor:
        """x ``(B, H, n, D)`` turned by the places from ``start`` on, or all of it by that one."""
        if not self.rotary:
            return x
        like = x.to(accumulator(x.dtype))
        return rotate(like, *angles(start, 1 if alike else x.shape[2], like)).to(x.dtype)


def _labelled(tiles: Iterator[Tile], a: int, device: torch.device) -> Iterator[Tile]:
    """The tiles, in which each of the first ``a`` keys has its own label: that of its place."""
    for tile in tiles:
        width = sum(keys.width for keys in tile.keys)
        start = 0 if tile.rows.start < a else width - a  # rows of first tokens have them in front, others behind
        count = min(a, width)
        label = torch.arange(count, device=device).expand(tile.rows.size, -1)
        yield replace(tile, labels=((slice(start, start + count), label),))
