"""gMLP: a feed-forward unit with a hidden layer gated by a learned mixture of the tokens."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from attnbench.catalogue.engines.decoding.kv_cache import Cache, attend
from attnbench.catalogue.engines.masks import at_most, emptied, visible_pairs
from attnbench.catalogue.engines.precision import LayerNorm
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register
from attnbench.errors import UsageError

_ROWS = 256
"""Rows of W taken at a time if causal, so that the half that no token sees is not multiplied either."""


@register(
    "gmlp",
    kind="mixer",
    family="mixing",
    source="Liu et al. 2021, arXiv:2105.08050, section 2.1",
    formula="V(Z₁ ⊙ (W·LN(Z₂) + b)),  [Z₁, Z₂] = GELU(U·X)",
    cost="O(n²·d)",
    memory_exponent=2.0,
    traits=Traits(
        target="other",
        cross=No("W belongs to positions of one sequence, whose own tokens it gates"),
        bias=No("there are no logits: W itself is learned for pairs of positions"),
        longer=No("W is learned for pairs of positions"),
        stochastic=True,
        rows_sum_to_one=False,
        decode=True,
        knob=Knob("ffn"),
    ),
    settings=("ffn=10", "attention=3,ffn=10"),
)
class GMLP(nn.Module):
    """Feed-forward unit with spatial gating, fixed maximum length.

    Liu et al. 2021, "Pay Attention to MLPs", section 2: x is projected to ``ffn`` units with GELU (erf form), which are
    split into Z₁ and Z₂. Then ``s = Z₁ ⊙ (W·LN(Z₂) + b)`` is projected back to C. W is a learned N × N matrix over the
    tokens, the same for every channel and input, with one b for each position. x is ``(B, N, C)`` and so is the output.
    W starts near 0 (N(0, 10⁻⁶)) and b at 1, so that at first the unit is a feed-forward layer of each token alone.

    With ``attention`` it is the paper's aMLP: the output of one softmax attention head of that width over x, projected
    to ``ffn / 2``, is added to the gate.

    A shorter input uses the first rows and columns of W. Causal: the lower triangle. Padding: columns of padded tokens
    are 0, which gives the output of the shorter input. Decoding keeps LN(Z₂) of every token.

    Differs from the paper: the unit is a whole block without its normalisation and residual path, which the encoder
    has; the encoder's own feed-forward layer comes on top of it.

    Raises:
        UsageError: an odd ``ffn``.
        Unsupported: in ``forward``, an input longer than ``shape.N``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        ffn: Annotated[int | None, Field(ge=2, description="hidden units before they are split; none: 6·C")] = None,
        attention: Annotated[
            int | None, Field(ge=1, description="width of the attention head in the gate, aMLP has 64; none: no head")
        ] = None,
    ) -> None:
        super().__init__()
        C, N = shape.C, shape.N
        ffn = 6 * C if ffn is None else ffn
        if ffn % 2:
            raise UsageError(f"gmlp: option ffn={ffn} must be even: it is split into two halves")
        self.causal, self.longest = shape.causal, N
        self.U, self.V = nn.Linear(C, ffn), nn.Linear(ffn // 2, C)
        self.norm = LayerNorm(ffn // 2)
        self.W = nn.Parameter(1e-3 * torch.randn(N, N))
        self.b = nn.Parameter(torch.ones(N))
        self.qkv = nn.Linear(C, 3 * attention) if attention else None
        self.from_head = nn.Linear(attention, ffn // 2) if attention else None

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        N = x.shape[1]
        visible = visible_pairs(x, x, self.causal, key_mask)[:, 0]
        units = self.U(x)
        units = units * (1 + torch.erf(units * 0.5**0.5)) / 2
        half = units.shape[-1] // 2
        centred = units[..., half:] - units[..., half:].mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + self.norm.eps).sqrt()
        gate = (self.W[:N, :N] * visible) @ (normed * self.norm.weight + self.norm.bias) + self.b[:N, None]
        if self.qkv is not None and self.from_head is not None:
            q, k, v = self.qkv(x).chunk(3, -1)
            logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf"))
            gate = gate + self.from_head(logits.softmax(-1).masked_fill(~visible, 0.0) @ v)
        out: Tensor = self.V(units[..., :half] * gate)
        return out

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """x ``(B, N, C)`` with N at most ``shape.N``; ``key_mask`` ``(B, N)``, True for a real token."""
        (x,) = emptied(key_mask, x)
        B, n, _ = x.shape
        at_most(self.longest, n, "W was")
        first, second = self._halves(x)
        if key_mask is not None:
            second = second.masked_fill(~key_mask[:, :, None], 0.0)
        # One product for the whole batch: W is the same for all of it.
        columns = second.transpose(0, 1).reshape(n, -1)
        W, b = self.W[:n, :n], self.b[:n, None]
        if self.causal:
            parts, stop = [], 0
            for rows, bias in zip(torch.split(W, _ROWS), torch.split(b, _ROWS), strict=True):
                stop, start = stop + rows.shape[0], stop
                parts.append(torch.addmm(bias, rows[:, :stop].tril(start), columns[:stop]))
            gate = torch.cat(parts)
        else:
            gate = torch.addmm(b, W, columns)
        gate = gate.view(n, B, -1).transpose(0, 1)
        if self.qkv is not None and self.from_head is not None:
            gate = gate + self.from_head(self._head(self.qkv(x), key_mask))
        out: Tensor = self.V(first * gate)
        return out

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = gelu(self.U(x)).chunk(2, -1)
        return first, self.norm(second)

    def _head(self, qkv: Tensor, key_mask: Tensor | None) -> Tensor:
        q, k, v = qkv[:, None].chunk(3, -1)
        if key_mask is None:
            return scaled_dot_product_attention(q, k, v, is_causal=self.causal)[:, 0]
        visible = key_mask[:, None, None, :]
        if self.causal:
            visible = visible & torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        some = visible.any(-1, keepdim=True)  # a row without any key is NaN on some devices
        return scaled_dot_product_attention(q, k, v, attn_mask=visible | ~some).masked_fill(~some, 0.0)[:, 0]

    def begin(self, x: Tensor) -> Cache:
        """The cache after x ``(B, n, C)``, n >= 0. Its values are LN(Z₂); its keys are the head's keys and values."""
        return Cache.of(self._kept(x), self._halves(x)[1][:, None], self.longest)

    def step(self, state: Cache, x: Tensor) -> tuple[Tensor, Cache]:
        at_most(self.longest, state.length + 1, "W was")
        first, second = self._halves(x)
        state = state.append(self._kept(x), second[:, None])
        t = state.length - 1
        gate = self.W[t, : t + 1] @ state.values[:, 0] + self.b[t]
        gate = gate[:, None]
        if self.qkv is not None and self.from_head is not None:
            k, v = state.keys.chunk(2, -1)
            gate = gate + self.from_head(attend(self.qkv(x)[:, None].chunk(3, -1)[0], k, v)[:, 0])
        return self.V(first * gate), state

    def _kept(self, x: Tensor) -> Tensor:
        if self.qkv is None:
            return x.new_empty(x.shape[0], 1, x.shape[1], 0)
        kept: Tensor = self.qkv(x)[:, None]
        return kept[..., kept.shape[-1] // 3 :]

    @staticmethod
    def cached_bytes(
        shape: Shape, width: int, *, ffn: int | None = None, attention: int | None = None, **_: object
    ) -> int:
        """The mixed half of a token's hidden units, and the key and value of the head in the gate."""
        return ((6 * shape.C if ffn is None else ffn) // 2 + 2 * (attention or 0)) * width
