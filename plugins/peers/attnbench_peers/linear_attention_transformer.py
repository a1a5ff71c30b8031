"""linear-attention-transformer: attention by one softmax over channels and one over positions."""

from __future__ import annotations

from torch import Tensor, nn

from attnbench import No, Shape, Traits, Unsupported, build, register


@register(
    "peer.efficient",
    family="kernel",
    source="linear-attention-transformer, linear_attn",
    formula="ρ_q(Q)·(ρ_k(K)ᵀ·V),  ρ_q: softmax over the channels of a row,  ρ_k: over the positions of a column",
    cost="O(n·d²)",
    traits=Traits(
        target="other",
        causal=No("its causal form is another operator: see peer.linear.buckets"),
        permutable=True,
        dtypes=("float32", "float64"),
    ),
)
class PeerEfficient(nn.Module):
    """linear-attention-transformer's linear_attn, which is efficient attention.

    This is the core alone, with q ``(B, H, N, D)``.

    Where it differs from its formula: the row softmax is then multiplied by 1/√D, so that the weights of a row sum to
    1/√D. With a mask it overwrites the k and v that it was given.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from linear_attention_transformer import linear_attention_transformer

        self.shape = shape
        self.attend = linear_attention_transformer.linear_attn

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.attend(q, k, v, kv_mask=key_mask)
        return out

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = build("efficient", self.shape).dense(q, k, v, key_mask=key_mask)  # type: ignore[operator]  # ours
        return out


@register(
    "peer.linear.buckets",
    family="kernel",
    source="linear-attention-transformer, causal_linear_attn",
    formula="ρ(q_t)ᵀ Σ_{j in buckets before t's} exp(k_j)v_jᵀ / ρ(q_t)ᵀ Σ exp(k_j),  ρ: softmax over channels",
    cost="O(n·d²)",
    traits=Traits(
        target="other",
        key_padding=No("not offered by this adapter"),
        cross=No("buckets of queries and keys stand side by side"),
        rows_sum_to_one=False,
        dtypes=("float32", "float64"),
    ),
)
class PeerCausalBuckets(nn.Module):
    """linear-attention-transformer's causal path in its buckets of 64, the fastest public one in plain PyTorch.

    This is the core alone, with q ``(B, H, N, D)``, causal only; N must be whole buckets. It is another operator than
    causal linear attention with elu + 1, so that only time and memory can be compared. It also has less to do: a query
    sees the buckets before its own and nothing of its own (the first 64 outputs are 0), so that no pair of tokens is
    ever formed. Its features are a softmax and an exponential that is not stabilised: keys of 90 give infinity.
    """

    BUCKET = 64

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from linear_attention_transformer import linear_attention_transformer

        if not shape.causal:
            raise Unsupported("it is a causal form")
        if shape.N % self.BUCKET:
            raise Unsupported(f"n = {shape.N} is not a whole number of buckets of {self.BUCKET}")
        self.attend = linear_attention_transformer.causal_linear_attn

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.attend(q, k, v, bucket_size=self.BUCKET)
        return out
