"""DeltaFormer: softmax attention to values that each token has first reduced by its finds among the earlier ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.decoding.kv_cache import Cache, attend
from attnbench.catalogue.engines.head_layer import LayerFromEitherEnd
from attnbench.catalogue.engines.pair_scores import PRODUCT, Chunk, attend_by_score
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.recurrent.real_tokens import FromEitherEnd
from attnbench.catalogue.engines.tiling import row_blocks
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import TAKEN
from attnbench.contract.variant import Core, No, Traits, register

_ROWS = 64
"""Tokens solved at once."""
_Asks = Annotated[
    Literal["query", "key"], Field(description="which vector of a token reads the earlier ones in the first step")
]
_TRAITS = Traits(
    target="other",
    cross=No("what a token takes off its value is found in its own sequence"),
    bias=No("the paper adds nothing to its logits"),
    mask=No("it hides later tokens and padding alone"),
    sink=No("the paper's two softmaxes have none"),
    decode=True,
    rows_sum_to_one=False,
    own_form_both_ways="two passes, one from either end, added; the paper defines the causal form only",
)


class LessTheFound(FromEitherEnd):
    """Softmax attention to values less their reading of the past.

    q, k ``(B, H, N, D)``, v ``(B, H, N, E)`` and β ``(B, H, N, 1)``: u_i = v_i - β_i Σ_{j<i} p_ij u_j with the softmax
    p of q·k/√D over j < i, or of k·k/√D with ``asks=key``; o is softmax attention to u, with the token itself. The
    layer's projections are left out. A padded token is passed over as if it were absent. Not causal: two passes, one
    from either end, added, a token's reading of itself twice.

    Differs from the paper: the attention alone is here, without its layer.
    """

    def written_out(self, *parts: Tensor) -> Tensor:
        q, k, v, beta = parts
        asking, u = k if self.asks == "key" else q, v[:, :, :1]
        for i in range(1, q.shape[2]):
            weights = (asking[:, :, i, None] @ k[:, :, :i].mT / q.shape[-1] ** 0.5).softmax(-1)
            u = torch.cat([u, v[:, :, i, None] - beta[:, :, i, None] * (weights @ u)], 2)
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        out: Tensor = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, float("-inf")).softmax(-1) @ u
        return out

    def __init__(self, shape: Shape, *, asks: _Asks = "query", chunk: Chunk = None, form: forms.Fla = "auto") -> None:
        super().__init__()
        fits = shape.D in fla.WIDTHS and shape.E == shape.D and chunk is None
        self.fused = {"fla": partial(fla.run, "deltaformer", asks=asks)} if fits else {}
        self.form = forms.require("deltaformer", form, self.fused)
        self.causal, self.capacity, self.chunk, self.asks = shape.causal, shape.N, chunk, asks

    def _ready(self, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q over √D, k, v and the first step's queries ``(B, H, n, ·)``, and β ``(B, H, n, 1)``."""
        q, k, v, beta = (x.to(accumulator(x.dtype)) for x in parts)
        scale = q.shape[-1] ** -0.5
        q = q * scale
        return q, k, v, k * scale if self.asks == "key" else q, beta

    def remaining(self, k: Tensor, v: Tensor, asking: Tensor, beta: Tensor) -> Tensor:
        solve = _Remaining.apply
        u: Tensor = solve(*(y.flatten(0, 1) for y in (asking, k, v, beta)))  # type: ignore[no-untyped-call]  # untyped in torch
        return u.view_as(v)

    def one_way(self, *parts: Tensor) -> Tensor:
        name = f"deltaformer, asks={self.asks}"
        return forms.attend(name, self.form, self._by_blocks, *parts, fast=self.fused)

    def _by_blocks(self, *parts: Tensor) -> Tensor:
        q, k, v, asking, beta = self._ready(*parts)
        u = self.remaining(k, v, asking, beta)
        y = attend_by_score(PRODUCT, q, k, u, causal=True, key_mask=None, chunk=self.chunk)
        return y.to(parts[2].dtype)

    @torch.no_grad()
    def begin(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Cache:
        """k and u of n >= 0 tokens, float32 at least."""
        _, k, v, asking, beta = self._ready(q, k, v, *gates)
        return Cache.of(k, self.remaining(k, v, asking, beta) if k.shape[2] else v, self.capacity)

    @torch.no_grad()
    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, Cache]:
        dtype, (q, k, v, asking, beta) = v.dtype, self._ready(q, k, v, *gates)
        root = q.shape[-1] ** 0.5  # the cache's attention divides by it
        found = attend(asking * root, state.keys, state.values) if state.length else 0.0
        state = state.append(k, v - beta * found)
        return attend(q * root, state.keys, state.values).to(dtype), state

    @staticmethod
    def cached_bytes(shape: Shape, width: int, **_: object) -> int:
        """A token's keys and the rest of its values, float32 at least."""
        return shape.K * (shape.D + shape.E) * max(width, 4)


@register(
    "deltaformer",
    kind="mixer",
    family="pairwise",
    also=("recurrence",),
    source="Zhong et al. 2025, arXiv:2505.19488; flash-linear-attention, deltaformer.py",
    formula="uᵢ = vᵢ - βᵢ·Σ_{j<i} softmax_{j<i}(qᵢ·kⱼ/√D) uⱼ,  oᵢ = Σ_{j<=i} softmax_{j<=i}(qᵢ·kⱼ/√D) uⱼ",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=replace(_TRAITS, stochastic=True),
    settings=("chunk=5", "chunk=5,asks=key"),
    core=Core(
        make=LessTheFound,
        formula="uᵢ = vᵢ - βᵢ·Σ_{j<i} softmax_{j<i}(qᵢ·kⱼ/√D) uⱼ,  oᵢ = Σ_{j<=i} softmax_{j<=i}(qᵢ·kⱼ/√D) uⱼ",
        traits=replace(
            _TRAITS,
            reads=(TAKEN,),
            shares=No("a token's query decides what is taken off its value, which differs by head; asks=key shares"),
            given=(("asks=key", {"shares": "head by head"}), *_TRAITS.given),
        ),
        settings=("chunk=5", "chunk=5,asks=key"),
    ),
)
class DeltaFormer(LayerFromEitherEnd):
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

    def __init__(self, shape: Shape, *, asks: _Asks = "query", chunk: Chunk = None, form: forms.Fla = "auto") -> None:
        super().__init__()
        C, self.heads, self.causal = shape.C, shape.H, shape.causal
        self.core = LessTheFound(shape, asks=asks, chunk=chunk, form=form)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.beta = nn.Linear(C, shape.H)
        self.out = nn.Linear(C, C, bias=False)

    def plainly(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = *self.qkv(x).chunk(3, 1), torch.sigmoid(self.beta(x))
        return tuple(torch.unflatten(y, 1, (self.heads, -1)) for y in parts)

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return *self.projected(x), torch.sigmoid(self.beta(x).to(accumulator(x.dtype))).mT[..., None]

    cached_bytes = staticmethod(LessTheFound.cached_bytes)


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
