"""Linear Transformer: the exponential replaced by a product of positive feature vectors."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from attnbench.engines.linear import fused
from attnbench.engines.linear.feature_map import FeatureMap
from attnbench.engines.linear.module import Chunk, FeatureAttention
from attnbench.errors import Unsupported, UsageError
from attnbench.shape import Shape
from attnbench.variant import No, Traits, register

_LEAST = 2.0**-120
"""Least feature of a key. Float32 reaches down to 2^-126, and so small a share is lost in any sum with a usual key."""

_NO_STEP = "form=triton has whole sequences only: a step is a few small products, which form=torch takes"


class EluPlusOne(FeatureMap):
    """φ(x) = elu(x) + 1, computed as elu'(x)·(max(x, 0) + 1), which keeps its digits where elu is near -1.

    The derivative is exp(x) below 0 and 1 above. The features of a query that is negative throughout are divided by the
    largest of them, which cancels. Every feature of a key is at least :data:`_LEAST`, so that no product underflows.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    def queries(self, x: Tensor, out: Tensor) -> None:
        self._features(x - x.amax(-1, keepdim=True).clamp_(max=0.0), out)

    def keys(self, x: Tensor, out: Tensor) -> None:
        self._features(x, out)
        out.clamp_(min=_LEAST)

    def _features(self, x: Tensor, out: Tensor) -> None:
        torch.clamp(x, min=0.0, out=out).add_(1.0)
        torch.ops.aten.elu_backward.grad_input(out, 1.0, 1.0, 1.0, False, x, grad_input=out)  # False: x is the input

    def queries_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        return grad.mul_(features.clamp_(max=1.0))  # exp(x) for x < 0, else 1


@register(
    "linear",
    family="kernel",
    source="Katharopoulos et al. 2020, arXiv:2006.16236, sections 3.2 and 3.3",
    formula="φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = elu(x) + 1",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        decode=True,
        permutable=True,
        given=(("form=triton", {"decode": No(_NO_STEP), "dtypes": ("bfloat16", "float16", "float32")}),),
    ),
    settings=("chunk=5",),
)
class Linear(FeatureAttention):
    """Softmax replaced by φ(q)·φ(k), φ = elu + 1, summed in O(n).

    Katharopoulos et al. 2020, "Transformers are RNNs", sections 3.2 and 3.3. The logits are not scaled by 1/√D. A
    difference from softmax attention is a distance, not an error. q ``(B, H, N, D)``, k and v ``(B, H, M, D)``; a
    padded key has φ(k) = 0 (masking k itself would give φ(0) = 1); causal attention by prefix sums, chunk by chunk.

    ``form=triton`` is the same in a few fused kernels (:mod:`attnbench.engines.linear.fused`). It has been compiled
    for an H200, and its numbers are those of Triton's interpreter; it has not run on a GPU yet.

    However negative q is, each row of weights sums to 1: a factor of a whole query cancels and is taken out. A key
    feature below 2^-120, where an entry of k is below -83, is raised to 2^-120. Beside a key above -66 in the same
    channel (above -46 in float64) that is less than a rounding error. A query whose keys are all below -83 in the
    channels that it weighs gives all of them the same weight. ``form=triton`` does neither: where the features of a
    query, or of all its keys, underflow, below -87, it gives NaN.

    Differs from the authors' code: nothing is added to the denominator (they add 1e-6).

    Raises:
        Unsupported: ``form=triton`` without triton or a CUDA device, in float64, in decoding, or for D > 128.
        UsageError: ``chunk`` with ``form=triton``, which has chunks of its own.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        chunk: Chunk = None,
        form: Annotated[
            Literal["torch", "triton"], Field(description="PyTorch's operations, or fused kernels on a CUDA device")
        ] = "torch",
    ) -> None:
        super().__init__(shape, chunk)
        self.form = form
        if form == "triton":
            if chunk is not None:
                raise UsageError("linear: chunk belongs to form=torch; the kernels of form=triton have their own")
            fused.require_triton(shape.D)

    def pair_weights(self, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
        phi_q, phi_k = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (q, k))
        return phi_q @ phi_k.mT

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        if self.form == "triton":
            return fused.attend(q, k, v, causal=self.causal, key_mask=key_mask)
        return super().attend(q, k, v, key_mask)

    def feature_map(self, dtype: torch.dtype) -> FeatureMap:
        if self.form == "triton":  # asked for in decoding only
            raise Unsupported(_NO_STEP)
        return EluPlusOne(self.head_dim)
