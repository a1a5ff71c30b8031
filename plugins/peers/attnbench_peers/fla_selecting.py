"""flash-linear-attention's plain forms of what chooses keys and of RWKV-7, and its kernel of MoBA.

Written for fla-core 0.6.0, which needs triton to be imported, on a CPU as well. The plain forms work in float32
inside, query by query or token by token. All are causal; ``(B, N, H, D)`` is their layout but for that of RWKV-7.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from attnbench import No, Shape, Traits, Unsupported, register
from attnbench.catalogue.attention.recurrence.rwkv7 import RWKV7
from attnbench.catalogue.attention.selection.indexed import IndexedAttention
from attnbench.catalogue.attention.selection.moba import MoBA
from attnbench.catalogue.attention.selection.nsa import NSA
from attnbench.catalogue.engines.gathered.key_index import Index
from attnbench_peers.fla_layers import INSTALL, LN2, _recurrence, _turned
from attnbench_peers.fla_naive import _claims
from attnbench_peers.needs import a_gpu, first, function, half_precision

_PADDING = No("it attends to padded tokens")


def _facts(ours: str, **instead: Any) -> dict[str, Any]:
    """What the variant says of itself, but for some traits."""
    facts = _claims(ours)
    traits: Traits = facts["traits"]
    return {**facts, "traits": replace(traits, key_padding=_PADDING, **instead)}


@register("peer.rwkv7.fla", **{**_claims("rwkv7"), "source": "flash-linear-attention, dplr/naive.py"})
class PeerRWKV7(RWKV7):
    """The rwkv7 layer around dplr_recurrence of flash-linear-attention, token by token.

    It reads -κ of the state before it fades, and adds a ⊙ κ times that; its layout is ``(B, H, N, D)``.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.recurrence = _recurrence(shape, "naive", "generalized_delta_rule.dplr", "", "dplr_recurrence")

    def _run(self, x: Tensor, _: int) -> Tensor:
        parts, gate = self._parts(x, pad(x[:, :-1], (0, 0, 1, 0)))
        r, k, v, kappa, a, log_decay = parts
        kappa = normalize(kappa, dim=-1)
        root = r.shape[-1] ** 0.5  # it divides queries by this
        y = first(self.recurrence(r * root, k, v, -kappa, a * kappa, log_decay * LN2))
        return self._finish(y, parts, gate)


@register("peer.indexed.fla", **_facts("indexed", exact_with=("top_k={n}",)))
class PeerDSA(nn.Module):
    """naive_dsa of flash-linear-attention, which scores and masks all pairs, with our random index.

    Of keys of equal index it takes any, and the variant the latest: so it is not held to the variant's formula.
    """

    def __init__(
        self, shape: Shape, *, top_k: Annotated[int, Field(ge=1, description="keys kept for each query")] = 256
    ) -> None:
        super().__init__()
        self.ours, self.top_k = IndexedAttention(shape, top_k=top_k), top_k
        self.naive = _recurrence(shape, "naive", "dsa", "", "naive_dsa")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            index: Index = cast(Any, self.ours.index)(q, k)
        return _turned(first(self.naive(*_turned(q, k, v), index.a, index.b, index.w, topk=self.top_k)))[0]


_SELECTED: dict[str, Any] = {"target": "softmax", "stochastic": False, "rows_sum_to_one": True, "exact_with": ()}
_POOLED = ("branch=compressed", {"target": "other", "rows_sum_to_one": False})


@register("peer.nsa.fla", **_facts("nsa", **_SELECTED, given=(_POOLED,)))
class PeerNSA(nn.Module):
    """The pooled or the selected branch of flash-linear-attention's plain NSA, on a CPU, too.

    Its third branch, and the function that adds up all three, call kernels for a GPU. It is the variant
    ``nsa:branch=selected`` or ``branch=compressed`` with ``length``, ``stride`` and ``block`` alike. Its blocks that
    are always taken score 1; where another's weight rounds to 1 as well it may take their place, so that the selected
    branch is not held to the variant's formula.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, Field(ge=1, description="tokens of a block")] = 64,
        top_n: Annotated[int, Field(ge=3, description="blocks selected, with the three that always are")] = 16,
        branch: Annotated[Literal["selected", "compressed"], Field(description="which of the branches")] = "selected",
    ) -> None:
        super().__init__()
        self.ours = NSA(shape, block=block, length=block, stride=block, top_n=top_n, branch=branch)
        self.compress = _recurrence(shape, "naive", "nsa", "", "naive_nsa_compression")
        self.choose, self.attend = (
            function("fla.ops.nsa.naive", f"naive_nsa_{name}", INSTALL) for name in ("topk", "selection")
        )
        self.block, self.top_n = block, top_n
        if branch == "compressed":
            self.dense = self.ours.dense

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        ours, scale = self.ours, q.shape[-1] ** -0.5
        keys, values = ours._pool(k, ours.of_keys), ours._pool(v, ours.of_values)
        if ours.branch == "compressed":
            return _turned(first(self.compress(*_turned(q, keys, values), self.block, scale)))[0]
        with torch.no_grad():  # one more block where the last is not whole: no query sees its mean
            whole = pad(keys, (0, 0, 0, -(-k.shape[2] // self.block) - keys.shape[2]))
            chosen = self.choose(*_turned(q, whole), self.top_n, self.block, scale)
        return _turned(first(self.attend(*_turned(q, k, v), chosen, self.block, scale)))[0]


@register(
    "peer.moba.fla",
    **_facts("moba", dtypes=(), exact_with=(), sink=False, shares=No("it has as many heads of keys as of queries")),
)
class PeerMoBA(nn.Module):
    """parallel_moba of flash-linear-attention, which joins calls of flash-attn; on a GPU only.

    All sequences of a batch stand one after the other.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, Field(ge=1, description="tokens per block")] = 64,
        blocks: Annotated[
            int, Field(ge=2, description="blocks that a query attends to; for 1 it attends to all keys")
        ] = 4,
    ) -> None:
        super().__init__()
        if not shape.causal:
            raise Unsupported("it is a causal form")
        a_gpu("flash-linear-attention")
        self.block, self.blocks = block, blocks
        self.attend = function("fla.ops.moba", "parallel_moba", f"{INSTALL}; and flash-attn")
        self.dense = MoBA(shape, block=block, blocks=blocks).dense

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        half_precision("flash-attn", q)
        B, _, N, _ = q.shape
        ends = torch.arange(0, (B + 1) * N, N, dtype=torch.int32, device=q.device)
        packed = (part.flatten(0, 1)[None] for part in _turned(q, k, v))
        out: Tensor = self.attend(*packed, ends, max_seqlen=N, chunk_size=self.block, topk=self.blocks)
        return torch.unflatten(out[0], 0, (B, N)).transpose(1, 2)
