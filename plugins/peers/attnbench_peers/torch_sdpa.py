"""torch itself: its fused attention called as a function, to see what going through a variant costs."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attnbench import No, Shape, Traits, build, register


@register(
    "peer.sdpa",
    family="exact",
    source="torch.nn.functional.scaled_dot_product_attention",
    formula="softmax(Q·Kᵀ/√D)·V",
    cost="O(n²·d)",
    traits=Traits(
        exact=True,
        cross=True,
        key_padding=No("is_causal and a mask exclude each other, and a query that sees no key becomes NaN"),
        permutable=True,
    ),
)
class PeerSdpa(nn.Module):
    """The bare call, with the back end that torch chooses: q ``(B, H, N, D)``, k and v ``(B, H, M, D)``. Correct."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.causal = shape, shape.causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = build("softmax", self.shape)(q, k, v)
        return out
