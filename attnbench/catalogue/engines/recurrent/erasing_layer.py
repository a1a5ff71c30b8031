"""A layer around a state that fades, is erased from and written to: projections, a short convolution, norm and gate."""

from __future__ import annotations

from functools import partial
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import silu

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.linear.maps import Map
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator, unit
from attnbench.catalogue.engines.recurrent.erase_and_write import BeforeDecay, erase_and_write
from attnbench.catalogue.engines.recurrent.real_tokens import both_ways
from attnbench.catalogue.engines.recurrent.short_convolution import Remembered, ShortConvolution
from attnbench.catalogue.engines.recurrent.stretches import by_heads
from attnbench.contract.problem.shape import Shape

Groups = Annotated[int, Field(ge=1, description="heads of values that read one head of queries and keys")]
"""The option of layers that may have more heads of values than of keys."""


class Rule(NamedTuple):
    """The arguments of :func:`erase_and_write` that come from tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    erase: Tensor | BeforeDecay
    log_decay: Tensor


class ErasingLayer(nn.Module):
    """x ``(B, N, C)`` through a state by :meth:`rule`, and o_t = S_tᵀ q_t, to ``(B, N, C)``.

    One product gives q, k and v and ``gates`` more columns. The former go through a convolution over ``width`` tokens
    and silu; q and k then have length 1 in each head. A subclass makes the rates of the latter, and the output's gate
    of x. By default the rates are β and log2(α), and S_t = (I - β k kᵀ) Diag(α) S_{t-1} + β k vᵀ; q is divided by √D.
    Every head's output goes through a root-mean-square norm over its E = ``expand``·D channels before the gate. A
    padded token is passed over. Not causal: a token also reads later tokens, by a recurrence from the end, strictly.

    With ``groups`` above 1 each head of q and k serves as many heads of values, with a state and rates of their own:
    head h of the H·groups heads of values reads head h // groups. Below, they stand side by side in the columns of
    v ``(..., groups·E)``. No q or k is copied: the groups take turns, and gradients of q and k add up.

    On a GPU a kernel of :mod:`attnbench.catalogue.engines.fla`, named by a subclass, runs the recurrence: see
    :meth:`takes_form`.
    """

    out: Map
    kernel: str
    form = "torch"

    def __init__(self, shape: Shape, *, expand: int, width: int, chunk: int, gates: int, groups: int = 1) -> None:
        super().__init__()
        H, C, E = shape.H, shape.C, groups * expand * shape.D
        self.heads, self.groups, self.causal, self.chunk = H, groups, shape.causal, chunk
        self.sizes = shape.D, shape.D, E
        self.project = nn.Linear(C, H * sum(self.sizes) + gates, bias=False)
        self.short = ShortConvolution(H * sum(self.sizes), width)
        self.norm = nn.RMSNorm(E // groups, eps=1e-5)
        self.out = nn.Linear(H * E, C, bias=False)

    def rates(self, gates: Tensor) -> tuple[Tensor, ...]:
        """The rates for :meth:`rule`, each ``(B, H·groups, ...)``, of columns ``(B, N, gates)``.

        By default β ``(B, H·groups, N)`` and log2(α) <= 0, ``(B, H·groups, N, 1)`` or ``(B, H·groups, N, D)``.
        """
        raise NotImplementedError

    def rule(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> Rule:
        """The recurrence of :func:`activated` tokens ``(..., N, ·)`` and of their rates."""
        beta, log_decay = rates
        return Rule(q, k, v, beta, log_decay)

    def opened(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def takes_form(self, form: str) -> None:
        """Choose the form of the recurrence; subclasses call this in their constructors.

        Raises:
            Unsupported: it was named, and there is none for these options, or no device or package for it.
        """
        self.form = forms.require(self.kernel, form, self._fast(strict=not self.causal))

    def given(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> tuple[Tensor, ...]:
        """The kernel's arguments, from :func:`activated` tokens and their rates: q first, the decay last."""
        return q, k, v, *rates

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        return self._finish(x, both_ways(self._run, self.project(x), key_mask, causal=self.causal))

    def _run(self, projected: Tensor, direction: int) -> Tensor:
        """Each token's readings of those before it, and of itself if ``direction`` is 0, ``(B, N, H·E)``."""
        tokens, gates = self._split(projected)
        strict = direction == 1
        parts, plain = (*self._heads(self.short(tokens)), *self.rates(gates)), partial(self._plain, strict=strict)
        name = f"{self.kernel}, strict={strict}, groups={self.groups}"
        y = forms.attend(name, self.form, plain, *parts, fast=self._fast(strict=strict))
        return y.transpose(1, 2).flatten(2)

    def _plain(self, *parts: Tensor, strict: bool) -> Tensor:
        compute = partial(self._read, strict=strict)
        return self._side_by_side([by_heads(compute, *turn) for turn in self._in_turn(*parts)])

    def _fast(self, *, strict: bool) -> dict[str, fla.Kernel]:
        fits = self.chunk == 64 and not (strict and self.groups > 1)
        return {"fla": partial(self._fused, strict=strict)} if fits else {}

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor, strict: bool) -> Tensor:
        q, k, v = activated(q, k, v)
        if self.groups > 1:
            v = torch.unflatten(v, 3, (self.groups, -1)).transpose(2, 3).flatten(1, 2)
        parts, kernel = self.given(q, k, v, *rates), partial(fla.run, self.kernel)
        return fla.before(kernel, *parts, log_decay=parts[-1]) if strict else kernel(*parts)

    def _in_turn(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> list[tuple[Tensor, ...]]:
        """q, k, v and the rates, all with H heads, for the first head of values of each group, then for the next."""
        if self.groups == 1:
            return [(q, k, v, *rates)]
        values = torch.unflatten(v, 3, (self.groups, -1)).unbind(3)
        own = zip(*(torch.unflatten(rate, 1, (-1, self.groups)).unbind(2) for rate in rates), strict=True)
        return [(q, k, some, *more) for some, more in zip(values, own, strict=True)]

    def _side_by_side(self, parts: list[Tensor]) -> Tensor:
        """``(B, H·groups, ...)`` from the outputs of the turns ``(B, H, ...)``."""
        return parts[0] if len(parts) == 1 else torch.stack(parts, 2).flatten(1, 2)

    def _read(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor, strict: bool) -> Tensor:
        return erase_and_write(*self.rule(*activated(q, k, v), *rates), chunk=self.chunk, strict=strict)[0]

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
        tokens, gates = self._split(self.project(x))
        dtype = accumulator(x.dtype)
        _, D, E = self.sizes
        state = x.new_zeros(x.shape[0], self.heads * self.groups, D, E // self.groups, dtype=dtype)
        if x.shape[1]:
            state = self._pass(tokens, gates)[1]
        return Remembered(state, self.short.begin(tokens))

    def prompted(self, x: Tensor) -> tuple[Tensor, Remembered]:
        tokens, gates = self._split(self.project(x))
        y, state = self._pass(tokens, gates)
        return self._finish(x, y.transpose(1, 2).flatten(2).to(x.dtype)), Remembered(state, self.short.begin(tokens))

    def _pass(self, tokens: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of the heads ``(B, H·groups, n, E)`` and the last state, in the accumulator."""
        outputs, states = [], []
        for parts in self._in_turn(*self._heads(self.short(tokens)), *self.rates(gates)):
            q, k, v, *rates = (part.flatten(0, 1).to(accumulator(tokens.dtype)) for part in parts)
            read = erase_and_write(*self.rule(*activated(q, k, v), *rates), chunk=self.chunk)
            y, state = (torch.unflatten(z, 0, (len(tokens), self.heads)) for z in read)
            outputs.append(y)
            states.append(state)
        return self._side_by_side(outputs), self._side_by_side(states)

    def step(self, state: Remembered, x: Tensor) -> tuple[Tensor, Remembered]:
        tokens, gates = self._split(self.project(x))
        tokens, last = self.short.step(state.last, tokens)
        parts, rates = self._activated(tokens.to(state.state.dtype)), self.rates(gates)
        before = state.state
        if self.groups > 1:  # one axis more: a query and a key for all heads of values of a group
            q, k, v = parts
            parts = q[:, :, None], k[:, :, None], v.view(*k.shape[:2], self.groups, 1, -1)
            before, *own = (torch.unflatten(x, 1, (-1, self.groups)) for x in (before, *rates))
            rates = tuple(own)
        q, k, v, erase, log_decay = self.rule(*parts, *rates)
        left = before * log_decay.mT.exp2()
        if isinstance(erase, BeforeDecay):
            change = v - erase.erase @ before
        elif erase.ndim == v.ndim:
            change = v - erase @ left
        else:
            change = erase[..., None] * (v - k @ left)
        left.addcmul_(k.mT, change)
        y = (q @ left).view(len(x), 1, -1).to(x.dtype)
        return self._finish(x, y), Remembered(left.view_as(state.state), last)

    def _activated(self, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """:func:`activated` for one token ``(B, 1, ·)``, in half as many calls, which take the time here."""
        B, H, (D, _, E) = len(token), self.heads, self.sizes
        both, v = torch.split(silu(token), [2 * H * D, H * E], -1)
        q, k = unit(both.view(B, 2, H, 1, D)).unbind(1)
        return q * D**-0.5, k, v.view(B, H, 1, E)


def activated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q of length 1/√D, k of length 1, and v."""
    return unit(silu(q)) * q.shape[-1] ** -0.5, unit(silu(k)), silu(v)
