"""Hyena: two gates around a convolution as long as the sequence, with a kernel made of distances by a small network."""

from __future__ import annotations

from math import log, pi
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import conv1d, linear, pad

from attnbench.catalogue.engines.decoding.kv_cache import AndRecent, Cache
from attnbench.catalogue.engines.fourier import long_convolution
from attnbench.catalogue.engines.masks import at_most, emptied
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register

_SHORT = 3
"""Tokens under the short convolution."""
_FREQUENCY = 1e-4
"""f, of the cosine and the sine that the network gets with a distance."""
_LEFT, _FAST, _SLOW = 1e-2, 0.3, 1.5
"""The window's height after these shares of the length, in the fastest and the slowest channel."""


@register(
    "hyena",
    kind="mixer",
    family="mixing",
    source="Poli et al. 2023, arXiv:2302.10866; authors' code, hyena.py",
    formula="y = (x₂ ⊙ (h ∗ (x₁ ⊙ v) + p ⊙ x₁ ⊙ v)) W,  h_t = mlp(t) ⊙ e^(-δt),  x₂, x₁, v short convolutions of x W'",
    cost="O(n·d·log n)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        cross=No("a kernel weighs distances within one sequence"),
        bias=No("there are no logits: the network makes the weight of a distance"),
        longer=No("the network and its window take a distance as a share of the length that it is made for"),
        stochastic=True,
        rows_sum_to_one=False,
        decode=True,
        own_form_both_ways="distances to later tokens have a network of their own; the paper defines the causal form",
    ),
    settings=("width=5", ""),
)
class Hyena(nn.Module):
    """Two gates around a long convolution with a kernel made by a network.

    Poli et al. 2023, "Hyena Hierarchy: Towards Larger Convolutional Language Models", of order 2. x ``(B, N, C)`` gives
    x₂, x₁ and v by a C × 3C projection and a depthwise convolution over each token and the two before it. Then
    y = x₂ ⊙ (h ∗ u + p ⊙ u) with u = x₁ ⊙ v, h the kernel and p a skip weight for each channel; the output projection
    follows. The convolution is a product of Fourier transforms in float64, O(n log n).

    The kernel at distance t is e^(-δt/T) ⊙ mlp(t): a network of three hidden layers, ``width`` wide, with sines
    between, whose learned frequency is 1 at first. Its input is t/T, cos(2πft/N) and -sin(2πft/N) with f = 10⁻⁴,
    T = N - 1 and N the length that the module is made for. The rates δ run from 3.1 to 15.4 over the channels: 1 % is
    left after 1.5 and after 0.3 of the length. Padded tokens count as 0. Decoding keeps u of all tokens and costs O(n)
    for each new one.

    Not causal: later tokens have a kernel by a second network, which doubles the parameters of the kernel and has the
    same rates, and the short convolution is centred; the paper defines the causal form.

    Differs from the authors' code: projections and short convolutions have no bias; neither the input of the network
    nor the rates are learned.

    Raises:
        Unsupported: in ``forward`` and ``step``, an input longer than ``shape.N``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        width: Annotated[int, Field(ge=1, description="width of the network that makes the kernel")] = 64,
    ) -> None:
        super().__init__()
        C, N = shape.C, shape.N
        self.longest, self.causal = N, shape.causal
        self.inputs = nn.Linear(C, 3 * C, bias=False)
        self.short = nn.Parameter(torch.empty(3 * C, _SHORT).uniform_(-1, 1) * _SHORT**-0.5)
        self.later = Network(width, C)
        self.earlier = None if shape.causal or N == 1 else Network(width, C)
        self.skip = nn.Parameter(torch.randn(C))
        self.out = nn.Linear(C, C, bias=False)

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        N, C = x.shape[1:]
        projected, mixed = self.inputs(x), []
        for i in range(N):
            total = torch.zeros_like(projected[:, 0])
            for place in range(_SHORT):
                j = i + place - (_SHORT - 1 if self.causal else _SHORT // 2)
                if 0 <= j < N:
                    total = total + projected[:, j] * self.short[:, place]
            mixed.append(total)
        second, first, v = torch.stack(mixed, 1).chunk(3, 2)
        u = first * v
        (u,) = emptied(key_mask, u)
        kernels, T = [], max(self.longest - 1, 1)
        places = torch.arange(N, dtype=x.dtype, device=x.device)[:, None]
        angle = 1e-4 * 2 * pi * places / self.longest
        window = 0.01 ** (places / T / torch.linspace(1 / 1.5, 1 / 0.3, C, dtype=x.dtype, device=x.device) ** -1)
        for network in (self.later, self.earlier):
            h = torch.cat([places / T, angle.cos(), -angle.sin()], 1)
            if network is not None:
                for layer in network.hidden:
                    h = torch.sin(network.frequency * layer(h))
                kernels.append(h @ network.out.weight.T * window)
        row = torch.arange(N, device=x.device)[:, None]
        matrix = kernels[0].T[:, (row - row.T).clamp(min=0)].tril()
        if self.earlier is not None:
            matrix = matrix + kernels[1].T[:, (row.T - row - 1).clamp(min=0)].triu(1)
        out: Tensor = self.out(second * (torch.einsum("cij,bjc->bic", matrix, u) + self.skip * u))
        return out

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """x ``(B, N, C)`` with N at most ``shape.N``; ``key_mask`` ``(B, N)``, True for a real token."""
        (x,) = emptied(key_mask, x)
        N = x.shape[1]
        at_most(self.longest, N, "the kernel was")
        before = _SHORT - 1 if self.causal else _SHORT // 2
        second, u = self._gated(pad(self.inputs(x), (0, 0, before, _SHORT - 1 - before)))
        (u,) = emptied(key_mask, u)
        earlier = None if self.earlier is None else self._kernel(self.earlier, N - 1, x.dtype)
        y = second * (long_convolution(u, self._kernel(self.later, N, x.dtype), earlier) + self.skip * u)
        out: Tensor = self.out(y.to(x.dtype))
        return out

    def _gated(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """x₂ and x₁ ⊙ v, ``(B, n, C)``, from the short convolution's input ``(B, n + 2, 3·C)``."""
        dtype = accumulator(given.dtype)
        mixed = conv1d(given.mT.to(dtype), self.short.to(dtype)[:, None], groups=len(self.short)).mT
        second, first, v = mixed.chunk(3, 2)
        return second, first * v

    def _kernel(self, network: Network, distances: int, dtype: torch.dtype) -> Tensor:
        """The weights of the first distances, ``(C, distances)``, float32 at least."""
        device, C = self.skip.device, len(self.skip)
        places = torch.arange(distances, dtype=torch.float64, device=device)[:, None]
        share, angle = places / max(self.longest - 1, 1), places * (_FREQUENCY * 2 * pi / self.longest)
        rates = torch.linspace(-log(_LEFT) / _SLOW, -log(_LEFT) / _FAST, C, dtype=torch.float64, device=device)
        position, window = torch.cat([share, angle.cos(), -angle.sin()], 1), (-share * rates).exp()
        dtype = accumulator(dtype)
        made: Tensor = network(position.to(dtype))
        return (made * window.to(dtype)).mT

    @torch.no_grad()
    def begin(self, x: Tensor) -> AndRecent:
        n, given = x.shape[1], pad(self.inputs(x), (0, 0, _SHORT - 1, 0))
        u = self._gated(given)[1] if n else given[:, :0, : x.shape[2]].to(accumulator(x.dtype))
        return AndRecent(Cache.of(u[:, None, :, :0], u[:, None], self.longest), given[:, n:].clone())

    @torch.no_grad()
    def step(self, state: AndRecent, x: Tensor) -> tuple[Tensor, AndRecent]:
        at_most(self.longest, state.cache.length + 1, "the kernel was")
        given = torch.cat((state.recent, self.inputs(x)), 1)
        second, u = self._gated(given)
        cache = state.cache.append(u[:, None, :, :0], u[:, None])
        kernel = self._kernel(self.later, cache.length, x.dtype).flip(1).double()
        mixed = torch.einsum("cn,bnc->bc", kernel, cache.values[:, 0].double())[:, None]
        return self.out((second * (mixed.to(u.dtype) + self.skip * u)).to(x.dtype)), AndRecent(cache, given[:, 1:])

    @staticmethod
    def cached_bytes(shape: Shape, width: int, /, **_: object) -> int:  # its own option is called width, too
        """A token's part of the long convolution's input, float32 at least."""
        return shape.C * max(width, 4)


class Network(nn.Module):
    """Three hidden layers with sines between, ``(n, 3)`` to ``(n, channels)``, in the dtype of the input."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(3 if i == 0 else width, width) for i in range(3))
        self.frequency = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        frequency = self.frequency.to(x.dtype)
        for layer in self.hidden:
            weight, bias = (number.to(x.dtype) for number in layer.parameters())
            x = torch.sin(frequency * linear(x, weight, bias))
        return linear(x, self.out.weight.to(x.dtype))
