"""Latents: a few learned queries pack the keys, and the queries attend to the packed ones."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attnbench.catalogue.engines.masks import emptied, seeing
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.tiling import recomputed
from attnbench.contract.compiled import foreseen
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, Traits, register

_CHUNK = 64
"""Tokens of causal attention taken at a time: products of this size still keep the multipliers of a CPU busy."""

_RISE = 60.0
"""Rise of a latent's logits within a chunk up to which all weights there may be relative to the largest logit."""

_SEGMENT = 1024
"""Tokens whose gradients are computed at a time, after a second forward pass over them."""


class Packed(NamedTuple):
    """The latents' sums of exp(logit - top), of that times k, and of that times v."""

    top: Tensor
    """``(B, H, R, 1)``, the largest logit so far."""
    total: Tensor
    """``(B, H, R, 1)``."""
    k: Tensor
    """``(B, H, R, D)``."""
    v: Tensor

    def rescaled(self, logits: Tensor) -> tuple[Packed, Tensor]:
        """These sums, and the weights of T more tokens of ``logits`` ``(B, H, T, R)``, relative to the new ``top``."""
        top = torch.maximum(self.top, logits.detach().amax(2)[..., None])
        old, w = (self.top - top).exp(), (logits - top.mT).exp()
        return Packed(top, self.total * old, self.k * old, self.v * old), w

    def add(self, w: Tensor, k: Tensor, v: Tensor) -> Packed:
        """These sums with T more tokens, k and v ``(B, H, T, D)``, of weights ``(B, H, T, R)`` relative to ``top``."""
        total = self.total + w.sum(2)[..., None]
        return Packed(self.top, total, self.k + torch.matmul(w.mT, k), self.v + torch.matmul(w.mT, v))


