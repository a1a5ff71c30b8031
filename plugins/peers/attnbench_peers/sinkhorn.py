"""sinkhorn-transformer: blocks beside sorted blocks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from attnbench import No, Shape, Traits, Unsupported, register


@register(
    "peer.sinkhorn",
    family="learned pattern",
    source="sinkhorn-transformer, SinkhornAttention",
    formula="softmax over the own block and the sorted block beside it",
    cost="O(n·b·d + (n/b)²)",
    traits=Traits(
        target="other",
        causal=No("the causal form is another module, with two kinds of heads and learned null keys"),
        cross=No("blocks of queries and keys stand side by side"),
        key_padding=No("not offered by this adapter"),
        stochastic=True,
        dtypes=("float32", "float64"),
    ),
    settings=("block=1",),  # check uses 23 tokens
)
class PeerSinkhorn(nn.Module):
    """sinkhorn-transformer's SinkhornAttention: wrong, since its sorted values are the sorted keys.

    This is the core alone, with q ``(B, H, N, D)``; N must be whole blocks. Scores, temperature and number of
    iterations are those of ``sinkhorn``. ``check`` finds the fault by the law "average": v = 1 does not give 1 (and
    v = 0 does not give 0).

    Where else it differs: scores go through log(max(0, ·) + 1e-6) and get Gumbel noise in every call, so that two calls
    differ; iterations end with the columns, so that the weights of a row do not sum to 1.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, Field(ge=1, description="tokens per block")] = 64,
        iterations: Annotated[int, Field(ge=1, description="Sinkhorn normalisations of rows and columns")] = 8,
    ) -> None:
        super().__init__()
        from sinkhorn_transformer.sinkhorn_transformer import SinkhornAttention

        if shape.N % block:
            raise Unsupported(f"n = {shape.N} is not a whole number of blocks of {block}")
        self.peer = SinkhornAttention(
            block, shape.C, shape.D, shape.H, shape.N, non_permutative=False, sinkhorn_iter=iterations
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.peer(q, k, v)
        return out
