"""FNet: a discrete Fourier transform, with nothing to learn, mixes the tokens."""

from __future__ import annotations

from math import tau
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register


@register(
    "fnet",
    kind="mixer",
    family="mixing",
    source="Lee-Thorp et al. 2021, arXiv:2105.03824, section 3.2",
    formula="Re(F_seq(F_hidden(X)))",
    cost="O(n·d·log(n·d))",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        mask=No("each frequency is a sum over all tokens, of which none can be hidden from some outputs alone"),
        causal=No("each frequency is a sum over all tokens with weights of modulus 1, later ones included"),
        cross=No("the transform maps n tokens to n frequencies; there is no second sequence in it"),
        bias=No("there are no logits that a bias could be added to"),
        rows_sum_to_one=False,
    ),
)
class FNet(nn.Module):
    """Real part of a Fourier transform over tokens and channels.

    Lee-Thorp et al. 2021, "FNet: Mixing Tokens with Fourier Transforms": the unnormalised discrete Fourier transform of
    x along the channels and along the tokens. The real part is taken once, at the end. x is ``(B, N, C)``, the C
    channels of all heads together, and so is the output. There are no parameters and no projections; entries grow as
    √(N·C/2). float16 and bfloat16 are transformed in float32.

    Padding is cut out. Frequencies depend on the length, so with ``key_mask`` each example is transformed by itself, at
    the length of its real tokens (on CUDA each waits for the device); padded tokens give 0.

    Differs from the authors' code: since x is real, only half of the channels' frequencies are computed, and the others
    follow by symmetry; the operator is a symmetric matrix and so its own backward pass; padding is not transformed.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        cos_c, sin_c = _waves(x.shape[2], x)
        out = torch.zeros_like(x)
        for b, tokens in enumerate(x):
            real = torch.ones(len(tokens), dtype=torch.bool, device=x.device) if key_mask is None else key_mask[b]
            cos_n, sin_n = _waves(int(real.sum()), x)
            out[b, real] = cos_n @ tokens[real] @ cos_c - sin_n @ tokens[real] @ sin_c
        return out

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if key_mask is None:
            return _mix(x)
        out = torch.zeros_like(x)
        for b, real in enumerate(key_mask):
            if real.any():
                out[b, real] = _mix(x[b : b + 1, real])[0]
        return out


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        half = torch.fft.rfft2(x.to(accumulator(x.dtype)), dim=(1, 2)).real
        given = half.shape[2]
        rest = half[:, :, 1 : x.shape[2] - given + 1]
        out = x.new_empty(x.shape)
        # Frequencies (i, c) and (-i mod N, -c mod C) of a real input have the same real part.
        out[:, :, :given] = half
        out[:, 0, given:] = rest[:, 0].flip(-1)
        out[:, 1:, given:] = rest[:, 1:].flip(1, 2)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _mix(grads[0])


def _mix(x: Tensor) -> Tensor:
    out: Tensor = _Mix.apply(x)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def _waves(n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    position = torch.arange(n, device=x.device)
    angle = (position[:, None] * position % n).to(x.dtype) * (tau / max(1, n))
    return angle.cos(), angle.sin()
