"""Linear Transformer: the exponential replaced by a product of positive feature vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from attnbench.attention.feature_attention import Chunk, FeatureAttention
from attnbench.attention.feature_tiles import LOG2E, FeatureMap
from attnbench.shape import Shape
from attnbench.variant import Traits, register


class EluPlusOne(FeatureMap):
    """φ(x) = elu(x) + 1, computed as exp(min(x, 0)) + max(x, 0), which keeps its digits where elu is near -1."""

    def __init__(self, width: int) -> None:
        self.width = width

    def queries(self, x: Tensor, out: Tensor) -> None:
        torch.mul(x, LOG2E, out=out)
        out.clamp_(max=0.0).exp2_().add_(x.relu())

    def queries_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        return grad.mul_(features.clamp_(max=1.0))  # exp(x) for x < 0, else 1


@register(
    "linear",
    family="kernel",
    source="Katharopoulos et al. 2020, arXiv:2006.16236, sections 3.2 and 3.3",
    formula="φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = elu(x) + 1",
    cost="O(n·d²)",
    traits=Traits(target="other", decode=True, permutable=True),
    settings=("chunk=5",),
)
class Linear(FeatureAttention):
    """Softmax replaced by φ(q)·φ(k), φ = elu + 1, summed in O(n).

    Katharopoulos et al. 2020, "Transformers are RNNs", sections 3.2 and 3.3. The logits are not scaled by 1/√D. A
    difference from softmax attention is a distance, not an error. q ``(B, H, N, D)``, k and v ``(B, H, M, D)``; a
    padded key has φ(k) = 0 (masking k itself would give φ(0) = 1); causal attention by prefix sums, chunk by chunk.

    Differs from the authors' code: nothing is added to the denominator (they add 1e-6), so that each row of weights
    sums to 1 however small φ is.
    """

    def __init__(self, shape: Shape, *, chunk: Chunk = None) -> None:
        super().__init__(shape, chunk)

    def feature_map(self, dtype: torch.dtype) -> FeatureMap:
        return EluPlusOne(self.head_dim)

    def pair_weights(self, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
        phi_q, phi_k = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (q, k))
        return phi_q @ phi_k.mT
