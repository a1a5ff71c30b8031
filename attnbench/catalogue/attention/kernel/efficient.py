"""Efficient attention: one softmax over the channels of each query, one over the positions of each key channel."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.linear import fused
from attnbench.catalogue.engines.masks import emptied, seeing, visible_pairs
from attnbench.catalogue.engines.precision import LOG2E, accumulator, hidden
from attnbench.catalogue.engines.products import bmm
from attnbench.catalogue.engines.tiling import cut, head_groups, learned, put_product, row_blocks
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register
from attnbench.errors import Unsupported

_NO_MASK = "form=fla takes no mask: sums may fade by more than the kernel can tell; form=torch takes one"


class Averages(NamedTuple):
    """Each channel's averages over the keys so far."""

    context: Tensor
    """Average of the values, weighted by exp(k_c): ``(G, D, E)``."""
    log_total: Tensor
    """log Σ exp(k_c), ``(G, 1, D)``, float64, since keys are subtracted; :func:`hidden` before the first key."""

    def then(self, k: Tensor, v: Tensor, log_total: Tensor) -> Averages:
        """The averages with more keys k ``(G, c, D)``, values v and the new ``log_total``; no exponent is above 0."""
        kept = (self.log_total - log_total).to(k.dtype).exp().mT
        high, low = _parts(log_total, k.dtype)
        return Averages(torch.baddbmm(self.context * kept, (k - high - low).exp().mT, v), log_total)


