"""A layer around a state that fades, is erased from and written to: projections, a short convolution, norm and gate."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from attnbench.catalogue.engines.linear.maps import Map
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import LOG2E, accumulator, unit
from attnbench.catalogue.engines.recurrent.decayed_sums import drawn_step_sizes
from attnbench.catalogue.engines.recurrent.erasing_core import Erasing
from attnbench.catalogue.engines.recurrent.real_tokens import alone, both_ways
from attnbench.catalogue.engines.recurrent.short_convolution import Remembered, ShortConvolution
from attnbench.contract.problem.shape import Shape

Groups = Annotated[int, Field(ge=1, description="heads of values that read one head of queries and keys")]
"""The option of layers that may have more heads of values than of keys."""


class ErasingLayer(Erasing):
    """x ``(B, N, C)`` through the state of :class:`Erasing` to ``(B, N, C)``.

    One product gives q, k and v and ``gates`` more columns. The former go through a convolution over ``width`` tokens
    and silu; q and k then have length 1 in each head, and q is divided by √D. A subclass makes the rates of the latter,
    and the output's gate of x. Every head's output goes through a root-mean-square norm over its E = ``expand``·D
    channels before the gate. A padded token is passed over. Not causal: a token also reads later tokens, by a
    recurrence from the end, strictly.
    """

    out: Map
    gate: Map

    def __init__(self, shape: Shape, *, expand: int, width: int, chunk: int, gates: int, groups: int = 1) -> None:
        super().__init__()
        H, C, E = shape.H, shape.C, groups * expand * shape.D
        self.heads, self.groups, self.causal, self.chunk = H, groups, shape.causal, chunk
        self.sizes = shape.D, shape.D, E
        self.project = nn.Linear(C, H * sum(self.sizes) + gates, bias=False)
        self.short = ShortConvolution(H * sum(self.sizes), width)
        self.norm = nn.RMSNorm(E // groups, eps=1e-5)
        self.out = nn.Linear(H * E, C, bias=False)

    @alone
    def dense(self, x: Tensor) -> Tensor:
        """The formula of the operator within, between projections and norm."""

        def read(side: Tensor, way: int) -> Tensor:
            *parts, rest = self._plainly(side)
            return self.written_out(*parts, *self.plain_gates(rest), strict=way == 1)

        y = both_ways(read, x, None, causal=self.causal)
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.norm.weight
        return self.out(y.transpose(0, 1).flatten(1) * self.opened(x))

    def _plainly(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q and k ``(H, n, D)`` of length 1, v ``(H, n, E)`` and the other columns, by other code than is measured.

        H counts the heads of values; q and k are repeated for all that read them.
        """
        widths = [self.heads * size for size in self.sizes]
        tokens, rest = self._split(self.project(x))
        taps = self.short.weight.T.flip(0)  # the token's own first
        mixed = torch.stack([pad(tokens, (0, 0, s, 0))[: len(x)] * tap for s, tap in enumerate(taps)]).sum(0)
        mixed = mixed * torch.sigmoid(mixed)
        counts = self.heads, self.heads, self.heads * self.groups
        parts = zip(counts, torch.split(mixed, widths, 1), strict=True)
        q, k, v = (torch.unflatten(part, 1, (H, -1)).transpose(0, 1) for H, part in parts)
        lengths = [torch.linalg.vector_norm(part, dim=-1, keepdim=True) for part in (q, k)]
        q, k = (part / size.masked_fill(size == 0, 1.0) for part, size in zip((q, k), lengths, strict=True))
        q, k = (part.repeat_interleave(self.groups, 0) for part in (q, k))
        return q, k, v, rest

    def plain_gates(self, rest: Tensor) -> tuple[Tensor, ...]:
        """The gates of :attr:`written_out` of columns ``(n, gates)``, by other code than :meth:`rates`."""
        raise NotImplementedError

    def rates(self, gates: Tensor) -> tuple[Tensor, ...]:
        """The rates for :meth:`rule`, each ``(B, H·groups, ...)``, of columns ``(B, N, gates)``.

        By default β ``(B, H·groups, N)`` and log2(α) <= 0, ``(B, H·groups, N, 1)`` or ``(B, H·groups, N, D)``.
        """
        raise NotImplementedError

    def opened(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x))

    def ready(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().ready(silu(q), silu(k), silu(v))

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        return self._finish(x, both_ways(self._run, self.project(x), key_mask, causal=self.causal))

    def _run(self, projected: Tensor, direction: int) -> Tensor:
        """Each token's readings of those before it, and of itself if ``direction`` is 0, ``(B, N, H·E)``."""
        tokens, gates = self._split(projected)
        y = self.read(*self._heads(self.short(tokens)), *self.rates(gates), strict=direction == 1)
        return y.transpose(1, 2).flatten(2)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        mixed = self.heads * sum(self.sizes)
        return projected[..., :mixed], projected[..., mixed:]

    def _heads(self, tokens: Tensor) -> list[Tensor]:
        parts = torch.split(tokens, [self.heads * size for size in self.sizes], -1)
        return [torch.unflatten(part, -1, (self.heads, -1)).transpose(1, 2) for part in parts]

    def _finish(self, x: Tensor, y: Tensor) -> Tensor:
        y = self.norm(torch.unflatten(y, -1, (self.heads * self.groups, -1))).flatten(2)
        return self.out(y * self.opened(x))

    def begin(self, x: Tensor) -> Remembered:
        return self.prompted(x)[1]

    def prompted(self, x: Tensor) -> tuple[Tensor, Remembered]:
        tokens, gates = self._split(self.project(x))
        y, state = self.passed(*self._heads(self.short(tokens)), *self.rates(gates))
        return self._finish(x, y.transpose(1, 2).flatten(2).to(x.dtype)), Remembered(state, self.short.begin(tokens))

    def step(self, state: Remembered, x: Tensor) -> tuple[Tensor, Remembered]:
        tokens, gates = self._split(self.project(x))
        tokens, last = self.short.step(state.last, tokens)
        if x.shape[1] > 1:
            y, after = self.passed(*self._heads(tokens), *self.rates(gates), before=state.state)
            return self._finish(x, y.transpose(1, 2).flatten(2).to(x.dtype)), Remembered(after, last)
        y, after = self.advanced(state.state, self._activated(tokens.to(state.state.dtype)), *self.rates(gates))
        return self._finish(x, y.view(len(x), 1, -1).to(x.dtype)), Remembered(after, last)

    def _activated(self, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`ready` for one token ``(B, 1, ·)``, in half as many calls, which take the time here."""
        B, H, (D, _, E) = len(token), self.heads, self.sizes
        both, v = torch.split(silu(token), [2 * H * D, H * E], -1)
        q, k = unit(both.view(B, 2, H, 1, D)).unbind(1)
        return q * D**-0.5, k, v.view(B, H, 1, E)


class ErasingByChannel(ErasingLayer):
    """A layer whose decays and output gates are those of channels, either through D columns."""

    def __init__(self, shape: Shape, *, own: int, width: int, chunk: int, groups: int = 1) -> None:
        H, D = shape.H * groups, shape.D
        super().__init__(shape, expand=1, width=width, chunk=chunk, gates=own + D, groups=groups)
        self.decay = nn.Linear(D, H * D, bias=False)
        self.gate = nn.Sequential(nn.Linear(shape.C, D, bias=False), nn.Linear(D, H * D))
        self.log_A = nn.Parameter(torch.empty(H).uniform_(1, 16).log())
        self.step_bias = nn.Parameter(drawn_step_sizes(H * D))


class ErasingByHead(ErasingLayer):
    """A layer whose β and decays are numbers of a head, with a gate for each channel of the outputs."""

    strongest = 1.0

    def __init__(self, shape: Shape, *, expand: int, width: int, chunk: int, groups: int = 1) -> None:
        H = shape.H * groups
        super().__init__(shape, expand=expand, width=width, chunk=chunk, gates=2 * H, groups=groups)
        self.gate = nn.Linear(shape.C, H * expand * shape.D, bias=False)
        self.log_A = nn.Parameter((16 * (1 - torch.rand(H))).log())  # torch.rand may give 0, and never 1
        self.step_bias = nn.Parameter(drawn_step_sizes(H))

    def plain_gates(self, rest: Tensor) -> tuple[Tensor, ...]:
        beta, steps = rest.T.chunk(2)
        log_alpha = -self.log_A.exp()[:, None] * softplus(steps + self.step_bias[:, None])
        return self.strongest * torch.sigmoid(beta)[..., None], log_alpha[..., None]

    def rates(self, gates: Tensor) -> tuple[Tensor, ...]:
        dtype = accumulator(gates.dtype)
        beta, steps = gates.to(dtype).mT.chunk(2, 1)
        rate = self.log_A.to(dtype).exp() * -LOG2E
        log_decay = softplus(steps + self.step_bias.to(dtype)[:, None]) * rate[:, None]
        return self.strongest * torch.sigmoid(beta), log_decay[..., None]
