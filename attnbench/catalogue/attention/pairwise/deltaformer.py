"""DeltaFormer: softmax attention to values that each token has first reduced by its finds among the earlier ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from attnbench.catalogue.engines.decoding.kv_cache import Cache, attend
from attnbench.catalogue.engines.head_layer import HeadLayer
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.pair_scores import PRODUCT, attend_by_score
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.recurrent.real_tokens import alone, both_ways
from attnbench.catalogue.engines.tiling import row_blocks
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register

_ROWS = 64
"""Tokens solved at once."""


@register(
    "deltaformer",
    kind="mixer",
    family="pairwise",
    also=("recurrence",),
    source="Zhong et al. 2025, arXiv:2505.19488; flash-linear-attention, deltaformer.py",
    formula="uᵢ = vᵢ - βᵢ·Σ_{j<i} softmax_{j<i}(qᵢ·kⱼ/√D) uⱼ,  oᵢ = Σ_{j<=i} softmax_{j<=i}(qᵢ·kⱼ/√D) uⱼ",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        cross=No("what a token takes off its value is found in its own sequence"),
        bias=No("the paper adds nothing to its logits"),
        mask=No("it hides later tokens and padding alone"),
        sink=No("the paper's two softmaxes have none"),
        decode=True,
        stochastic=True,
        rows_sum_to_one=False,
        own_form_both_ways="two passes, one from either end, added; the paper defines the causal form only",
    ),
    settings=("chunk=5", "chunk=5,asks=key"),
)
class DeltaFormer(HeadLayer):
    """The delta rule with softmax: values less their reading of the past.

    Zhong et al. 2025, "Understanding Transformer from the Perspective of Associative Memory". Token i first reads the
    earlier tokens by softmax attention, itself left out, and takes the share β_i of its reading off its value:
    u_i = v_i - β_i Σ_{j<i} p_ij u_j. The output is softmax attention to u, with the token itself. With β = 0 it is
    softmax attention. ``asks=query`` lets the query read in both steps; with ``asks=key`` the key reads in the first.

    x ``(B, N, C)`` gives q, k and v by a C × C projection each and β = σ(w·x + b), one for each head; the output
    projection is C × C. A padded token is passed over as if it were absent. u is a triangular system, solved for 64
    tokens at a time, forward and backward: the work is quadratic, and memory is O(n·d). ``chunk`` cuts the second step.
    Decoding keeps k and u of all tokens.

    Not causal: a second pass runs over the turned sequence, and what both give is added, a token's reading of itself
    twice; the paper defines the causal form.

    Differs from the authors' code: β goes through a sigmoid, without which u may grow with every token; there q and k
    are turned by their places.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        asks: Annotated[
            Literal["query", "key"],
            Field(description="which vector of a token reads the earlier ones in the first step"),
        ] = "query",
        chunk: Annotated[
            int | None, Field(ge=1, description="queries and keys of a tile. Moves time and memory only")
        ] = None,
    ) -> None:
        super().__init__()
        C = shape.C
        self.heads, self.causal, self.capacity, self.chunk = shape.H, shape.causal, shape.N, chunk
        self.asks = asks
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.beta = nn.Linear(C, shape.H)
        self.out = nn.Linear(C, C, bias=False)

    @alone
    def dense(self, x: Tensor) -> Tensor:
        read = []
        for side in (x,) if self.causal else (x, x.flip(0)):
            q, k, v = (torch.unflatten(y, 1, (self.heads, -1)).transpose(0, 1) for y in self.qkv(side).chunk(3, 1))
            beta = torch.sigmoid(self.beta(side)).T
            asking = k if self.asks == "key" else q
            u = v[:, :1]
            for i in range(1, len(x)):
                weights = (asking[:, i, None] @ k[:, :i].mT / q.shape[-1] ** 0.5).softmax(-1)
                u = torch.cat([u, v[:, i, None] - beta[:, i, None, None] * (weights @ u)], 1)
            future = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
            weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, float("-inf")).softmax(-1)
            y = (weights @ u).transpose(0, 1).flatten(1)
            read.append(y if side is x else y.flip(0))
        return self.out(torch.stack(read).sum(0))

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        return self.out(both_ways(self._run, x, key_mask, causal=self.causal))

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q over √D, k, v and the first step's queries ``(B, H, n, D)``, and β ``(B, H, n, 1)``."""
        q, k, v = self.projected(x)
        dtype = accumulator(x.dtype)
        scale = q.shape[-1] ** -0.5
        q, k, v = q.to(dtype) * scale, k.to(dtype), v.to(dtype)
        asking = k * scale if self.asks == "key" else q
        return q, k, v, asking, torch.sigmoid(self.beta(x).to(dtype)).mT[..., None]

    def _remaining(self, k: Tensor, v: Tensor, asking: Tensor, beta: Tensor) -> Tensor:
        solve = _Remaining.apply
        u: Tensor = solve(*(y.flatten(0, 1) for y in (asking, k, v, beta)))  # type: ignore[no-untyped-call]  # untyped in torch
        return u.view_as(v)

    def _run(self, x: Tensor, _: int) -> Tensor:
        q, k, v, asking, beta = self._parts(x)
        u = self._remaining(k, v, asking, beta)
        y = attend_by_score(PRODUCT, q, k, u, causal=True, key_mask=None, chunk=self.chunk)
        return y.transpose(1, 2).flatten(2).to(x.dtype)

    @torch.no_grad()
    def begin(self, x: Tensor) -> Cache:
        """k and u of x ``(B, n, C)``, n >= 0, float32 at least."""
        _, k, v, asking, beta = self._parts(x)
        return Cache.of(k, self._remaining(k, v, asking, beta) if x.shape[1] else v, self.capacity)

    @torch.no_grad()
    def step(self, state: Cache, x: Tensor) -> tuple[Tensor, Cache]:
        q, k, v, asking, beta = self._parts(x)
        root = q.shape[-1] ** 0.5  # the cache's attention divides by it
        found = attend(asking * root, state.keys, state.values) if state.length else 0.0
        state = state.append(k, v - beta * found)
        y = attend(q * root, state.keys, state.values)
        return self.out(y.transpose(1, 2).flatten(2).to(x.dtype)), state

    @staticmethod
    def cached_bytes(shape: Shape, width: int, **_: object) -> int:
        """A token's keys and the rest of its values, float32 at least."""
        return 2 * shape.C * max(width, 4)


