"""Location-based attention: the query alone decides the positions it looks at, whatever the content."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.kv_cache import Cache, CachedDecoding, weighed
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.pair_scores import PRODUCT, Chunk, attend_by_score
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.reference import softmax_of
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.sink import sink_of
from attnbench.contract.problem.visible import Visible
from attnbench.contract.variant import No, Traits, register
from attnbench.errors import Unsupported


@register(
    "location",
    family="synthetic",
    source="Luong et al. 2015, arXiv:1508.04025, section 3.1, equation 8",
    formula="oᵢ = Σ_j softmax_j(lⱼ·qᵢ) vⱼ,  lⱼ learned for position j",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        stochastic=True,
        decode=True,
        mask=True,
        q_start=True,
        sink=True,
        bias=No("its logits are learned for the positions of keys; a bias would add to what is learned"),
        longer=No("its logits are learned for the positions of keys"),
    ),
    settings=("chunk=5",),
)
class Location(CachedDecoding, nn.Module):
    """Logits from the query and the key's index alone, fixed maximum length.

    Luong et al. 2015, "Effective Approaches to Attention-based Neural Machine Translation", the location-based
    function: the logit of query i and position j is l_j·q_i, where l_j is learned for each head and position, and a
    softmax over the positions follows. No key is read: another k gives the same output. q ``(B, H, N, D)``, k and v
    ``(B, H, M, D)`` -> ``(B, H, N, D)``. Logits exist for one tile at a time; memory is O(n·d).

    l is drawn from N(0, 1/D). Shorter inputs use the first positions, as the paper does.

    Differs from the paper: every head has its own l; nothing but q is read, where the paper's attention also sees the
    previous context through its decoder.

    Raises:
        Unsupported: in ``forward`` and ``step``, more keys than the module was made for.
    """

    visible: Visible

    def __init__(self, shape: Shape, *, chunk: Chunk = None) -> None:
        super().__init__()
        self.visible, self.capacity, self.chunk = Visible.of(shape), shape.M, chunk
        self.sink = sink_of(shape)
        self.locations = nn.Parameter(torch.randn(shape.H, shape.M, shape.D) * shape.D**-0.5)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        logits = torch.einsum("bhnd,hmd->bhnm", q, self.locations[:, : v.shape[2]])
        return softmax_of(logits, self.visible, key_mask, self.sink) @ v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (v,) = emptied(key_mask, v)
        learned = self._of_keys(v.shape[2]).expand(v.shape[0], -1, -1, -1)
        how: dict[str, Any] = {"causal": self.visible, "key_mask": key_mask, "sink": self.sink}
        return attend_by_score(PRODUCT, q, learned, v, chunk=self.chunk, **how)

    def _of_keys(self, count: int) -> Tensor:
        if count > self.capacity:
            raise Unsupported(f"{count} keys, but locations were made for at most {self.capacity}")
        return self.locations[:, :count].to(accumulator(self.locations.dtype))

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Cache:
        """The state after q, k, v ``(B, H, n, D)``, n >= 0; it holds no keys."""
        return Cache.of(v[..., :0], v, self.capacity)

    @torch.no_grad()
    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Cache]:
        learned = self._of_keys(state.length + 1)
        state = state.append(v[..., :0], v)
        first, sink = self.first_seen(state), None if self.sink is None else self.sink.logit[:, None, None]
        logits = q.to(learned.dtype) @ learned[:, first:].mT
        return weighed(logits, state.values[:, :, first:], sink), state
