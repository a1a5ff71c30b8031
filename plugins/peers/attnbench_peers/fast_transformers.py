"""fast-transformers, by the authors of the Linear Transformer: einsums, and a C++ kernel for the causal form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnbench import No, Shape, Traits, Unsupported, build, register

INSTALL = "pip install --no-deps --no-build-isolation pytorch-fast-transformers==0.4.0"


@register(
    "peer.linear.fast-transformers",
    family="kernel",
    source="pytorch-fast-transformers, LinearAttention and CausalLinearAttention",
    formula="φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = elu(x) + 1",
    cost="O(n·d²)",
    traits=Traits(
        target="other",
        cross=No("not offered by this adapter"),
        key_padding=No("not offered by this adapter"),
        permutable=True,
        dtypes=("float32",),
    ),
)
class PeerFastTransformers(nn.Module):
    """The attention core of fast-transformers' linear attention, without projections.

    Its layout is ``(B, N, H, D)``, which is a view of ``heads-inside`` inputs: give it these. It adds 1e-6 to each sum
    of weights, which its own argument sets to 0 here. Causal attention is a C++ kernel, in float32 only.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        try:
            from fast_transformers.attention import CausalLinearAttention, LinearAttention
            from fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask
        except ImportError as error:
            raise Unsupported(f"{error}: a C++ compiler and {INSTALL}") from None
        self.shape = shape
        self.peer = (CausalLinearAttention if shape.causal else LinearAttention)(shape.D, eps=0.0)
        self.mask: Any = TriangularCausalMask(shape.N) if shape.causal else FullMask(shape.N)
        self.lengths: Any = LengthMask(torch.full((shape.B,), shape.N))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = self.peer(q, k, v, self.mask, self.lengths, self.lengths)
        return out.transpose(1, 2)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = build("linear", self.shape).dense(q, k, v)  # type: ignore[operator]  # it is a Linear
        return out
