"""transformers' Reformer: LSH attention. Random weights; nothing is downloaded."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from attnbench import No, Shape, Traits, Unsupported, register
from attnbench_peers.layouts import Given, merged, separated


@register(
    "peer.reformer.transformers",
    family="learned pattern",
    source="transformers, LSHSelfAttention",
    formula="oᵢ = Σ_{j∈Pᵢ} softmax_j(xᵢ·xⱼ/‖xⱼ‖) vⱼ, Pᵢ = ∪ᵣ {j : chunkᵣ(i) - chunkᵣ(j) ∈ {0, 1}}, sorted by LSH",
    cost="O(r·n·(c·d + log n))",
    traits=Traits(
        target="other",
        causal=No("not offered by this adapter"),
        cross=No("queries and keys are the same vectors, so there is no second sequence"),
        key_padding=No("not offered by this adapter"),
        stochastic=True,
        dtypes=("float32", "float64"),
    ),
    settings=("chunk=4,rounds=2",),
)
class PeerReformerOfTransformers(nn.Module):
    """transformers' LSHSelfAttention without its projections; the shared vector is k, and q is not read.

    The measured part begins with k, v ``(B, N, H·D)``, which are views of ``heads-inside`` inputs: give it these.

    Where it differs from the formula: the first chunk of a round looks back to the last chunk of the round before;
    rotations are drawn in every call; 1e-6 is added to the mean square that normalises keys. N must be a multiple of
    2·chunk.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        rounds: Annotated[int, Field(ge=1, description="hash rounds")] = 4,
        chunk: Annotated[int, Field(ge=1, description="tokens per chunk after sorting")] = 64,
    ) -> None:
        super().__init__()
        from transformers import ReformerConfig
        from transformers.models.reformer.modeling_reformer import LSHSelfAttention

        if shape.N % (2 * chunk):
            raise Unsupported(f"n = {shape.N} is not a multiple of 2·chunk = {2 * chunk}")
        self.shape = shape
        config = ReformerConfig(
            hidden_size=shape.C,
            num_attention_heads=shape.H,
            attention_head_size=shape.D,
            lsh_attn_chunk_length=chunk,
            num_hashes=rounds,
            num_buckets=_buckets(shape.N, chunk),
            lsh_attention_probs_dropout_prob=0.0,
            max_position_embeddings=shape.N,
            is_decoder=False,
        )
        self.peer: Any = LSHSelfAttention(config)
        self.peer.query_key, self.peer.value = Given(), Given()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        x = merged(k)
        self.peer.query_key.hand(x)
        self.peer.value.hand(merged(v))
        return separated(self.peer(x).hidden_states, self.shape.H)


def _buckets(n: int, chunk: int) -> int | list[int]:
    """About as many buckets as our variant has, n / chunk; split between two hashes if they are many."""
    count = n // chunk
    return count if count <= 128 else [2 * math.ceil(math.sqrt(count / 4))] * 2
