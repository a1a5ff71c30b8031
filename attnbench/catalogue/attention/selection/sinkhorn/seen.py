"""The two fields of view of a query: its own block and its mixture, or only the first mixtures.

Both are called with q, k, v ``(G, n, b, D)`` of G = B·H heads cut into n blocks, sort ``(G, n, n)``, and, if tokens
are missing, log_mass ``(G, n, b)`` of the mixtures and real ``(G, n, b)`` bool.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnbench.catalogue.attention.selection.sinkhorn.blocks import Attend, inverse_mass
from attnbench.catalogue.engines.precision import hidden


class OwnAndSorted:
    """A query's own block and its mixture, in one softmax."""

    own = True

    def __init__(self, causal: bool) -> None:
        self.causal = causal

    def dense(self, mixtures: Tensor, home: Tensor) -> Tensor:
        """The mixtures, of ``(B, H, n, b, ...)``, that the tokens of the blocks ``home`` see: ``(B, H, N, b, ...)``."""
        return mixtures[:, :, home]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sort: Tensor, log_mass: Tensor | None, real: Tensor | None
    ) -> Tensor:
        out: Tensor = Attend.apply(q, k, v, sort, log_mass, real, self.causal)  # type: ignore[no-untyped-call] # torch
        if log_mass is None or real is None:
            return out
        own = real.cumsum(-1) > 0 if self.causal else real.any(-1, keepdim=True)
        mixed = (log_mass > hidden(log_mass.dtype)).any(-1, keepdim=True)
        return out.masked_fill(~(own | mixed).unsqueeze(-1), 0)


class SortCut:
    """The first ``cut`` mixtures alone, the same for all queries."""

    own = False

    def __init__(self, cut: int) -> None:
        self.cut = cut

    def dense(self, mixtures: Tensor, home: Tensor) -> Tensor:
        """The mixtures, of ``(B, H, n, b, ...)``, that every token sees: ``(B, H, 1, cut·b, ...)``."""
        return mixtures[:, :, None, : self.cut].flatten(3, 4)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sort: Tensor, log_mass: Tensor | None, real: Tensor | None
    ) -> Tensor:
        sort = sort[:, : self.cut]
        mixed = [torch.bmm(sort, x.flatten(2).to(sort.dtype)).view(len(q), -1, q.shape[3]) for x in (k, v)]
        bias = None
        if log_mass is not None:
            log_mass = log_mass[:, : self.cut].reshape(len(q), 1, -1)
            mixed = [x * inverse_mass(log_mass[:, 0]) for x in mixed]
            bias = log_mass.clamp(min=hidden(q.dtype)).to(q.dtype).unsqueeze(1)
        # With a head axis of 1: only for four axes is there a kernel without the matrix of weights.
        keys, values = (x.to(q.dtype).unsqueeze(1) for x in mixed)
        return scaled_dot_product_attention(q.flatten(1, 2).unsqueeze(1), keys, values, attn_mask=bias).squeeze(1)
