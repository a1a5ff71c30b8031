"""nystrom-attention: softmax attention through landmarks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench import No, Shape, Traits, build, register
from attnbench_peers.layouts import Given, Parts, merged, separated


@register(
    "peer.nystrom",
    family="low rank",
    source="nystrom-attention, NystromAttention",
    formula="softmax(Q·K̃ᵀ/√D)·softmax(Q̃·K̃ᵀ/√D)⁺·softmax(Q̃·Kᵀ/√D)·V,  Q̃, K̃ means of runs",
    cost="O(n·R·d + R³)",
    traits=Traits(
        causal=No("landmarks average queries and keys of the whole sequence, so every output sees the future"),
        cross=No("the package projects q, k and v from one sequence"),
        rows_sum_to_one=False,
        dtypes=("float32", "float64"),
    ),
    settings=("landmarks=4",),
)
class PeerNystrom(nn.Module):
    """nystrom-attention's NystromAttention without its projections and without its convolution.

    The measured part begins with q, k, v ``(B, N, H·D)``, which are views of ``heads-inside`` inputs: give it these.

    Where it differs from its formula: the pseudo-inverse starts from one scale for all examples and heads, so that
    other examples change a result. A length that is not a multiple of R is padded in front with zeros that nothing
    masks: they take part as keys and in the landmarks.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        landmarks: Annotated[int, Field(ge=1, description="runs R that queries and keys are averaged over")] = 64,
    ) -> None:
        super().__init__()
        from nystrom_attention import NystromAttention

        self.shape, self.landmarks = shape, landmarks
        self.peer = NystromAttention(
            shape.C, dim_head=shape.D, heads=shape.H, num_landmarks=landmarks, pinv_iterations=6, residual=False
        )
        self.peer.to_qkv = Given()
        self.peer.to_out = nn.Identity()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        parts = Parts(merged(q), merged(k), merged(v))
        short = -q.shape[2] % self.landmarks
        if short:  # projections without bias turn zeros into zeros
            parts = Parts(*(pad(x, (0, 0, short, 0)) for x in parts))
        self.peer.to_qkv.hand(parts)
        return separated(self.peer(merged(q), mask=key_mask), self.shape.H)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        ours = build("nystrom", self.shape, landmarks=self.landmarks)
        out: Tensor = ours.dense(q, k, v, key_mask=key_mask)  # type: ignore[operator]  # it is a Nystrom
        return out