@register(
    "efficient",
    family="kernel",
    source="Shen et al. 2021, arXiv:1812.01243, section 3.2",
    formula="ρ_q(Q)·(ρ_k(K)ᵀ·V),  ρ_q: softmax over the channels of a row,  ρ_k: over the positions of a column",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        decode=True,
        shares="query by query",
        permutable=True,
        given=(
            ("causal=true", {"own_form": "a channel averages the keys so far; the paper has no causal form"}),
            ("form=fla", {"key_padding": No(_NO_MASK)}),
        ),
    ),
    settings=("chunk=4",),
)
class Efficient(nn.Module):
    """Two softmaxes: over the channels of q, and over the tokens of k.

    Shen et al. 2021, "Efficient Attention: Attention with Linear Complexities", with softmax normalisation (the other
    one of the paper divides by √n and is not here). q ``(B, H, N, D)``, k and v ``(B, H, M, D)``. Each channel c of the
    keys averages the values with weights softmax_j(k_jc); a query mixes the D averages by softmax_c(q_c). Logits are
    not scaled by 1/√D. A difference from softmax attention is a distance, not an error.

    Causal: the average of channel c for query t is over the keys up to t, Σ_{j<=t} exp(k_jc) v_j / Σ_{j<=t} exp(k_jc).
    (One normaliser over all positions, with only the numerators summed up to t, would be another operator and would
    see the future.) Computed chunk by chunk, and inside a chunk by halves, quarters and so on: a later half's reading
    of an earlier one is taken relative to log Σ exp at the border between them, so that no exponent is positive,
    whatever the keys are. Decoding keeps D averages and D sums. Padded keys get a logit of -∞.

    ``form=triton``, not causal, sums by fused kernels; ``form=fla``, causal and without padding, by
    flash-linear-attention's for decays of each channel: averages fade by the growth of a channel's total.

    Differs from the authors' code: heads as everywhere here, no convolutions, no residual; the causal form is this
    project's.

    Raises:
        Unsupported: a fused form without its package or a CUDA device, or ``form=fla`` with padding.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        chunk: Annotated[
            int,
            Field(ge=1, description="tokens taken at a time, up to the next power of two. Moves time and memory only"),
        ] = 64,
        form: Annotated[Literal["auto", "torch", "triton", "fla"], Field(description=forms.WHICH)] = "auto",
    ) -> None:
        super().__init__()
        self.causal = shape.causal
        self.fast: dict[str, fla.Kernel] = {"fla": _by_fla} if shape.causal else {"triton": _by_triton}
        if chunk != 64:
            self.fast = {}
        self.form = forms.require("efficient", form, self.fast)
        self.chunk = 1 << (min(chunk, shape.N) - 1).bit_length()

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        unseen = ~visible_pairs(q, k, self.causal, key_mask)
        logits = k[:, :, None].masked_fill(unseen[..., None], float("-inf"))
        shares = logits.softmax(3).nan_to_num(0.0)
        return torch.einsum("bhnc,bhnmc,bhme->bhne", q.softmax(-1), shares, v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if key_mask is not None:
            (v,) = emptied(key_mask, v)
            dtype = accumulator(q.dtype)
            k = k.to(dtype).masked_fill(~key_mask[:, None, :, None], hidden(dtype))
        # With padding, sums may fade by more than flash-linear-attention's kernel can tell.
        fast = {} if "fla" in self.fast and key_mask is not None else self.fast
        if self.form == "fla" and not fast:
            raise Unsupported(_NO_MASK)
        out = forms.attend(f"efficient, causal={self.causal}", self.form, self._plain, q, k, v, fast=fast)
        return out if key_mask is None else out.masked_fill(~seeing(key_mask, self.causal), 0.0)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, N, _ = q.shape
        dtype = accumulator(q.dtype)
        if learned(q, k, v) or self.causal:
            queries, keys, values = (x.reshape(B * H, x.shape[2], -1).to(dtype) for x in (q, k, v))
            if self.causal:
                out = self._causal(queries, keys, values)
            else:
                context = _Context.apply(keys.softmax(1), values)  # type: ignore[no-untyped-call]  # untyped in torch
                out = torch.bmm(queries.softmax(-1), context)
            return out.to(q.dtype).view(B, H, N, -1)
        return _by_tiles(q, k, v)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = _empty(q.shape[0], q.shape[2], v)
        parts = []
        for queries, keys, values in zip(*(torch.split(x, self.chunk, 1) for x in (q, k, v)), strict=True):
            log_total = torch.logaddexp(state.log_total, keys.double().logcumsumexp(1))
            # Both shares of a total are at most 1; a row reads from the past and from its own chunk.
            high, low = _parts(log_total, keys.dtype)
            log_q = queries.log_softmax(-1) - low
            before, rest = _parts(state.log_total, keys.dtype)
            past = bmm((log_q + (before - high) + rest).exp(), state.context)
            parts.append(past + _triangle(log_q, keys, values, high))
            state = state.then(keys, values, log_total[:, -1:])
        return torch.cat(parts, 1)

    @torch.no_grad()
    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Averages:
        keys, values = (x.flatten(0, 1).to(accumulator(x.dtype)) for x in (k, v))
        state = _empty(keys.shape[0], keys.shape[2], values)
        return state.then(keys, values, keys.double().logsumexp(1, keepdim=True)) if k.shape[2] else state

    @torch.no_grad()
    def step(self, state: Averages, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Averages]:
        query, key, value = (x.flatten(0, 1).to(state.context.dtype) for x in (q, k, v))
        state = state.then(key, value, torch.logaddexp(state.log_total, key))
        return bmm(query.softmax(-1), state.context).to(q.dtype).view_as(v), state


def _by_triton(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Not causal: both softmaxes make features with weights that sum to 1 in each row."""
    phi_q, phi_k = (x.to(accumulator(x.dtype)).softmax(axis) for x, axis in ((q, -1), (k, 2)))
    return fused.sums(phi_q, phi_k, v, fused.CountedKeys(causal=False))


