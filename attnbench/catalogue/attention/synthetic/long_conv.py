"""A convolution as long as the sequence, by Fourier transforms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.fourier import long_convolution
from attnbench.catalogue.engines.masks import at_most, emptied
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register


@register(
    "long-conv",
    kind="mixer",
    family="mixing",
    source="Fu et al. 2023, arXiv:2302.06646, section 3",
    formula="y = F⁻¹(F(h) ⊙ F(x)) + p ⊙ x: y_i = Σ_j h_(i-j) ⊙ x_j + p ⊙ x_i",
    cost="O(n·d·log n)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        cross=No("a kernel weighs distances within one sequence"),
        bias=No("there are no logits: the weight of a distance is learned as it is"),
        longer=No("a weight is learned for each distance in the sequences that it is made for"),
        stochastic=True,
        rows_sum_to_one=False,
        decode=True,
    ),
)
class LongConvolution(nn.Module):
    """A learned kernel as long as the sequence, fixed maximum length.

    A reference line that is no attention: Fu et al. 2023, "Simple Hardware-Efficient Long Convolutions for Sequence
    Modeling". Every channel has one learned weight for each distance up to ``shape.N``, in both directions unless
    causal, and a skip weight p. The sum over all tokens is a product of Fourier transforms, O(n log n). x is
    ``(B, N, C)`` and so is the output. Padded tokens count as 0. A shorter input uses the first distances. Decoding
    keeps all tokens and costs O(n) for each new one, as attention does.

    Weights are drawn from N(0, 1/N), p is 1 at first. Transforms are taken in float64 (see
    :func:`~attnbench.catalogue.engines.fourier.long_convolution`).

    Differs from the paper: weights are not squashed towards 0, smoothed or decayed, and there is no gate or projection
    around the convolution.

    Raises:
        Unsupported: in ``forward`` and ``step``, an input longer than ``shape.N``.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        C, N = shape.C, shape.N
        self.longest, self.causal = N, shape.causal
        self.later = nn.Parameter(torch.randn(C, N) * N**-0.5)
        self.earlier = None if shape.causal or N == 1 else nn.Parameter(torch.randn(C, N - 1) * N**-0.5)
        self.skip = nn.Parameter(torch.ones(C))

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        i = torch.arange(x.shape[1], device=x.device)[:, None]
        matrix = self.later[:, (i - i.mT).clamp(min=0)].tril()
        if self.earlier is not None:
            matrix = matrix + self.earlier[:, (i.mT - i - 1).clamp(min=0)].triu(1)
        return torch.einsum("cij,bjc->bic", matrix, x) + self.skip * x

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """x ``(B, N, C)`` with N at most ``shape.N``; ``key_mask`` ``(B, N)``, True for a real token."""
        (x,) = emptied(key_mask, x)
        N = x.shape[1]
        at_most(self.longest, N, "the kernel was")
        earlier = None if self.earlier is None else self.earlier[:, : N - 1]
        return long_convolution(x, self.later[:, :N], earlier) + self.skip * x

    def begin(self, x: Tensor) -> Cache:
        """The cache after x ``(B, n, C)``, n >= 0. Its values are the tokens."""
        return Cache.of(x[:, None, :, :0], x[:, None], self.longest)

    @torch.no_grad()
    def step(self, state: Cache, x: Tensor) -> tuple[Tensor, Cache]:
        at_most(self.longest, state.length + 1, "the kernel was")
        state = state.append(x[:, None, :, :0], x[:, None])
        kernel = self.later[:, : state.length].flip(1).double()
        mixed = torch.einsum("cn,bnc->bc", kernel, state.values[:, 0].double())[:, None]
        return mixed.to(x.dtype) + self.skip * x, state

    @staticmethod
    def cached_bytes(shape: Shape, width: int, **_: object) -> int:
        return shape.C * width
