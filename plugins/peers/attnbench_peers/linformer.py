"""linformer: keys and values projected along the sequence."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from attnbench import No, Shape, Traits, Unsupported, build, register
from attnbench.catalogue.attention.low_rank.linformer import Linformer
from attnbench_peers.layouts import Given, copy_into, merged, separated


@register(
    "peer.linformer",
    family="low rank",
    source="linformer, LinformerSelfAttention",
    formula="softmax(Q (E K)ᵀ / √D) (F V),  E, F ∈ ℝ^(R×M)",
    cost="O(n·R·d)",
    traits=Traits(
        target="learned",
        causal=No("each projected row mixes keys from the whole sequence, so every output sees the future"),
        key_padding=No("the package takes no mask"),
        stochastic=True,
        rows_sum_to_one=False,
        dtypes=("float32", "float64"),
    ),
    settings=("rank=4",),
)
class PeerLinformer(nn.Module):
    """linformer's LinformerSelfAttention without its projections, with our E and F.

    Projections to q, k, v and out are removed, so that the measured part begins with q, k, v ``(B, N, H·D)``, which are
    views of ``heads-inside`` inputs: give it these. E and F are those of ``linformer:sharing=headwise`` from the same
    seed; the package itself draws them from a uniform distribution.

    It is correct, but takes only sequences of exactly ``shape.M`` keys. Its ``share_kv=True`` (not used here) makes the
    values themselves equal to the keys.
    """

    def __init__(
        self, shape: Shape, *, rank: Annotated[int, Field(ge=1, description="rows R that keys are projected to")] = 256
    ) -> None:
        super().__init__()
        from linformer import LinformerSelfAttention

        if rank > shape.M:
            raise Unsupported(f"rank {rank} is above the {shape.M} keys: the projection would lengthen the sequence")
        self.shape, self.rank = shape, rank
        ours = Linformer(shape, rank=rank, sharing="headwise")  # first, so that a seed means the same numbers for both
        self.peer = LinformerSelfAttention(shape.C, shape.M, k=rank, heads=shape.H)
        self.peer.to_q, self.peer.to_k, self.peer.to_v = Given(), Given(), Given()
        self.peer.to_out = nn.Identity()
        for weight, own in ((self.peer.proj_k, ours.E), (self.peer.proj_v, ours.F)):
            assert own is not None
            copy_into(weight, own.T)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        x, keys = merged(q), merged(k)
        for projection, value in ((self.peer.to_q, x), (self.peer.to_k, keys), (self.peer.to_v, merged(v))):
            projection.hand(value)
        return separated(self.peer(x, context=keys), self.shape.H)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        ours = build("linformer", self.shape, rank=self.rank, sharing="headwise").to(q.dtype)
        for name, weight in (("E", self.peer.proj_k), ("F", self.peer.proj_v)):
            delattr(ours, name)  # then it can be a plain tensor, through which gradients reach the package's weight
            setattr(ours, name, weight.T)
        out: Tensor = ours.dense(q, k, v)  # type: ignore[operator]  # it is a Linformer
        return out
