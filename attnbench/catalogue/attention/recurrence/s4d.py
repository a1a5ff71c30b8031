"""S4D: a state space with a diagonal matrix, computed as a long convolution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log, pi
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.fourier import long_convolution
from attnbench.catalogue.engines.masks import emptied
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import RECURRENCE, Knob, No, register

_RUN = 64
"""Powers of the decays are products of one below this and one of its multiples."""


@dataclass(frozen=True, slots=True)
class DiagonalConstants:
    """Constants of decoding: no part of the state, but made with it, so that a step need not make them again."""

    kept: Tensor
    """e^(ΔA), complex128, as the others: ``(C, S)`` each."""
    added: Tensor
    """(e^(ΔA) - 1)/A."""
    read: Tensor
    """2 C."""


class Driven(NamedTuple):
    """The state of decoding."""

    h: Tensor
    """``(B, C, S)``, complex128."""
    fixed: DiagonalConstants


@register(
    "s4d",
    kind="mixer",
    family="recurrence",
    source="Gu et al. 2022, arXiv:2206.11893, section 3",
    formula="y = K * x + p ⊙ x,  K_l = 2 Re Σ_s C_s (e^(ΔA_s) - 1)/A_s · e^(lΔA_s) in each channel",
    cost="O(n·d·log n)",
    memory_exponent=1.0,
    traits=replace(
        RECURRENCE,
        bias=No("there are no logits: the kernel of distances comes from the state space"),
        knob=Knob("state", step=2),
        own_form_both_ways="two kernels, one for each direction; the paper defines the causal form",
    ),
    settings=("state=6",),
)
class S4D(nn.Module):
    """A diagonal state space in each channel, as a long convolution.

    A reference line that is no attention: Gu et al. 2022, "On the Parameterization and Initialization of Diagonal State
    Space Models". Each channel drives ``state`` / 2 complex states of its own, h' = A h + x, and reads 2 Re(C·h). Held
    constant over steps of length Δ, this is a convolution with K_l = 2 Re Σ_s C_s (e^(ΔA_s) - 1)/A_s · e^(lΔA_s), taken
    by Fourier transforms, or a recurrence, by which it decodes. x is ``(B, N, C)`` and so is the output. A padded token
    counts as 0, and time passes.

    The start is the paper's S4D-Lin: A_s = -1/2 + iπs, Δ log-uniform in [0.001, 0.1] for each channel, C from the
    complex N(0, 1), and the skip p from N(0, 1). Kernel and transforms are computed in float64.

    Not causal: a second C gives the kernel of the other direction; the paper defines the causal form.

    Differs from the authors' code: the layer's activation, dropout and output projection are left out; A is not kept
    from leaving the left half of the plane except through its real part, which is minus an exponential, as there.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        state: Annotated[
            int, Field(ge=2, multiple_of=2, description="real states of a channel; half as many complex ones")
        ] = 64,
    ) -> None:
        super().__init__()
        C, S = shape.C, state // 2
        self.causal = shape.causal
        self.log_step = nn.Parameter(torch.empty(C).uniform_(log(0.001), log(0.1)))
        self.log_decay = nn.Parameter(torch.full((C, S), log(0.5)))
        self.frequency = nn.Parameter((pi * torch.arange(S)).expand(C, -1).clone())
        self.read = nn.Parameter(torch.randn(1 if shape.causal else 2, C, S, 2) * 0.5**0.5)
        self.skip = nn.Parameter(torch.randn(C))

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        exponent, reads = self._parts()
        kept, added = exponent.exp(), self._added(exponent)
        N, out = x.shape[1], self.skip * x
        for direction, read in enumerate(reads):
            h = torch.zeros(x.shape[0], *exponent.shape, dtype=exponent.dtype, device=x.device)
            outputs = []
            for t in range(N) if direction == 0 else range(N - 1, -1, -1):
                before = h
                h = kept * h + added * x[:, t, :, None]
                outputs.append(2 * ((h if direction == 0 else before) * read).sum(-1).real)
            out = out + torch.stack(outputs if direction == 0 else outputs[::-1], 1).to(x.dtype)
        return out

    def _per_step(self) -> Tensor:
        """Δ ``(C, 1)``, float64."""
        return self.log_step.double().exp()[:, None]

    def _added(self, exponent: Tensor) -> Tensor:
        """The addition of a token of 1 to a state, (e^(ΔA) - 1)/A, from ΔA."""
        return self._per_step() * (exponent.exp() - 1) / exponent

    def _parts(self) -> tuple[Tensor, Tensor]:
        """ΔA ``(C, S)`` and C ``(directions, C, S)``, complex128."""
        A = torch.complex(-self.log_decay.double().exp(), self.frequency.double())
        return self._per_step() * A, torch.view_as_complex(self.read.double())

    def _kernels(self, length: int) -> list[Tensor]:
        """K of each direction for the distances below ``length``, ``(C, length)``."""
        exponent, reads = self._parts()
        run = min(_RUN, length)
        device = exponent.device
        few = torch.exp(exponent[..., None] * torch.arange(run, device=device))
        many = torch.exp(exponent[:, None] * torch.arange(0, length, run, device=device)[:, None])
        weighed = 2 * reads * self._added(exponent)
        # e^((a + b)ΔA) as a product, summed over the states by a matrix product.
        return [((many * one[:, None]) @ few).real.flatten(1)[:, :length] for one in weighed]

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        # A token is in the state that it reads, but not in the one from the other end.
        later, *others = self._kernels(x.shape[1])
        earlier = others[0][:, : x.shape[1] - 1] if others else None
        return long_convolution(x, later, earlier) + self.skip * x

    @torch.no_grad()
    def begin(self, x: Tensor) -> Driven:
        exponent, reads = self._parts()
        h = torch.zeros(x.shape[0], *exponent.shape, dtype=exponent.dtype, device=x.device)
        added = self._added(exponent)
        for part in torch.split(x, _RUN, 1):
            n = part.shape[1]
            if n:
                powers = torch.exp(exponent[..., None] * torch.arange(n - 1, -1, -1, device=x.device))
                h = torch.exp(n * exponent) * h + torch.einsum("csn,bnc->bcs", powers, part.to(powers.dtype)) * added
        return Driven(h, DiagonalConstants(exponent.exp(), added, 2 * reads[0]))

    @torch.no_grad()
    def step(self, state: Driven, x: Tensor) -> tuple[Tensor, Driven]:
        kept, added, read = state.fixed.kept, state.fixed.added, state.fixed.read
        h = torch.addcmul(state.h * kept, added, x.mT.to(added.dtype))
        y = (h * read).sum(-1).real[:, None].to(x.dtype)
        return torch.addcmul(y, self.skip, x), Driven(h, state.fixed)
