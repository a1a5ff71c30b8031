"""Hedgehog: features of queries and keys that learn to imitate softmax attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.linear.feature_attention import Chunk, FeatureAttention, Form
from attnbench.catalogue.engines.linear.feature_map import FeatureMap
from attnbench.catalogue.engines.linear.key_sums import KeySums
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import LOG2E
from attnbench.catalogue.engines.tiling import fill
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Traits, register


class SpikyFeatures(FeatureMap):
    """φ(u) = softmax of (u, -u)."""

    def __init__(self, head_dim: int) -> None:
        self.width = 2 * head_dim

    def queries(self, x: Tensor, out: Tensor) -> None:
        """The features of queries, without their denominator, which cancels."""
        plus, minus = out.chunk(2, -1)
        fill(plus, torch.mul, x, LOG2E)
        fill(minus, torch.neg, plus)
        out.sub_(out.amax(-1, keepdim=True)).exp2_()

    def keys(self, x: Tensor, out: Tensor) -> None:
        self.queries(x, out)
        out.div_(out.sum(-1, keepdim=True))

    def queries_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        plus, minus = grad.mul_(features).chunk(2, -1)
        return plus - minus

    def keys_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        grad.sub_(torch.linalg.vecdot(grad, features)[..., None])
        return self.queries_grad(x, features, grad)


@register(
    "hedgehog",
    family="kernel",
    source="Zhang et al. 2024, arXiv:2402.04347, section 4 and appendix A",
    formula="φ_q(q)ᵀ Σ φ_k(k)vᵀ / φ_q(q)ᵀ Σ φ_k(k),  φ(x) = softmax([Wx, -Wx]),  W learned",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=Traits(target="learned", decode=True, shares="query by query", permutable=True),
    settings=("chunk=5",),
)
class Hedgehog(FeatureAttention):
    """Linear attention with learned features that imitate softmax.

    Zhang et al. 2024, "The Hedgehog & the Porcupine": φ(x) = softmax([Wx, -Wx]) over the 2D features, with one D × D
    matrix W for the queries and one for the keys of each head. W starts as the identity, as in the paper, and is meant
    to be fitted to the weights of softmax attention; before that, an error against softmax means nothing. There is no
    separate temperature and no 1/√D: W can learn both. q ``(B, H, N, D)``, k and v ``(B, H, M, D)``; a padded key has
    φ(k) = 0.

    Where q and k are large and point to different channels, φ(q)·φ(k) underflows; a row in which all do gives NaN.

    Differs from the authors' code: one softmax runs over Wx and -Wx together, W has no bias, and nothing is added to
    the denominator.
    """

    def __init__(self, shape: Shape, *, chunk: Chunk = None, form: Form = "auto") -> None:
        super().__init__(shape, chunk, form)
        self.W_q = nn.Parameter(torch.eye(shape.D).repeat(shape.H, 1, 1))
        self.W_k = nn.Parameter(torch.eye(shape.D).repeat(shape.H, 1, 1))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        u_q, u_k = (torch.einsum("hed,bhnd->bhne", W, x) for W, x in ((self.W_q, q), (self.W_k, k)))
        return super().dense(u_q, u_k, v, key_mask=key_mask)

    def feature_map(self, dtype: torch.dtype) -> FeatureMap:
        return SpikyFeatures(self.head_dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (k,) = emptied(key_mask, k)
        return self.attend(q @ self.W_q.mT, k @ self.W_k.mT, v, key_mask)

    def pair_weights(self, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
        phi_q, phi_k = (torch.cat([u, -u], -1).softmax(-1) for u in (q, k))
        return phi_q @ phi_k.mT

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> KeySums:
        return super().begin(q @ self.W_q.mT, k @ self.W_k.mT, v)

    def step(self, state: KeySums, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, KeySums]:
        return super().step(state, q @ self.W_q.mT, k @ self.W_k.mT, v)
