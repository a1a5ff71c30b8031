"""flash-linear-attention: Triton kernels, which need an NVIDIA GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import elu

from attnbench import No, Shape, Traits, Unsupported, build, register


@register(
    "peer.linear.fla",
    family="kernel",
    source="flash-linear-attention, chunk_linear_attn",
    formula="φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = elu(x) + 1",
    cost="O(n·d²)",
    traits=Traits(
        target="other",
        cross=No("chunks of queries and keys stand side by side"),
        key_padding=No("the kernel takes no mask"),
        dtypes=(),
    ),
)
class PeerFlashLinear(nn.Module):
    """flash-linear-attention's chunk_linear_attn of elu + 1, causal only, on a GPU only.

    This is the core alone. Its layout is ``(B, N, H, D)``, which is a view of ``heads-inside`` inputs: give it these.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        if not torch.cuda.is_available():
            raise Unsupported("flash-linear-attention's kernels are Triton code for a GPU, and there is none")
        if not shape.causal:
            raise Unsupported("it is a causal form")
        try:
            from fla.ops.linear_attn import chunk_linear_attn
        except ImportError as error:
            raise Unsupported(f"{error}: pip install --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0") from None
        self.shape, self.attend = shape, chunk_linear_attn

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (elu(q) + 1, elu(k) + 1, v))
        out: Tensor = self.attend(q, k, v, scale=1.0, normalize=True)[0]
        return out.transpose(1, 2)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = build("linear", self.shape).dense(q, k, v)  # type: ignore[operator]  # it is a Linear
        return out
