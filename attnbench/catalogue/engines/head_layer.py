"""A layer of heads between a projection to queries, keys and values, and one of all heads together."""

from __future__ import annotations

from torch import Tensor, nn

from attnbench.catalogue.engines.linear.maps import Map


class HeadLayer(nn.Module):
    """A subclass makes both projections, in the order in which it draws its weights."""

    heads: int
    qkv: nn.Linear
    out: Map

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values and the further outputs of ``qkv`` for x ``(B, n, C)``: ``(B, H, n, D)`` each."""
        B, n, C = x.shape
        parts = self.qkv(x).view(B, n, self.qkv.out_features // C, self.heads, C // self.heads)
        return tuple(parts.permute(2, 0, 3, 1, 4).unbind())

    def joined(self, y: Tensor) -> Tensor:
        """The output ``(B, n, C)`` from the heads' ``(B, H, n, D)``."""
        return self.out(y.transpose(1, 2).flatten(2))
