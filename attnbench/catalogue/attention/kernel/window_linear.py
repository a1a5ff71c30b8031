"""Softmax over a window and linear attention to everything outside of it, in one head and under one normaliser."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.catalogue.engines.linear.maps import Map, elu_plus_one, exponential_series, spiky
from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.recurrent.decayed_sums import Chunk, states_before
from attnbench.catalogue.engines.recurrent.feature_sums import quotient, with_ones
from attnbench.catalogue.engines.recurrent.stretches import STRETCH, by_heads, chunked, in_turn, rows_in_turn
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register

_MAPS: dict[str, Map] = {"hedgehog": spiky, "taylor": exponential_series, "elu+1": elu_plus_one}


class WindowState(NamedTuple):
    """The state of decoding: the sums of keys beyond the window, and the window's tokens."""

    sums: Tensor
    """Σ φ(k_j) (v_j, 1)ᵀ, ``(B, H, R, D + 1)``, float32 at least."""
    k: Tensor
    """``(B, H, window, D)``, fewer at first."""
    v: Tensor


@register(
    "window-linear",
    family="kernel",
    source="Zhang et al. 2024, arXiv:2410.10254, section 3; Arora et al. 2024, arXiv:2402.18668",
    formula="oᵢ = (Σ_{j∈Wᵢ} γe^(lᵢⱼ-mᵢ) vⱼ + Σ_{j∉Wᵢ} φ(qᵢ)·φ(kⱼ) vⱼ) / (the same sums of 1), mᵢ = max lᵢⱼ in Wᵢ",
    cost="O(n·(w+R)·d)",
    memory_exponent=1.0,
    traits=Traits(
        meets="chosen keys",
        target="learned",
        cross=No("the window needs queries and keys at the same positions"),
        decode=True,
        bias=No("outside of the window no weight of a pair is ever formed"),
        exact_with=("window={n}",),
        knob=Knob("window"),
        given=(("features=taylor", {"target": "softmax"}), ("features=elu+1", {"target": "other"})),
    ),
    settings=("window=3,chunk=5", "window=4,features=taylor,chunk=3", "window=2,features=elu+1,chunk=7"),
)
class WindowLinear(nn.Module):
    """Softmax in a window, linear attention outside, one normaliser.

    Each query weighs the keys near it by exponentials and all others by products of features, and divides by the sum of
    both: one head that is local and global. q, k, v ``(B, H, N, D)`` -> ``(B, H, N, D)``. The window is
    |i - j| <= ``window``, or the window + 1 keys up to i if causal, and fewer where it holds padding. With l = q·k/√D:

    - ``features=hedgehog``, after Zhang et al. 2024, "LoLCATs: On Low-Rank Linearizing of Large Language Models":
      φ(x) = softmax([Wx, -Wx]) with one D × D matrix W for the queries and one for the keys of each head, the identity
      at first; a key in the window weighs γ·exp(l - m), m the largest l in the window, γ learned for each head, 1 at
      first. The learned part is meant to be fitted to softmax attention.
    - ``features=taylor``, after Arora et al. 2024, Based: φ(q)·φ(k) = 1 + l + l²/2; a key in the window weighs exp(l),
      of which that is the series. 1 + D + D² features.
    - ``features=elu+1``: φ = elu + 1 on q and k as they are; a key in the window weighs exp(l).

    Computed in chunks: a chunk of queries forms the pairs with its own keys and those within reach, and reads all
    others from one sum on either side. Nothing is subtracted from a sum, so that no digits are lost. Time and memory
    are O(n), forward and backward. Decoding keeps the window's keys and values, and one sum.

    Differs from the papers: ``window`` counts the keys besides the query's own; there is a bidirectional form; Based
    has its window and its linear attention in layers of their own, and projects q and k to 16 channels.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        window: Annotated[int, Field(ge=0, description="tokens on each side under the softmax; causal: before")] = 64,
        features: Annotated[
            Literal["hedgehog", "taylor", "elu+1"], Field(description="feature map outside of the window")
        ] = "hedgehog",
        chunk: Chunk = 64,
    ) -> None:
        super().__init__()
        H, D = shape.H, shape.D
        self.causal, self.window, self.chunk = shape.causal, window, chunk
        self.learned, self.map = features == "hedgehog", _MAPS[features]
        self.series = features == "taylor"
        if self.learned:
            self.W_q = nn.Parameter(torch.eye(D).repeat(H, 1, 1))
            self.W_k = nn.Parameter(torch.eye(D).repeat(H, 1, 1))
            self.log_gamma = nn.Parameter(torch.zeros(H))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        i = torch.arange(q.shape[2], device=q.device)
        visible = visible_pairs(q, k, self.causal, key_mask)
        near = visible & ((i[:, None] - i).abs() <= self.window)
        logits = q @ k.mT / q.shape[-1] ** 0.5
        if self.learned:
            u_q, u_k = (torch.einsum("hed,bhnd->bhne", W, x) for W, x in ((self.W_q, q), (self.W_k, k)))
            phi_q, phi_k = (torch.cat([u, -u], -1).softmax(-1) for u in (u_q, u_k))
            far_weights = phi_q @ phi_k.mT
            largest = logits.masked_fill(~near, -torch.inf).amax(-1, keepdim=True)
            shift = largest.masked_fill(largest == -torch.inf, 0.0) - self.log_gamma[:, None, None]
        elif self.series:
            far_weights, shift = 1 + logits + logits.square() / 2, torch.zeros_like(logits[..., :1])
        else:
            phi_q, phi_k = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (q, k))
            far_weights, shift = phi_q @ phi_k.mT, torch.zeros_like(logits[..., :1])
        weights = torch.where(near, (logits - shift).masked_fill(~near, 0.0).exp(), far_weights) * visible
        total = weights.sum(-1, keepdim=True)
        return weights @ v / total.masked_fill(total == 0, 1.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        dtype, out = accumulator(q.dtype), q.dtype
        q, k, v = (x.to(dtype) for x in (q, k, v))
        given: tuple[Tensor, ...] = (q, k, with_ones(v, key_mask))
        if self.learned:
            gamma = self.log_gamma.to(dtype)[None, :, None].expand(q.shape[0], -1, 1)
            given = (*given, *self._projected(q, k), gamma)
        layout = _WindowChunks(self.map, self.causal, self.window, 0 if self.causal else self.window, self.chunk)
        return quotient(by_heads(partial(_attend, layout=layout), *given)).to(out)

    def _projected(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not self.learned:
            return q, k
        return q @ self.W_q.to(q.dtype).mT, k @ self.W_k.to(k.dtype).mT

    @torch.no_grad()
    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> WindowState:
        dtype, old = accumulator(k.dtype), max(0, k.shape[2] - self.window)
        sums = self._added(*(x[:, :, :old].to(dtype) for x in (k, v)))
        return WindowState(sums, k[:, :, old:].clone(), v[:, :, old:].clone())

    def _added(self, k: Tensor, v: Tensor) -> Tensor:
        return self.map(self._projected(k, k)[1]).mT @ with_ones(v)

    @torch.no_grad()
    def step(self, state: WindowState, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, WindowState]:
        sums, k, v = state.sums, torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
        query, keys, values = (x.to(sums.dtype) for x in (q, k, v))
        logits = (query * q.shape[-1] ** -0.5) @ keys.mT
        phi = self.map(self._projected(query, query)[0])
        gamma = self.log_gamma.to(sums.dtype)[:, None, None] if self.learned else None
        out = quotient(_joined(logits, with_ones(values), phi @ sums, gamma))
        if k.shape[2] > self.window:
            sums = sums + self._added(keys[:, :, :1], values[:, :, :1])
            k, v = k[:, :, 1:], v[:, :, 1:]
        return out.to(q.dtype), WindowState(sums, k, v)


class _WindowChunks(NamedTuple):
    """A cut of a sequence: queries in chunks, each with its own keys and those in reach on either side."""

    map: Map
    causal: bool
    before: int
    after: int
    chunk: int


def _attend(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor, layout: _WindowChunks) -> Tensor:
    """Numerators and denominators ``(G, N, E)``, up to a factor of each row, for inputs ``(G, N, D)``, v ``(G, N, E)``.

    ``learned``: the features' inputs, if not q and k, and log γ ``(G, 1)``; nothing for exp(l) itself.
    """
    N = q.shape[1]
    layout = layout._replace(chunk=min(layout.chunk, N), before=min(layout.before, N), after=min(layout.after, N))
    u_q, u_k, *gamma = learned or (q, k)
    parts = list(_parts(layout, (q * q.shape[-1] ** -0.5, u_q), (k, u_k, v)))
    coming: list[Tensor | None] = [None] * len(parts)
    if not layout.causal:
        later = partial(_after, layout=layout)
        coming[::-1], _ = in_turn(later, [(u, values) for _, _, _, u, values in parts][::-1])
    read = partial(_read, layout=layout, gamma=gamma[0][..., None, None] if gamma else None)
    return rows_in_turn(read, [(*part, more) for part, more in zip(parts, coming, strict=True)], N)[0]


def _parts(
    layout: _WindowChunks, of_queries: tuple[Tensor, ...], of_keys: tuple[Tensor, ...]
) -> Iterator[tuple[Tensor, ...]]:
    """Stretches of the sequence: queries ``(G, chunks, c, ·)``, and keys with those in reach on either side."""
    N, c = of_queries[0].shape[1], layout.chunk
    end, step = -(-N // c) * c, c * max(1, STRETCH // c)
    padded = [pad(x, (0, 0, layout.before, end - N + layout.after)) for x in of_keys]
    for start in range(0, N, step):
        stop = min(start + step, end)
        own = (chunked(x[:, start:stop], c) for x in of_queries)
        yield (*own, *(x[:, start : stop + layout.before + layout.after] for x in padded))


def _after(state: Tensor | None, u: Tensor, v: Tensor, *, layout: _WindowChunks) -> tuple[Tensor, Tensor]:
    """For each chunk, the sum of all keys behind its reach, ``(G, chunks, R, E)``, and the sum of all of these."""
    reach = layout.before + layout.after
    phi, values = (torch.unflatten(x[:, reach:], 1, (-1, layout.chunk)) for x in (layout.map(u), v))
    states, state = states_before((phi.mT @ values).flip(1), values.new_ones(1, 1, 1, 1), state)
    return states.flip(1), state


def _read(
    state: Tensor | None,
    q: Tensor,
    u_q: Tensor,
    k: Tensor,
    u_k: Tensor,
    v: Tensor,
    later: Tensor | None,
    *,
    layout: _WindowChunks,
    gamma: Tensor | None,
) -> tuple[Tensor, Tensor]:
    c, before, after = layout.chunk, layout.before, layout.after
    keys, phi_k, values = (x.unfold(1, c + before + after, c).mT for x in (k, layout.map(u_k), v))
    phi_q = layout.map(u_q)
    # The first keys of a chunk are beyond the reach of the next one.
    past, state = states_before(phi_k[:, :, :c].mT @ values[:, :, :c], v.new_ones(1, 1, 1, 1), state)
    apart = torch.arange(c + before + after, device=q.device) - before - torch.arange(c, device=q.device)[:, None]
    near, far = (apart >= -before) & (apart <= after), apart < -before
    if not layout.causal:
        far = far | (apart > after)
    real = values[..., -1] > 0
    logits = (q @ keys.mT).masked_fill(~(near & real[:, :, None]), -torch.inf)
    sums = phi_q @ past + (phi_q @ phi_k.mT).masked_fill(~far, 0.0) @ values
    if later is not None:
        sums = sums + phi_q @ later
    return _joined(logits, values, sums, gamma).flatten(1, 2), state


def _joined(logits: Tensor, values: Tensor, far: Tensor, gamma: Tensor | None) -> Tensor:
    """Sums over the window and over the rest, up to a factor of each row.

    Args:
        logits: of the window, -inf for keys outside; values: those that they weigh, ``(..., E)``.
        far: the sums over the rest, ``(..., E)``, the last column those of 1.
        gamma: log γ, if the window's weights are relative to the largest; None if they are exp(l).
    """
    top = logits.amax(-1, keepdim=True)
    if gamma is not None:
        return (logits - top.masked_fill(top == -torch.inf, 0.0) + gamma).exp() @ values + far
    # Relative to the larger of both, so that neither overflows, and no row underflows as a whole.
    rest = far[..., -1:].detach().clamp(min=0.0)
    level = torch.maximum(top.detach(), rest.log())
    level = level.masked_fill(level == -torch.inf, 0.0)
    # Beside a rest, both are then relative to at least e^-80: the rest's factor is finite, and that of the window too.
    level = torch.where(rest > 0, level.clamp(min=-80.0), level)
    share = torch.where(rest > 0, (-level).exp(), 0.0)
    return (logits - level).exp() @ values + far * share