def _taken(asking: Tensor, k: Tensor, beta: Tensor) -> Tensor:
    """β times the weights of all earlier keys, ``(G, c, m)``, for the last c of m tokens; 0 from itself on."""
    m = k.shape[1]
    later = torch.ones(asking.shape[1], m, dtype=torch.bool, device=k.device).triu(m - asking.shape[1])
    logits = (asking @ k.mT).masked_fill(later, hidden(k.dtype))
    return beta * logits.softmax(-1).masked_fill(later, 0.0)


class _Remaining(torch.autograd.Function):
    """u of the first step's queries and k ``(G, N, D)``, v ``(G, N, E)``, β ``(G, N, 1)``, in blocks of :data:`_ROWS`.

    (I + T) u = v, with T the weights that are taken off. Its transpose gives v's gradient, last block first, and the
    outer product of that and -u the gradient of T.
    """

    @staticmethod
    def forward(ctx: Any, asking: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        u = torch.empty_like(v, memory_format=torch.contiguous_format)
        for rows in row_blocks(v.shape[1], _ROWS):
            taken = _taken(asking[:, rows], k[:, : rows.stop], beta[:, rows])
            rest = v[:, rows] - taken[..., : rows.start] @ u[:, : rows.start]
            own = taken[..., rows.start :]
            u[:, rows] = torch.linalg.solve_triangular(own, rest, upper=False, unitriangular=True)
        ctx.save_for_backward(asking, k, beta, u)
        return u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        asking, k, beta, u = ctx.saved_tensors
        dv, found = grad.clone(), [torch.zeros_like(y) for y in (asking, k, beta)]
        for rows in reversed(row_blocks(u.shape[1], _ROWS)):
            seen = slice(0, rows.stop)
            places = (rows, seen, rows)
            leaves = [y[:, place].detach().requires_grad_() for y, place in zip((asking, k, beta), places, strict=True)]
            with torch.enable_grad():
                taken = _taken(*leaves)
            own = taken.detach()[..., rows.start :]
            dv[:, rows] = torch.linalg.solve_triangular(own.mT, dv[:, rows], upper=True, unitriangular=True)
            dv[:, : rows.start] -= taken.detach()[..., : rows.start].mT @ dv[:, rows]
            parts = torch.autograd.grad(taken, leaves, -dv[:, rows] @ u[:, seen].mT)
            for y, place, part in zip(found, places, parts, strict=True):
                y[:, place] += part
        return found[0], found[1], dv, found[2]
