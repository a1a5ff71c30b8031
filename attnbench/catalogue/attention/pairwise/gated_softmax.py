"""Softmax attention behind a gate: each head's output is multiplied by a sigmoid of the token."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear

from attnbench.catalogue.engines.head_layer import HeadLayer
from attnbench.catalogue.engines.masks import emptied, with_source
from attnbench.contract.problem.position_bias import PositionBias
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.sink import Sink
from attnbench.contract.problem.visible import Visible
from attnbench.contract.variant import VARIANTS, Traits, register


@register(
    "gated-softmax",
    kind="mixer",
    family="pairwise",
    source="Qiu et al. 2025, arXiv:2505.06708, section 2.2, gate after the attention (G1)",
    formula="Y = (softmax(Q·Kᵀ/√D)·V ⊙ σ(X·W_g))·W_o",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        bias=True,
        mask=True,
        sink=True,
        decode=True,
        stochastic=True,
        rows_sum_to_one=False,
        permutable=True,
    ),
    settings=("", "gate=heads"),
)
class GatedSoftmax(HeadLayer):
    """Softmax attention whose output passes a sigmoid gate.

    Qiu et al. 2025, "Gated Attention for Large Language Models": the output of each head is multiplied by σ(X W_g) of
    the token that asks, before the output projection. ``gate=elements`` has one number for each channel of a head, W_g
    being C × C; ``gate=heads`` one for each head, C × H. A gate of 1 leaves softmax attention, and one of 0 lets a head
    give nothing, so that no token has to serve as a sink.

    x ``(B, N, C)`` gives q, k and v by C × C projections; the output projection is C × C, and none has a bias. The
    attention is one call of PyTorch's fused kernel (``sdpa``). With a ``source`` ``(B, M, C)`` k and v are made of it,
    and the gate still of x; the gate adds O(N·C²), or O(N·C·H). Decoding
    keeps keys and values.

    Differs from the paper: q and k have no norm and are not turned by their places; heads of keys and values are not
    shared.
    """

    at_once = True

    def __init__(
        self,
        shape: Shape,
        *,
        gate: Annotated[
            Literal["elements", "heads"], Field(description="one gate for each channel of a head, or for each head")
        ] = "elements",
    ) -> None:
        super().__init__()
        C = shape.C
        self.heads, self.places = shape.H, Visible.of(shape)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.gate = nn.Linear(C, C if gate == "elements" else shape.H, bias=False)
        self.out = nn.Linear(C, C, bias=False)
        self.attend = VARIANTS.get("sdpa").make(shape)

    def dense(self, x: Tensor, *, source: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        x, source = with_source(key_mask, x, source)
        (B, N, C), M = x.shape, source.shape[1]
        ours = zip((x, source, source), self.qkv.weight.chunk(3), strict=True)
        q, k, v = ((y @ weight.T).view(B, -1, self.heads, C // self.heads).transpose(1, 2) for y, weight in ours)
        allowed = self.places.pairs(slice(0, N), slice(0, M), M, x.device)
        allowed = allowed if key_mask is None else allowed & key_mask[:, None, None]
        added = None if self.position_bias is None else self.position_bias(slice(0, N), slice(0, M), x.dtype)
        y = masked_attention(q, k, v, allowed, added, None if self.sink is None else self.sink.logit)
        gate = 1 / (1 + torch.exp(-self.gate(x)))
        return self.out(y.transpose(1, 2).reshape(B, N, C) * gate.repeat_interleave(C // gate.shape[-1], -1))

    @property
    def position_bias(self) -> PositionBias | None:
        found: PositionBias | None = self.attend.position_bias
        return found

    @property
    def sink(self) -> Sink | None:
        found: Sink | None = self.attend.sink
        return found

    def forward(self, x: Tensor, *, source: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        """x ``(B, N, C)``; ``key_mask`` ``(B, N)``, True for a real token, or ``(B, M)`` with a ``source``."""
        if source is None:
            (x,) = emptied(key_mask, x)
            return self._joined(x, self.attend(*self.projected(x), key_mask=key_mask))
        (source,) = emptied(key_mask, source)
        own, others = torch.split(self.qkv.weight, [x.shape[2], 2 * x.shape[2]])
        q, k, v = (
            torch.unflatten(part, 2, (self.heads, -1)).transpose(1, 2)
            for part in (linear(x, own), *linear(source, others).chunk(2, -1))
        )
        return self._joined(x, self.attend(q, k, v, key_mask=key_mask))

    def _joined(self, x: Tensor, y: Tensor) -> Tensor:
        gate = torch.unflatten(torch.sigmoid(self.gate(x)), -1, (self.heads, -1))
        return self.out((y.transpose(1, 2) * gate).flatten(2))

    def begin(self, x: Tensor) -> Any:
        return self.attend.begin(*self.projected(x))

    def step(self, state: Any, x: Tensor) -> tuple[Tensor, Any]:
        y, state = self.attend.step(state, *self.projected(x))
        return self._joined(x, y), state

    @staticmethod
    def cached_bytes(shape: Shape, width: int, **_: object) -> int:
        return 2 * shape.C * width
