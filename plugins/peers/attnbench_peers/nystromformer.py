"""transformers' Nyströmformer: softmax attention through landmarks. Random weights; nothing is downloaded."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from attnbench import No, Shape, Traits, Unsupported, build, register
from attnbench_peers.layouts import Given, merged, separated


@register(
    "peer.nystrom.transformers",
    family="low rank",
    source="transformers, NystromformerSelfAttention",
    formula="softmax(Q·K̃ᵀ/√D)·softmax(Q̃·K̃ᵀ/√D)⁺·softmax(Q̃·Kᵀ/√D)·V,  Q̃, K̃ means of runs",
    cost="O(n·R·d + R³)",
    traits=Traits(
        causal=No("landmarks average queries and keys of the whole sequence, so every output sees the future"),
        cross=No("the package projects q, k and v from one sequence"),
        key_padding=No("not offered by this adapter"),
        rows_sum_to_one=False,
        dtypes=("float32", "float64"),
    ),
    settings=("landmarks=23",),  # check uses 23 tokens
)
class PeerNystromformer(nn.Module):
    """transformers' NystromformerSelfAttention without its projections and without its convolution.

    The measured part begins with q, k, v ``(B, N, H·D)``, which are views of ``heads-inside`` inputs: give it these. N
    must be a multiple of R.

    Where it differs from its formula: the pseudo-inverse starts from one scale for all examples and heads, so that
    other examples change a result.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        landmarks: Annotated[int, Field(ge=1, description="runs R that queries and keys are averaged over")] = 64,
    ) -> None:
        super().__init__()
        from transformers import NystromformerConfig
        from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

        if shape.N % landmarks:
            raise Unsupported(f"n = {shape.N} is not a multiple of {landmarks} landmarks")
        self.shape, self.landmarks = shape, landmarks
        config = NystromformerConfig(
            hidden_size=shape.C,
            num_attention_heads=shape.H,
            num_landmarks=landmarks,
            segment_means_seq_len=shape.N,
            attention_probs_dropout_prob=0.0,
        )
        self.peer: Any = NystromformerSelfAttention(config)
        self.peer.conv_kernel_size = (
            None  # the package's own switch for "no convolution", which its config no longer passes on
        )
        del self.peer.conv
        self.peer.query, self.peer.key, self.peer.value = Given(), Given(), Given()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        x = merged(q)
        for projection, value in ((self.peer.query, x), (self.peer.key, merged(k)), (self.peer.value, merged(v))):
            projection.hand(value)
        return separated(self.peer(x)[0], self.shape.H)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        ours = build("nystrom", self.shape, landmarks=self.landmarks)
        out: Tensor = ours.dense(q, k, v)  # type: ignore[operator]  # it is a Nystrom
        return out
