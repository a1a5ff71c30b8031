"""local-attention: a sliding window, computed in blocks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from attnbench import No, Shape, Traits, build, register


@register(
    "peer.local",
    family="fixed pattern",
    source="local-attention, LocalAttention",
    formula="softmax over {j : |i - j| <= w} (causal: and j <= i)",
    cost="O(n·w·d)",
    traits=Traits(cross=No("the window needs queries and keys at the same positions"), dtypes=("float32", "float64")),
    settings=("window=4",),
)
class PeerLocal(nn.Module):
    """local-attention's LocalAttention with exact_windowsize: a window of ±w.

    This is the core alone, with q ``(B, H, N, D)`` and without rotary embeddings, which the package adds as soon as it
    is given a width.

    Where it differs from its formula: a length that is not a multiple of w is padded at the end with zeros, and without
    a mask the last queries attend to them, unless attention is causal.
    """

    def __init__(
        self, shape: Shape, *, window: Annotated[int, Field(ge=1, description="tokens seen on each side")] = 128
    ) -> None:
        super().__init__()
        from local_attention import LocalAttention

        self.shape, self.window = shape, window
        self.peer = LocalAttention(window_size=window, causal=shape.causal, autopad=True, exact_windowsize=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.peer(q, k, v, mask=key_mask)
        return out

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        ours = build("local", self.shape, window=self.window)
        out: Tensor = ours.dense(q, k, v, key_mask=key_mask)  # type: ignore[operator]  # it is a Local
        return out
