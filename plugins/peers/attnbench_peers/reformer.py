"""reformer-pytorch: LSH attention."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from attnbench import No, Shape, Traits, Unsupported, register


@register(
    "peer.reformer",
    family="learned pattern",
    source="reformer-pytorch, LSHAttention",
    formula="oᵢ = Σ_{j∈Pᵢ} softmax_j(xᵢ·xⱼ/(‖xⱼ‖·√D)) vⱼ, Pᵢ = ∪ᵣ {j : chunkᵣ(i) - chunkᵣ(j) ∈ {0, 1}}, sorted by LSH",
    cost="O(r·n·(c·d + log n))",
    traits=Traits(
        target="other",
        cross=No("queries and keys are the same vectors, so there is no second sequence"),
        key_padding=No("not offered by this adapter"),
        stochastic=True,
        rows_sum_to_one=True,
        dtypes=("float32", "float64"),
    ),
    settings=("chunk=4,rounds=2",),
)
class PeerReformer(nn.Module):
    """reformer-pytorch's LSHAttention; the shared vector is k, and q is not read.

    This is the core alone, with ``(B·H, N, D)``, a view of q ``(B, H, N, D)``. A pair seen by several rounds counts
    that many times, as in ``reformer:correction=false``.

    Where it differs from the authors' formula: logits are divided by √D although the keys are normalised; the first
    chunk of a round looks back to the last chunk of the round before; rotations are drawn in every call; the rotation
    has n / (2·chunk) columns, so that hashing costs n². Lengths must be a multiple of 2·chunk.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        rounds: Annotated[int, Field(ge=1, description="hash rounds")] = 4,
        chunk: Annotated[int, Field(ge=1, description="tokens per chunk after sorting")] = 64,
    ) -> None:
        super().__init__()
        from reformer_pytorch import LSHAttention

        if shape.N % (2 * chunk):
            raise Unsupported(f"n = {shape.N} is not a multiple of 2·chunk = {2 * chunk}")
        self.peer = LSHAttention(bucket_size=chunk, n_hashes=rounds, causal=shape.causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out, *_ = self.peer(k.flatten(0, 1), v.flatten(0, 1))
        result: Tensor = out.view(k.shape)
        return result
