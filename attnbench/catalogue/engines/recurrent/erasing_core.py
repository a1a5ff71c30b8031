"""A state that fades, is erased from and written to: the operator within the layers that have one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import log
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator, unit
from attnbench.catalogue.engines.recurrent.decayed_sums import Chunk
from attnbench.catalogue.engines.recurrent.erase_and_write import BeforeDecay, erase_and_write
from attnbench.catalogue.engines.recurrent.real_tokens import each_way
from attnbench.catalogue.engines.recurrent.stretches import by_heads
from attnbench.catalogue.engines.recurrent.written_out import erased_and_written
from attnbench.contract.problem.shape import Shape


class TokenArguments(NamedTuple):
    """The arguments of :func:`erase_and_write` that come from tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    erase: Tensor | BeforeDecay
    log_decay: Tensor | None


class Erasing(nn.Module):
    """The recurrence that an operator and the layer around it share: :meth:`rule`, and o_t = S_tᵀ q_t.

    By default the rates are β and log2(α), and S_t = (I - β k kᵀ) Diag(α) S_{t-1} + β k vᵀ; q gets length 1/√D and k
    length 1. With ``groups`` above 1 each head of q and k serves as many heads of values, with a state and rates of
    their own: head h of the H·groups heads of values reads head h // groups. Below, they stand side by side in the
    columns of v ``(..., groups·E)``. No q or k is copied: the groups take turns, and gradients of q and k add up.

    On a GPU a kernel of :mod:`attnbench.catalogue.engines.fla`, named by a subclass, runs it: see :meth:`takes_form`.
    """

    heads: int
    causal: bool
    chunk: int
    fused: str
    """The kernel's name in :mod:`attnbench.catalogue.engines.fla`."""
    place = ""
    groups = 1
    form = "torch"
    at_once = True

    def ready(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The q, k and v of :meth:`rule`, of tokens ``(..., N, ·)``."""
        return unit(q) * q.shape[-1] ** -0.5, unit(k), v

    def rule(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> TokenArguments:
        """The recurrence of :meth:`ready` tokens and of their rates."""
        beta, log_decay = rates
        return TokenArguments(q, k, v, beta, log_decay)

    @staticmethod
    def written_out(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, strict: bool) -> Tensor:
        """One way of ``dense``, of ``(..., n, ·)``; q and k have length 1, and decays are natural logarithms."""
        beta, log_alpha = gates
        return erased_and_written(q, k, beta * v, beta * k, log_alpha, strict=strict)

    def given(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> tuple[Tensor, ...]:
        """The kernel's arguments, from :meth:`ready` tokens and their rates: q first, a decay last."""
        return q, k, v, *rates

    def takes_form(self, form: str) -> None:
        """Choose the form of the recurrence; subclasses call this in their constructors.

        Raises:
            Unsupported: it was named, and there is none for these options, or no device or package for it.
        """
        self.form = forms.require(self.fused, form, self._fast(strict=not self.causal))

    def read(self, *parts: Tensor, strict: bool) -> Tensor:
        """Readings ``(B, H·groups, N, E)`` of tokens q, k, v and their rates; ``strict`` leaves out a token's own."""
        name = f"{self.fused}{self.place}, strict={strict}, groups={self.groups}"
        plain = partial(self._plain, strict=strict)
        return forms.attend(name, self.form, plain, *parts, fast=self._fast(strict=strict))

    def _plain(self, *parts: Tensor, strict: bool) -> Tensor:
        compute = partial(self._read, strict=strict)
        return self._side_by_side([by_heads(compute, *turn) for turn in self._in_turn(*parts)])

    def _fast(self, *, strict: bool) -> dict[str, fla.Kernel]:
        fits = self.chunk == 64 and not (strict and self.groups > 1)
        return {"fla": partial(self._fused, strict=strict)} if fits else {}

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor, strict: bool) -> Tensor:
        q, k, v = self.ready(q, k, v)
        if self.groups > 1:
            v = torch.unflatten(v, 3, (self.groups, -1)).transpose(2, 3).flatten(1, 2)
        parts, kernel = self.given(q, k, v, *rates), partial(fla.run, self.fused)
        faded = self.rule(q, k, v, *rates).log_decay is not None
        return fla.before(kernel, *parts, log_decay=parts[-1] if faded else None) if strict else kernel(*parts)

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
        return erase_and_write(*self.rule(*self.ready(q, k, v), *rates), chunk=self.chunk, strict=strict)[0]

    def passed(self, *parts: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The outputs ``(B, H·groups, n, E)`` of n >= 1 tokens and the last state, in the accumulator.

        ``before`` is the state in front of them ``(B, H·groups, D, E)``; None for 0.
        """
        outputs, states, B = [], [], len(parts[0])
        given: Sequence[Tensor | None] = [None] * self.groups
        if before is not None:
            given = torch.unflatten(before, 1, (-1, self.groups)).unbind(2)
        for turn, start in zip(self._in_turn(*parts), given, strict=True):
            q, k, v, *rates = (part.flatten(0, 1).to(accumulator(parts[0].dtype)) for part in turn)
            first = None if start is None else start.flatten(0, 1)
            read = erase_and_write(*self.rule(*self.ready(q, k, v), *rates), chunk=self.chunk, state=first)
            y, state = (torch.unflatten(z, 0, (B, self.heads)) for z in read)
            outputs.append(y)
            states.append(state)
        return self._side_by_side(outputs), self._side_by_side(states)

    def advanced(self, before: Tensor, parts: tuple[Tensor, ...], *rates: Tensor) -> tuple[Tensor, Tensor]:
        """The reading of one token and the state after it, for :meth:`ready` parts in the state's dtype."""
        shape = before.shape
        if self.groups > 1:  # one axis more: a query and a key for all heads of values of a group
            q, k, v = parts
            parts = q[:, :, None], k[:, :, None], v.view(*k.shape[:2], self.groups, 1, -1)
            before, *own = (torch.unflatten(x, 1, (-1, self.groups)) for x in (before, *rates))
            rates = tuple(own)
        q, k, v, erase, log_decay = self.rule(*parts, *rates)
        left = before.clone() if log_decay is None else before * log_decay.mT.exp2()
        if isinstance(erase, BeforeDecay):
            change = v - erase.erase @ before
        elif erase.ndim == v.ndim:
            change = v - erase @ left
        else:
            change = erase[..., None] * (v - k @ left)
        left.addcmul_(k.mT, change)
        return q @ left, left.view(shape)


class ErasingCore(Erasing):
    """:class:`Erasing` as an operator: q, k ``(B, H, N, D)``, v ``(B, H, N, E)`` and gates to ``(B, H, N, E)``.

    A padded token neither fades nor writes. Not causal: a token also reads later tokens, by a recurrence from the end,
    strictly. A subclass says in ``written_out`` its formula for one way.
    """

    fading = 1
    """The place of log2(α) among the gates."""

    def __init__(self, shape: Shape, *, chunk: Chunk = 64, form: forms.Fla = "auto") -> None:
        super().__init__()
        self.heads, self.causal, self.chunk, self.place = shape.H, shape.causal, chunk, " alone"
        self.takes_form(form)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, key_mask: Tensor | None = None) -> Tensor:
        k, v, *gates = emptied(key_mask, k, v, *gates)  # type: ignore[assignment]  # a list of them from here on
        q, k = (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-300) for x in (q, k))
        gates = [x * log(2) if place == self.fading else x for place, x in enumerate(gates)]  # type: ignore[assignment]
        parts = q, k, v, *gates
        return each_way(lambda way, *x: self.written_out(*x, strict=way == 1), parts, None, causal=self.causal)

    def rates(self, *gates: Tensor) -> tuple[Tensor, ...]:
        """The rates of :meth:`rule` of the gates: by default ``(B, H, N, 1)`` to ``(B, H, N)`` and log2(α) as it is."""
        return tuple(gate if place == self.fading else gate.squeeze(-1) for place, gate in enumerate(gates))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, key_mask: Tensor | None = None) -> Tensor:
        k, v, *kept = emptied(key_mask, k, v, *gates)
        out = self.read(q, k, v, *self.rates(*kept), strict=False)
        if self.causal:
            return out
        turned = [x.flip(2) for x in (q, k, v, *kept)]
        return out + self.read(*turned[:3], *self.rates(*turned[3:]), strict=True).flip(2)

    def begin(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        """The state ``(B, H, D, E)``, float32 at least."""
        return self.prompted(q, k, v, *gates)[1]

    def prompted(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, Tensor]:
        y, state = self.passed(q, k, v, *self.rates(*gates))
        return y.to(v.dtype), state

    def step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, Tensor]:
        if q.shape[2] > 1:
            y, after = self.passed(q, k, v, *self.rates(*gates), before=state)
            return y.to(v.dtype), after
        parts = self.ready(*(x.to(state.dtype) for x in (q, k, v)))
        y, after = self.advanced(state, parts, *self.rates(*gates))
        return y.to(v.dtype), after
