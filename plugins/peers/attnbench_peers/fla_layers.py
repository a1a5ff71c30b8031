"""flash-linear-attention inside our layers: the same projections, gates and norms around its recurrence.

``form=kernel`` is its Triton code, which needs an NVIDIA GPU. ``form=naive`` is the plain form that its own tests
compare with, in float32 inside; it runs on a CPU as well, wherever fla-core and triton can be imported. Written for
fla-core 0.6.0. All are causal. Their layout is ``(B, N, H, D)``; q, k and v leave the projections in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize, silu

from attnbench import No, Shape, Traits, Unsupported, register
from attnbench.catalogue.attention.recurrence.delta import Delta
from attnbench.catalogue.attention.recurrence.gated_delta import GatedDelta
from attnbench.catalogue.attention.recurrence.gla import GLA
from attnbench.catalogue.attention.recurrence.kda import KimiDeltaAttention
from attnbench.catalogue.attention.recurrence.retnet import RetNet
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.recurrent.erasing_layer import ErasingLayer
from attnbench.contract.variant import VARIANTS
from attnbench_peers.needs import a_gpu, first, function

INSTALL = "fla.ops is in fla-core: pip install --no-deps fla-core==0.6.0, and triton where torch did not bring it"
LN2 = log(2.0)
Form = Annotated[
    Literal["kernel", "naive"], Field(description="its Triton code for a GPU, or the plain form of its tests")
]


def _claims(ours: str, *, naive: bool = True) -> dict[str, Any]:
    """What the variant says of itself, but for decoding, which would be our code, and for numbers on a CPU."""
    entry = VARIANTS.get(ours)
    traits: Traits = replace(
        entry.traits,
        decode=No("not offered by this adapter"),
        dtypes=(),
        knob=None,
        given=(("form=naive", {"dtypes": ("float32",)}),) if naive else (),
    )
    return {
        "kind": entry.kind,
        "family": entry.family,
        "formula": entry.formula,
        "cost": entry.cost,
        "traits": traits,
    }


def _recurrence(shape: Shape, form: str, module: str, kernel: str, naive: str = "") -> Callable[..., Any]:
    """The function of ``fla.ops.module``, or of its ``naive``.

    Raises:
        Unsupported: not causal, no GPU for the kernel, or the package is missing.
    """
    if not shape.causal:
        raise Unsupported("it is a causal form")
    if form == "naive":
        return function(f"fla.ops.{module}.naive", naive, INSTALL)
    a_gpu("flash-linear-attention")
    return function(f"fla.ops.{module}", kernel, INSTALL)


def _turned(*parts: Tensor) -> tuple[Tensor, ...]:
    """``(B, H, N, ...)`` as ``(B, N, H, ...)``, and back."""
    return tuple(part.transpose(1, 2) for part in parts)


@register("peer.gla.fla", source="flash-linear-attention, chunk_gla", **_claims("gla"))
class PeerGLA(GLA):
    """The gla layer around chunk_gla of flash-linear-attention, or its naive form, token by token."""

    def __init__(self, shape: Shape, *, form: Form = "kernel") -> None:
        super().__init__(shape)
        self.attend = _recurrence(shape, form, "gla", "chunk_gla", "naive_recurrent_gla")

    def _mix(self, *parts: Tensor) -> Tensor:
        q, k, v, log_decay = _turned(*parts)
        return _turned(first(self.attend(q, k, v, (log_decay * LN2).to(q.dtype))))[0]


@register("peer.delta.fla", source="flash-linear-attention, chunk_delta_rule", **_claims("delta", naive=False))
class PeerDelta(Delta):
    """The delta layer around chunk_delta_rule of flash-linear-attention, on a GPU only."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.attend = _recurrence(shape, "kernel", "delta_rule", "chunk_delta_rule")

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        q, k, v, beta = _turned(*self._parts(x, key_mask))
        q, k = (normalize(silu(y), dim=-1) for y in (q, k))
        return self._finish(_turned(first(self.attend(q, k, v, beta.to(q.dtype), scale=1.0)))[0])


class _Erasing(ErasingLayer):
    """The recurrence alone is the package's, in a layer that erases and writes."""

    attend: Callable[..., Any]

    def _run(self, projected: Tensor, direction: int) -> Tensor:
        tokens, gates = self._split(projected)
        q, k, v = _turned(*self.ready(*self._heads(self.short(tokens))))
        beta, log_decay = _turned(*self.rates(gates))
        decay = log_decay.squeeze(-1) if log_decay.shape[-1] == 1 else log_decay
        # In numbers as exact as the layer's own, since a sum of many of them stands in an exponent.
        return first(self.attend(q, k, v, g=decay * LN2, beta=beta.to(q.dtype), scale=1.0)).to(v.dtype).flatten(2)


@register("peer.gated-delta.fla", source="flash-linear-attention, chunk_gated_delta_rule", **_claims("gated-delta"))
class PeerGatedDelta(_Erasing, GatedDelta):
    """The gated-delta layer around chunk_gated_delta_rule of flash-linear-attention, or its naive form in chunks."""

    def __init__(self, shape: Shape, *, form: Form = "kernel") -> None:
        super().__init__(shape)
        names = ("chunk_gated_delta_rule", "naive_chunk_gated_delta_rule")
        self.attend = _recurrence(shape, form, "gated_delta_rule", *names)


@register("peer.kda.fla", source="flash-linear-attention, chunk_kda", **_claims("kda"))
class PeerKDA(_Erasing, KimiDeltaAttention):
    """The kda layer around chunk_kda of flash-linear-attention, or its naive form, token by token."""

    def __init__(self, shape: Shape, *, form: Form = "kernel") -> None:
        super().__init__(shape)
        self.attend = _recurrence(shape, form, "kda", "chunk_kda", "naive_recurrent_kda")


@register("peer.retnet.fla", source="flash-linear-attention, chunk_retention", **_claims("retnet"))
class PeerRetNet(RetNet):
    """chunk_retention of flash-linear-attention without rotation, or its naive form with the whole matrix.

    The variant is ``retnet:rotation=false``. This is the core alone, on q, k and v ``(B, H, N, D)``: a view of
    ``heads-inside`` inputs is its layout.
    """

    def __init__(self, shape: Shape, *, form: Form = "kernel") -> None:
        super().__init__(shape, rotation=False)
        if shape.cross:
            raise Unsupported("chunks of queries and keys stand side by side")
        self.heads_first = form == "naive"
        self.attend = _recurrence(shape, form, "retention", "chunk_retention", "naive_retention")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (k, v) = emptied(key_mask, k, v)
        if self.heads_first:
            return first(self.attend(q, k, v))
        return _turned(first(self.attend(*_turned(q, k, v))))[0]