@register(
    "perceiver",
    family="memory",
    source="Jaegle et al. 2021, arXiv:2103.03206, section 3.1; Ma et al. 2021 (LUNA), arXiv:2106.01540, section 3.1",
    formula="softmax(Q·(W·K)ᵀ/√D)·(W·V),  W = softmax(L·Kᵀ/√D),  L ∈ ℝ^(R×D) learned",
    cost="O(n·R·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="learned",
        stochastic=True,
        decode=True,
        permutable=True,
        knob=Knob("latents"),
        own_form="packs keys and values with the same weights and unpacks them at once; Perceiver goes on from the "
        "latents, and LUNA hands them to the next layer",
    ),
    settings=("latents=4",),
)
class Perceiver(nn.Module):
    """Learned latents attend to all tokens, and all tokens to them.

    The cross-attention of learned latents to a long input is that of Jaegle et al. 2021, "Perceiver"; attending back
    from the input is LUNA's pack and unpack (Ma et al. 2021). q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` ->
    ``(B, H, N, D)``. Every head has R latents of its own, drawn from N(0, 1). They are queries to k and pack keys and
    values with the same weights, so that R averages of keys stand for all M. Both softmaxes have the scale 1/√D.

    Causal: query i attends to latents that have packed the keys 0 .. i. Running sums take 64 tokens at a time, with
    weights relative to the largest logit of each latent so far. Where a latent's logits rise by more than 60 within the
    64, the weights of earlier tokens could underflow. These 64 are then taken pair by pair, each relative to the sum up
    to its query: with as many digits, but about twenty times slower. Padding before a real token among the 64 counts as
    such a rise.

    Differs from the papers: packed keys and values are averages of k and of v, there are no layers between packing and
    unpacking, and the latents are not passed to the next layer. LUNA's causal form packs with an activation other than
    softmax.
    """

    def __init__(
        self, shape: Shape, *, latents: Annotated[int, Field(ge=1, description="learned latents R of each head")] = 64
    ) -> None:
        super().__init__()
        self.causal = shape.causal
        self.latents = nn.Parameter(torch.randn(shape.H, latents, shape.D))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The output from the matrices of both softmaxes; if causal, again for the prefix of each query."""
        real = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        rows = []
        for i in range(q.shape[2]) if self.causal else (k.shape[2],):
            seen = real[:, None, None, : i + 1]
            K, V = k[:, :, : i + 1], v[:, :, : i + 1]
            latents = self.latents.to(q.dtype).expand(q.shape[0], -1, -1, -1)
            keys, values = masked_attention(latents, K, K, seen), masked_attention(latents, K, V, seen)
            asking = q[:, :, i : i + 1] if self.causal else q
            rows.append(masked_attention(asking, keys, values, seen.any(-1, keepdim=True)))
        return torch.cat(rows, 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        if self.causal:
            return self._causally(q, k, v, key_mask)
        latents = self.latents.to(q.dtype).expand(k.shape[0], -1, -1, -1)
        mask = some = None
        if key_mask is not None:
            # With no real key the latents see all, so that no kernel makes NaN of it; such examples are set to 0.
            some = key_mask.any(1)[:, None, None, None]
            mask = key_mask[:, None, None] | ~some
        # The same weights twice: cheaper than holding them, R × M numbers for each head.
        keys, values = (scaled_dot_product_attention(latents, k, x, attn_mask=mask) for x in (k, v))
        out = scaled_dot_product_attention(q, keys, values)
        return out if some is None else out.masked_fill(~some, 0.0)

    def _causally(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        state, parts = self._nothing(k, v), []
        # split, not slices: the gradient of each slice would be as large as the whole.
        cut = [torch.split(x, _SEGMENT, 2) for x in (q, k, v)]
        masks = [None] * len(cut[0]) if key_mask is None else torch.split(key_mask, _SEGMENT, 1)
        for segment in zip(*cut, masks, strict=True):
            out, state = recomputed(self._segment, state, *segment, wanted=len(masks) > 1)
            parts.append(out)
        out = torch.cat(parts, 2)
        return out if key_mask is None else out.masked_fill(~seeing(key_mask, True), 0.0)

    def _segment(
        self, state: Packed, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Packed]:
        dtype = q.dtype
        q, k, v = (x.to(accumulator(dtype)) for x in (q, k, v))
        q = q * q.shape[-1] ** -0.5
        logits = self._logits(k, key_mask)
        cut = (torch.split(x, _CHUNK, 2) for x in (q, k, v, logits))
        parts = []
        for Q, K, V, own, steep in zip(*cut, _steep(logits.detach()), strict=True):
            before, (state, w) = state, state.rescaled(own)
            if steep:
                parts.append(_pair_by_pair(before, Q, K, V, own))
            else:
                # Row t of a sum over the tokens up to t is a lower triangle times the weights of the latents.
                total = state.total.mT + w.cumsum(2)
                p = (((Q @ K.mT).tril() @ w + Q @ state.k.mT) / total).softmax(-1) / total
                parts.append((p @ w.mT).tril() @ V + p @ state.v)
            state = state.add(w, K, V)
        return torch.cat(parts, 2).to(dtype), state

    def _nothing(self, k: Tensor, v: Tensor) -> Packed:
        accumulate = accumulator(k.dtype)
        k, v = (x.new_zeros(*x.shape[:2], self.latents.shape[1], x.shape[3], dtype=accumulate) for x in (k, v))
        return Packed(torch.full_like(k[..., :1], hidden(accumulate)), torch.zeros_like(k[..., :1]), k, v)

    def _logits(self, k: Tensor, key_mask: Tensor | None = None) -> Tensor:
        logits = torch.matmul(k, (self.latents.to(k.dtype) * k.shape[-1] ** -0.5).mT)
        # As low as top begins: weights are 1 until the first real key comes, which scales them to 0.
        return logits if key_mask is None else logits.masked_fill(~key_mask[:, None, :, None], hidden(k.dtype))

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Packed:
        state = self._nothing(k, v)
        return self._pack(state, k, v) if k.shape[2] else state

    def step(self, state: Packed, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Packed]:
        state = self._pack(state, k, v)
        keys, values = ((x / state.total).to(q.dtype) for x in (state.k, state.v))
        return scaled_dot_product_attention(q, keys, values), state

    def _pack(self, state: Packed, k: Tensor, v: Tensor) -> Packed:
        k, v = k.to(state.k.dtype), v.to(state.v.dtype)
        state, w = state.rescaled(self._logits(k))
        return state.add(w, k, v)


def _steep(logits: Tensor) -> list[bool]:
    """For each chunk, True if a token's largest logit so far may lie too far below the chunk's for float32."""
    if foreseen(logits):  # a prediction assumes the usual way
        return [False] * -(-logits.shape[2] // _CHUNK)
    rises = [(own.amax(2) - own[:, :, 0]).amax() for own in torch.split(logits, _CHUNK, 2)]
    steep: list[bool] = (torch.stack(rises) > _RISE).tolist()
    return steep


def _pair_by_pair(state: Packed, q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> Tensor:
    """The outputs ``(B, H, T, D)`` of a chunk after ``state``, with a weight of each token for each query and latent.

    A latent's sum up to token t is Σ exp(logit_j - log Z_t) k_j: no exponent is positive.
    """
    before = (state.top + state.total.clamp(min=torch.finfo(q.dtype).tiny).log()).mT.double()
    log_total = torch.logaddexp(before, logits.double().logcumsumexp(2))
    past = (state.top.mT - log_total).to(q.dtype).exp()
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)[..., None]
    w = (logits[:, :, None] - log_total[:, :, :, None]).to(q.dtype).masked_fill(future, -torch.inf).exp()
    p = (torch.einsum("bhtj,bhtjr->bhtr", q @ k.mT, w) + (q @ state.k.mT) * past).softmax(-1)
    return torch.einsum("bhtr,bhtjr->bhtj", p, w) @ v + (p * past) @ state.v
