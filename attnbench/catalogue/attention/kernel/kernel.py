"""Attention with any of several kernels in place of exp(q·k/√D), in either order of the products."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.linear.maps import (
    Map,
    elu_plus_one,
    products,
    second_power,
    squared_relu,
    unit_and_one,
)
from attnbench.catalogue.engines.masks import added_to_logits, emptied
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.recurrent.decayed_sums import Chunk
from attnbench.catalogue.engines.recurrent.feature_sums import feature_sums, quotient, with_ones
from attnbench.catalogue.engines.recurrent.stretches import by_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.visible import Visible
from attnbench.contract.variant import Needs, No, Traits, register
from attnbench.errors import Unsupported

_MAPS: dict[str, Map] = {"elu+1": elu_plus_one, "relu": torch.relu, "relu2": squared_relu}
"""Maps of each channel by itself, any two of which make a kernel."""
_NO_SINK = No("not built here: the sum that divides its weights has no term beside those of the keys")


@register(
    "kernel",
    family="kernel",
    source="Tsai et al. 2019, arXiv:1908.11775; Katharopoulos et al. 2020, arXiv:2006.16236, equation 3; for rebased "
    "Aksenov et al. 2024, arXiv:2402.10644",
    formula="oᵢ = Σ_j sim(qᵢ, kⱼ) vⱼ / Σ_j sim(qᵢ, kⱼ);  Φ(Q)·(Φ(K)ᵀV) or (Φ(Q)·Φ(K)ᵀ)·V",
    cost="O(n·R·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        decode=True,
        permutable=True,
        bias=No("a bias belongs to the logit of a pair; but for exp and gaussian these kernels have no logits"),
        given=(
            ("sim=relu", {"rows_sum_to_one": False}),
            ("sim=relu2", {"rows_sum_to_one": False}),
            ("key_map", {"rows_sum_to_one": False}),
            ("sim=exp", {"target": "softmax", "exact": True}),
            ("order=dense", {"cost": "O(n²·d)", "meets": "all keys", "mask": True, "q_start": True, "sink": _NO_SINK}),
            ("form=fla", {"key_padding": No(fla.NO_MASK)}),
        ),
    ),
    settings=(
        "chunk=5",
        "sim=relu2,key_map=elu+1,chunk=5",
        "sim=poly,chunk=5",
        "sim=cosine,chunk=5",
        "sim=rebased,chunk=5",
        "sim=relu,order=dense",
        "sim=poly,degree=4,order=dense",
        "sim=exp,order=dense",
        "sim=gaussian,order=dense",
    ),
)
class Kernel(nn.Module):
    """A kernel chosen by name, its products in either order.

    Attention with sim(q, k) >= 0 in place of exp(q·k/√D), each row divided by its sum: Tsai et al. 2019, "Transformer
    Dissection", and Katharopoulos et al. 2020, "Transformers are RNNs", equation 3. With s = q·k/√D:

    - ``sim=elu+1``, ``relu`` and ``relu2``: φ(q)·φ(k) with φ = elu + 1, max(x, 0) or max(x, 0)², D features each.
      ``key_map`` gives the keys another of these maps than the queries.
    - ``sim=poly``: (1 + s)^p with an even ``degree`` p, 2 by default; 1 + D + D² features where it is 2.
    - ``sim=cosine``: 1 + cos(q, k), D + 1 features.
    - ``sim=rebased``: (q′·k′)² with x′ = γ ⊙ norm(x) + β, norm a layer norm over the channels of a head: Aksenov et
      al. 2024, "Linear Transformers with Learnable Kernel Functions are Better In-Context Models". D² features. γ and β
      are learned, one pair for the queries and one for the keys, which all heads share; γ starts at 1 and β at 0. The
      square is of the product of two tokens, as in the authors' code, and not of each channel.
    - ``sim=exp``: exp(s), which is softmax attention. ``sim=gaussian``: exp(-‖q - k‖²/2√D), softmax attention whose
      keys lose weight by exp(-‖k‖²/2√D). Neither has finitely many features.

    ``order=associated`` sums φ(k)vᵀ first, which takes 2nR·D multiplications and O(n) memory for R features;
    ``order=dense`` forms the matrix of all pairs first, n²(R + D) multiplications and O(n²) memory, and needs no
    features. It is the same operator in two orders: by multiplications the first is cheaper from n = 2RD/(R + D) on.

    q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` -> ``(B, H, N, D)``; a padded key is left out. A row without any
    positive weight gives 0. Decoding keeps the sums, or with ``order=dense`` all keys and values. Only ``order=dense``,
    which has a weight for each pair, takes a mask or later queries. ``form=fla`` is causal, for ``sim=rebased`` with
    ``order=dense``: no pairs exist outside its kernel.

    Differs from the papers: the Gaussian is of q and k over D^¼, as s is; nothing is added to the denominator. In the
    code of flash-linear-attention, rebased.py, queries and keys share γ and β, q and k have 16 channels, and only the
    distinct products of two channels are features.

    Raises:
        Unsupported: ``order=associated`` for a kernel without finitely many features, or with more than D² of them.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        sim: Annotated[
            Literal["elu+1", "relu", "relu2", "poly", "cosine", "rebased", "exp", "gaussian"],
            Field(description="the kernel sim(q, k)"),
        ] = "elu+1",
        order: Annotated[
            Literal["associated", "dense"], Field(description="which product first: φ(K)ᵀV, or φ(Q)φ(K)ᵀ")
        ] = "associated",
        key_map: Annotated[
            Literal["elu+1", "relu", "relu2"] | None,
            Field(description="map of the keys, where it is not that of the queries"),
            Needs("sim=elu+1 or sim=relu or sim=relu2"),
        ] = None,
        degree: Annotated[
            int | None, Field(ge=2, le=8, multiple_of=2, description="power p; none: 2"), Needs("sim=poly")
        ] = None,
        chunk: Annotated[Chunk, Needs("order=associated")] = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__()
        if order == "associated" and (sim in ("exp", "gaussian") or (degree or 2) > 2):
            what = f"(1 + s)^{degree} has D^{degree}" if sim == "poly" else f"{sim} has infinitely many"
            raise Unsupported(f"{what} features, too many to be summed first; write order=dense")
        self.sim, self.order, self.degree, self.form = sim, order, degree or 2, form
        square = (sim, order, shape.causal, shape.mask, shape.q_start) == ("rebased", "dense", True, "none", 0)
        self.fused = {"fla": self._fused} if square and not shape.cross and shape.D <= 128 else {}
        forms.require("kernel", form, self.fused)
        more: dict[str, Map] = {"poly": second_power, "cosine": unit_and_one, "rebased": products}
        self.of_queries: Map = {**_MAPS, **more}.get(sim, torch.relu)
        self.of_keys: Map = self.of_queries if key_map is None else _MAPS[key_map]
        self.query_map, self.key_map = sim, key_map or sim
        self.causal, self.chunk, self.capacity, self.visible = shape.causal, chunk, shape.M, Visible.of(shape)
        self._hides = shape.causal or shape.mask != "none"
        if sim == "rebased":
            self.norm_q, self.norm_k = (nn.LayerNorm(shape.D) for _ in range(2))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        root: float = q.shape[-1] ** 0.5
        s = q @ k.mT / root
        match self.sim:
            case "poly":
                weights = (1 + s) ** self.degree
            case "rebased":
                x, y = (_by_its_moments(x, norm) for x, norm in ((q, self.norm_q), (k, self.norm_k)))
                weights = (x @ y.mT).square()
            case "cosine":
                weights = 1 + q @ k.mT / (q.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[:, :, None])
            case "exp":
                weights = s.exp()
            case "gaussian":
                weights = (-(q[:, :, :, None] - k[:, :, None]).square().sum(-1) / (2 * root)).exp()
            case _:
                weights = _by_channel(q, self.query_map) @ _by_channel(k, self.key_map).mT
        weights = weights * self._seen(q, k)
        weights = weights if key_mask is None else weights * key_mask[:, None, None]
        total = weights.sum(-1, keepdim=True)
        return weights @ v / total.masked_fill(total == 0, 1.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        operations = partial(self._operations, key_mask=key_mask)
        return forms.attend(
            "kernel:sim=rebased", self.form, operations, q, k, v, fast=self.fused if key_mask is None else {}
        )

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x, y = (x.to(v.dtype) for x in self._prepared(q, k))
        return fla.run("rebased", x, y, v)

    def _operations(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None) -> Tensor:
        dtype, out = accumulator(q.dtype), q.dtype
        (q, k), v = self._prepared(q, k), v.to(dtype)
        if self.sim in ("exp", "gaussian"):
            return self._softmax(q, k, v, key_mask).to(out)
        values = with_ones(v, key_mask)
        if self.order == "dense":
            weights = self._weights(q, k)
            return quotient((weights * self._seen(q, k) if self._hides else weights) @ values).to(out)
        compute = partial(
            feature_sums, of_queries=self.of_queries, of_keys=self.of_keys, causal=self.causal, chunk=self.chunk
        )
        return quotient(by_heads(compute, q, k, values)).to(out)

    def _prepared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        dtype = accumulator(q.dtype)
        if self.sim != "rebased":
            return q.to(dtype), k.to(dtype)
        return _normed(q.to(dtype), self.norm_q), _normed(k.to(dtype), self.norm_k)

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        if self.sim == "poly":
            power: Tensor = (1 + q @ k.mT * q.shape[-1] ** -0.5) ** self.degree
            return power
        if self.sim == "rebased":
            return (q @ k.mT).square()
        return self.of_queries(q) @ self.of_keys(k).mT

    def _logits(self, q: Tensor, k: Tensor, first: Tensor) -> Tensor:
        """The logarithm of the kernel, up to a number for each query; ``first`` is a key that all see."""
        scale: float = q.shape[-1] ** -0.5
        if self.sim != "gaussian":
            return (q * scale) @ k.mT
        # Differences alone count; the squares of a part common to all keys would drown these.
        q, k = q - first.detach(), k - first.detach()
        return (q * scale) @ k.mT - k.square().sum(-1)[:, :, None] * (scale / 2)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        first = k[:, :, :1]
        if key_mask is not None:
            first = k[torch.arange(len(k), device=k.device), :, key_mask.int().argmax(1)].unsqueeze(2)
        logits = self._logits(q, k, first)
        if self._hides:
            logits = logits.masked_fill(~self._seen(q, k), hidden(q.dtype))
        if key_mask is None:
            return logits.softmax(-1) @ v
        logits = logits + added_to_logits(key_mask, q.dtype)[:, None, None]
        return (logits.softmax(-1) @ v).masked_fill(~self.visible.seeing(key_mask, q.shape[2]), 0)

    def _seen(self, q: Tensor, k: Tensor) -> Tensor:
        N, M = q.shape[2], k.shape[2]
        return self.visible.pairs(slice(0, N), slice(0, M), M, q.device)

    @torch.no_grad()
    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Cache | tuple[Tensor]:
        """q, k, v ``(B, H, n, D)``, n >= 0. The sums are ``(B, H, R, D + 1)``, float32 at least."""
        if self.order == "dense":
            return Cache.of(k, v, self.capacity)
        dtype = accumulator(k.dtype)
        _, k = self._prepared(q, k)
        return (self.of_keys(k).mT @ with_ones(v.to(dtype)),)

    @torch.no_grad()
    def step(
        self, state: Cache | tuple[Tensor], q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Cache | tuple[Tensor]]:
        out, dtype = q.dtype, accumulator(q.dtype)
        if not isinstance(state, Cache):
            q, k = self._prepared(q, k)
            sums = state[0] + self.of_keys(k).mT @ with_ones(v.to(dtype))
            return quotient(self.of_queries(q) @ sums).to(out), (sums,)
        state = state.append(k, v)
        first = self.visible.span(state.length - 1, state.length)[0]
        (q, keys), values = self._prepared(q, state.keys[:, :, first:]), state.values[:, :, first:].to(dtype)
        if self.sim in ("exp", "gaussian"):
            return (self._logits(q, keys, keys[:, :, :1]).softmax(-1) @ values).to(out), state
        return quotient(self._weights(q, keys) @ with_ones(values)).to(out), state


def _by_channel(x: Tensor, name: str) -> Tensor:
    if name == "elu+1":
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    return x.clamp(min=0) ** (2 if name == "relu2" else 1)


def _normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)


def _by_its_moments(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return norm.weight * centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() + norm.bias
