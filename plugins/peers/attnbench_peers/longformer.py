"""transformers' Longformer: a sliding window in chunks. Random weights; nothing is downloaded."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench import No, Shape, Traits, Unsupported, build, register
from attnbench_peers.layouts import Given, merged, separated


@register(
    "peer.longformer",
    family="fixed pattern",
    source="transformers, LongformerSelfAttention",
    formula="softmax over {j : |i - j| <= w}",
    cost="O(n·w·d)",
    traits=Traits(
        causal=No("the package has an encoder only"),
        cross=No("the window needs queries and keys at the same positions"),
        key_padding=No("not offered by this adapter"),
        dtypes=("float32", "float64"),
    ),
    settings=("window=4",),
)
class PeerLongformer(nn.Module):
    """transformers' LongformerSelfAttention without its projections and without global tokens.

    The measured part begins with q, k, v ``(B, N, H·D)``, which are views of ``heads-inside`` inputs: give it these. q
    is copied once, because the package divides it in place, as it would divide its own product. ``window`` counts one
    side, the package's both. N must be a multiple of 2·window. The softmax is in float32, whatever the dtype.
    """

    def __init__(
        self, shape: Shape, *, window: Annotated[int, Field(ge=1, description="tokens seen on each side")] = 128
    ) -> None:
        super().__init__()
        from transformers import LongformerConfig
        from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

        if shape.N % (2 * window):
            raise Unsupported(f"n = {shape.N} is not a multiple of 2·window = {2 * window}")
        self.shape, self.window = shape, window
        config = LongformerConfig(
            hidden_size=shape.C,
            num_attention_heads=shape.H,
            attention_window=[2 * window],
            attention_probs_dropout_prob=0.0,
        )
        self.peer: Any = LongformerSelfAttention(config, layer_id=0)
        self.peer.query, self.peer.key, self.peer.value = Given(), Given(), Given()
        for unused in ("query_global", "key_global", "value_global"):
            setattr(self.peer, unused, None)
        self.register_buffer("open", torch.zeros(shape.B, shape.N))
        self.register_buffer("hidden", torch.zeros(shape.B, shape.N, dtype=torch.bool))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        x = merged(q)
        for projection, value in (
            (self.peer.query, x.clone()),
            (self.peer.key, merged(k)),
            (self.peer.value, merged(v)),
        ):
            projection.hand(value.transpose(0, 1))
        out, *_ = self.peer(
            x,
            attention_mask=self.open,
            is_index_masked=self.hidden,
            is_index_global_attn=self.hidden,
            is_global_attn=False,
        )
        return separated(out, self.shape.H)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        ours = build("longformer", self.shape, window=self.window, global_tokens=0)
        out: Tensor = ours.dense(q, k, v)  # type: ignore[operator]  # it is a Longformer
        return out
