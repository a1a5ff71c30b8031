"""transformers' FNet: a Fourier transform. Random weights; nothing is downloaded."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attnbench import No, Shape, Traits, build, register


@register(
    "peer.fnet",
    kind="mixer",
    family="mixing",
    source="transformers, FNetBasicFourierTransform",
    formula="Re(F_seq(F_hidden(X)))",
    cost="O(n·d·log(n·d))",
    traits=Traits(
        target="other",
        causal=No("each frequency is a sum over all tokens with weights of modulus 1, later ones included"),
        cross=No("the transform maps n tokens to n frequencies; there is no second sequence in it"),
        key_padding=No("the package takes no mask"),
        rows_sum_to_one=False,
        dtypes=("float32", "float64"),
    ),
)
class PeerFNet(nn.Module):
    """transformers' FNetBasicFourierTransform: the whole complex transform; its real part is kept.

    x is ``(B, N, C)``, as the package takes it; there are no projections. It is correct.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from transformers import FNetConfig
        from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform

        self.shape = shape
        self.peer: Any = FNetBasicFourierTransform(FNetConfig(hidden_size=shape.C, max_position_embeddings=shape.N))

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.peer(x)[0]
        return out

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = build("fnet", self.shape).dense(x)  # type: ignore[operator]  # it is an FNet
        return out