def _by_fla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal: each channel's average fades by its total's growth, and takes a share of each value."""
    log_total = k.double().logcumsumexp(2)
    faded = pad(log_total[:, :, :-1] - log_total[:, :, 1:], (0, 0, 1, 0)).to(accumulator(k.dtype)) * LOG2E
    of_query = q.softmax(-1, accumulator(q.dtype)) * q.shape[-1] ** 0.5  # the kernel divides by that
    return fla.run("gla", of_query.to(q.dtype), (k - log_total).exp().to(q.dtype), v, faded)


class _Context(torch.autograd.Function):
    """A product with a gradient of its own: torch's would come out transposed, and copying it costs as much again."""

    @staticmethod
    def forward(ctx: Any, shares: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(shares, values)
        return torch.bmm(shares.mT, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        shares, values = ctx.saved_tensors
        return torch.bmm(values, grad.mT), torch.bmm(shares, grad)


def _by_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output with neither softmax in memory as a whole; with gradients, taking both again would cost more time."""
    (B, H, N, D), M, E = q.shape, k.shape[2], v.shape[3]
    out = q.new_empty(B, H, N, E)
    # With only one head in a tile, its products would run on one core.
    for group in head_groups(q, min(N, _ROWS) * D):
        first, *others = row_blocks(M, _ROWS)
        top, total, context = _sums(cut(k, group, first), cut(v, group, first))
        for block in others:
            earlier = top
            top, ones, products = _sums(cut(k, group, block), cut(v, group, block), earlier)
            kept = (earlier - top).mul_(LOG2E).exp2_()
            total = ones.addcmul_(total, kept)
            context = products.addcmul_(context, kept.mT)
        context.div_(total.mT)
        for block in row_blocks(N, _ROWS):
            put_product(out, group, block, cut(q, group, block).softmax(-1), context)
    return out


def _sums(keys: Tensor, values: Tensor, top: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The largest key of each channel, ``top`` included; Σ w and Σ w·values with w = exp(keys - largest)."""
    largest = keys.amax(1, keepdim=True)
    if top is not None:
        largest = torch.maximum(top, largest)
    weights = (keys - largest).mul_(LOG2E).exp2_()
    return largest, weights.sum(1, keepdim=True), torch.bmm(weights.mT, values)


_ROWS = 4096
"""Rows of a tile: products of fewer take longer, and their results stay in the cache."""


def _empty(pairs: int, channels: int, v: Tensor) -> Averages:
    log_total = v.new_full((pairs, 1, channels), hidden(v.dtype), dtype=torch.float64)
    return Averages(v.new_zeros(pairs, channels, v.shape[2]), log_total)


def _parts(log_total: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``log_total`` rounded to ``dtype``, so that subtracting another number loses nothing, and the remainder."""
    high = log_total.to(dtype)
    return high, (log_total - high).to(dtype)


def _triangle(log_q: Tensor, k: Tensor, v: Tensor, total: Tensor) -> Tensor:
    """Σ_{j<=i} Σ_c exp(log_q_ic + (k_jc - total_ic)) v_j inside a chunk ``(G, c, ·)``."""
    G, tokens, _ = k.shape
    out = (log_q + (k - total)).exp().sum(-1, keepdim=True) * v  # j = i
    # Filled up to a power of two with the last token, which no earlier one reads; other numbers might not stay finite.
    more = (1 << (tokens - 1).bit_length()) - tokens
    if more:
        log_q, k, v, total = (torch.cat([x, x[:, -1:].expand(-1, more, -1)], 1) for x in (log_q, k, v, total))
    half = 1
    while half < tokens:
        # Blocks of 2·half tokens; the later half of each reads from the earlier one.
        blocks = (torch.split(x.reshape(-1, 2 * half, x.shape[2]), half, 1) for x in (log_q, k, v, total))
        (_, late_q), (early_k, _), (early_v, _), (early_total, late_total) = blocks
        border = early_total[:, -1:]
        scores = bmm((late_q + (border - late_total)).exp(), (early_k - border).exp().mT)
        read = pad(bmm(scores, early_v), (0, 0, half, 0))
        out = out + read.view(G, tokens + more, -1)[:, :tokens]
        half *= 2
    return out
