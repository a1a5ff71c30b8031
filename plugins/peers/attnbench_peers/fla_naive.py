"""flash-linear-attention's plain forms, which its own tests compare with, inside our layers: on a CPU, too.

They work in float32 inside, token by token or with the whole matrix. Written for fla-core 0.6.0, which needs triton to
be imported. All are causal. Their layout is ``(B, N, H, D)``, in which natural logarithms of decays are given.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbench import No, Shape, register
from attnbench.catalogue.attention.pairwise.fox import ForgettingAttention
from attnbench.catalogue.attention.recurrence.comba import Comba
from attnbench.catalogue.attention.recurrence.gated_delta_2 import GatedDelta2
from attnbench.catalogue.attention.recurrence.gsa import GSA
from attnbench.catalogue.attention.recurrence.log_linear import LogLinear
from attnbench.catalogue.engines.masks import emptied
from attnbench.contract.variant import VARIANTS
from attnbench_peers.fla_layers import LN2, _recurrence, _turned
from attnbench_peers.needs import first


def _claims(ours: str) -> dict[str, Any]:
    """What the variant says of itself, but for decoding, which would be our code, and for other dtypes."""
    entry = VARIANTS.get(ours)
    decode, padding = No("not offered by this adapter"), No("it attends to padded tokens")
    traits = replace(entry.traits, decode=decode, dtypes=("float32",), knob=None, given=())
    if ours == "fox":
        traits = replace(traits, key_padding=padding)
    facts = {name: getattr(entry, name) for name in ("kind", "family", "formula", "cost")}
    return {**facts, "source": "flash-linear-attention, naive.py", "traits": traits}


@register("peer.gsa.fla", **_claims("gsa"))
class PeerGSA(GSA):
    """The gsa layer around naive_recurrent_gsa of flash-linear-attention, token by token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.attend = _recurrence(shape, "naive", "gsa", "", "naive_recurrent_gsa")

    def _run(self, x: Tensor, _: int) -> Tensor:
        q, k, v, log_decay = _turned(*self._parts(x))
        g = log_decay * LN2
        return first(self.attend(q, k, v, -torch.expm1(g), g, scale=1.0)).flatten(2)


@register("peer.comba.fla", **_claims("comba"))
class PeerComba(Comba):
    """The comba layer around naive_recurrent_comba of flash-linear-attention, with reads after the decay.

    Ours reads before it: what is read after it is the same for a key that is divided by the decay.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.attend = _recurrence(shape, "naive", "comba", "", "naive_recurrent_comba")

    def _run(self, projected: Tensor, direction: int) -> Tensor:
        tokens, gates = self._split(projected)
        q, k, v = self.ready(*self._heads(self.short(tokens)))
        beta, log_decay, b, p = self.rates(gates)
        q, erase = q - p[..., None] * q.shape[-1] ** -0.5 * k, b[..., None] * k * (-log_decay).exp2()
        q, k, v, erase, beta, g = _turned(q, k, v, erase, beta, log_decay.squeeze(-1) * LN2)
        return first(self.attend(q, k, v, erase, beta, g, scale=1.0)).flatten(2)


@register("peer.gated-delta-2.fla", **_claims("gated-delta-2"))
class PeerGatedDelta2(GatedDelta2):
    """The gated-delta-2 layer around naive_recurrent_gdn2 of flash-linear-attention, token by token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.attend = _recurrence(shape, "naive", "gdn2", "", "naive_recurrent_gdn2")

    def _run(self, projected: Tensor, direction: int) -> Tensor:
        tokens, gates = self._split(projected)
        q, k, v = self.ready(*self._heads(self.short(tokens)))
        b, w, log_decay = self.rates(gates)
        return first(self.attend(*_turned(q, k, v, log_decay * LN2, b, w), scale=1.0)).flatten(2)


@register("peer.log-linear.fla", **_claims("log-linear"))
class PeerLogLinear(LogLinear):
    """The log-linear layer around naive_log_linear_attn of flash-linear-attention, the whole matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.attend = _recurrence(shape, "naive", "log_linear_attn", "", "naive_log_linear_attn")

    def _run(self, u: Tensor, _: int) -> Tensor:
        q, k, v, log_decay, weights = self._parts(u)
        q, k = (x.expand(-1, self.heads, -1, -1) for x in (q, k))
        q, k, v, g, weights = _turned(q, k, v, log_decay[..., 0] * LN2, weights)
        return first(self.attend(q, k, v, g, weights, scale=1.0)).flatten(2)


@register("peer.fox.fla", **_claims("fox"))
class PeerFoX(ForgettingAttention):
    """The fox layer around naive_forgetting_attn of flash-linear-attention, the whole matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.attend = _recurrence(shape, "naive", "forgetting_attn", "", "naive_forgetting_attn")

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        q, k, v, log_f = self._parts(x)
        return self.joined(_turned(first(self.attend(*_turned(q, k, v, log_f[..., 0]))))[0])
