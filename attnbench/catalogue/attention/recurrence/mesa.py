"""MesaNet: each query is solved against the keys so far, so that values are read by regularised least squares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid, silu, softplus

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.head_layer import LayerFromEitherEnd
from attnbench.catalogue.engines.precision import LOG2E, accumulator, unit
from attnbench.catalogue.engines.recurrent.decayed_sums import Chunk, last_state, states_before
from attnbench.catalogue.engines.recurrent.fading import faded
from attnbench.catalogue.engines.recurrent.real_tokens import FromEitherEnd
from attnbench.catalogue.engines.recurrent.stretches import by_heads, rows_in_turn, stretches
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import BETA, DECAY
from attnbench.contract.traits import Given
from attnbench.contract.variant import CORE, SUMMED, Core, register

Steps = Annotated[int | None, Field(ge=1, description="steps of conjugate gradients; none: solve exactly")]

_GIVEN: Given = (("steps", {"cost": "O(n·s·d²)"}), *SUMMED.given)
_LEAST = 0.25
"""Lowest entry of Λ."""
_MOST = 128
"""Widest head that flash-linear-attention's kernel takes."""

Solve = Callable[[Tensor], Tensor]


class MesaRule(FromEitherEnd):
    """Queries solved against the keys so far, which fade.

    q, k ``(B, H, N, D)``, v ``(B, H, N, E)``, β and log2(γ) ``(B, H, N, 1)``: o_t = G_tᵀ (H_t + I)⁻¹ q_t with
    H_t = γ_t H_{t-1} + β_t k_t k_tᵀ and G_t = γ_t G_{t-1} + β_t k_t v_tᵀ. q and k get length 1 here, as in the layer,
    whose norm is left out, and in which the penalty Λ is a parameter that starts at the I of here. ``steps`` and
    ``form`` are those of the layer. A padded token neither fades nor writes.

    Not causal: two recurrences, one from either end, added, a token's reading of itself twice.

    Differs from the paper: the penalty is I.
    """

    def written_out(self, *parts: Tensor) -> Tensor:
        """The sums of all tokens, N × D × D numbers, and a system for each."""
        q, k, v, beta, log2_decay, penalty = self._penalised(*parts)
        sizes = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (q, k))
        q, k = (x / size.masked_fill(size == 0, 1.0) for x, size in zip((q, k), sizes, strict=True))
        total = log2_decay.cumsum(2)
        left = torch.exp2((total - total.mT).tril()).tril() * beta.mT
        keys, values = (torch.einsum("bhij,bhjd,bhje->bhide", left.to(k.dtype), k, x) for x in (k, v))
        out: Tensor = (values.mT @ torch.linalg.solve(keys + torch.diag_embed(penalty), q[..., None]))[..., 0]
        return out

    def __init__(self, shape: Shape, *, steps: Steps = None, chunk: Chunk = 64, form: forms.Fla = "auto") -> None:
        super().__init__()
        fused = partial(fla.run, "mesa", max_CG_iteration=steps or shape.D)  # as many steps as channels are exact
        self.fused = {"fla": fused} if shape.D <= _MOST and chunk == 64 else {}
        self.form = forms.require("mesa", form, self.fused)
        self.causal, self.chunk, self.steps = shape.causal, chunk, steps
        self.register_buffer("penalty", torch.ones(1, shape.H, 1, shape.D), persistent=False)
        self.penalty: Any

    def _penalised(self, *parts: Tensor) -> tuple[Tensor, ...]:
        return parts if len(parts) == 6 else (*parts, self.penalty.to(accumulator(self.penalty.dtype)))

    def one_way(self, *parts: Tensor) -> Tensor:
        parts, name = self._penalised(*parts), f"mesa alone:steps={self.steps}"
        return forms.attend(name, self.form, self.by_chunks, *parts, fast=self.fused).to(parts[2].dtype)

    def by_chunks(self, *parts: Tensor) -> Tensor:
        return by_heads(partial(mesa_attention, chunk=self.chunk, steps=self.steps), *_ready(*parts))

    @torch.no_grad()
    def begin(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        """H and G joined, ``(B, H, D, D + E)``, after n >= 0 tokens, float32 at least."""
        _, k, v, beta, log_decay, _ = _ready(*self._penalised(q, k, v, *gates))
        return last_state(beta * k, torch.cat([k, v], -1), log_decay)

    @torch.no_grad()
    def step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, Tensor]:
        dtype, (q, k, v, beta, log_decay, penalty) = v.dtype, _ready(*self._penalised(q, k, v, *gates))
        state = torch.addcmul(state * log_decay.exp2(), (beta * k).mT, torch.cat([k, v], -1))
        keys, values = torch.split(state, [k.shape[-1], v.shape[-1]], -1)
        system, steps = keys + torch.diag_embed(penalty[:, :, 0]), self.steps
        solved = _solved(system, q.mT).mT if steps is None else conjugate_gradients(lambda y: y @ system, q, steps)
        return (solved @ values).to(dtype), state


@register(
    "mesa",
    kind="mixer",
    family="recurrence",
    source="von Oswald et al. 2025, arXiv:2506.05233; flash-linear-attention, mesa_net.py",
    formula="o_t = G_tᵀ (H_t + Λ)⁻¹ q_t,  H_t = γ_t H_{t-1} + β_t k_t k_tᵀ,  G_t = γ_t G_{t-1} + β_t k_t v_tᵀ",
    cost="O(n·d³)",
    memory_exponent=1.0,
    traits=replace(SUMMED, given=_GIVEN),
    settings=("chunk=5", "chunk=5,steps=30", "chunk=64"),
    core=Core(
        make=MesaRule,
        formula="o = Gᵀ(H + I)⁻¹q,  H_t = γ_t H_{t-1} + β_t k_t k_tᵀ,  G_t = γ_t G_{t-1} + β_t k_t v_tᵀ,  ‖k‖=‖q‖=1",
        traits=replace(CORE, reads=(BETA, DECAY), given=_GIVEN),
        settings=("chunk=5", "chunk=5,steps=30"),
    ),
)
class Mesa(LayerFromEitherEnd):
    """Queries solved against the keys so far: least squares, token by token.

    von Oswald et al. 2025, "MesaNet: Sequence Modeling by Locally Optimal Test-Time Training". A head keeps two sums
    that fade alike, H_t = γ_t H_{t-1} + β_t k_t k_tᵀ and G_t = γ_t G_{t-1} + β_t k_t v_tᵀ. Gᵀ(H + Λ)⁻¹ is the matrix
    that maps the keys so far to their values with the least weighted square error, Λ being the penalty of its entries,
    and o_t is its image of q_t. For large Λ it is decayed linear attention over Λ.

    x ``(B, N, C)`` gives q, k and v by a C × C projection each; q and k go through silu and get length 1.
    β = σ(x·w + b) and γ = σ(x·w' + b') are one number for each head, and Λ = softplus(·) + 0.25 one for each channel of
    a head, 1 at first. Every head's output goes through a root-mean-square norm; the output projection follows. A
    padded token is passed over as if it were absent.

    The system of every token is solved by its Cholesky factors, those of a chunk at a time: O(D³) a token. With
    ``steps`` it is solved by so many steps of conjugate gradients for all tokens at once, which need no matrix of a
    token, only those in front of chunks. Gradients are those of the exact solution, from one more solve; the factors or
    steps are not kept. Decoding keeps H and G. ``form=fla`` takes steps of conjugate gradients, D of them if ``steps``
    is not given, which solve the system but for rounding and the 1e-5 that it adds to denominators.

    Not causal: a second recurrence runs over the turned sequence, and what both give is added, a token's reading of
    itself twice; the paper defines the causal form.

    Differs from the authors' code: systems are solved exactly unless ``steps`` is given (30 there), from x = 0, and
    nothing is added to a denominator; q and k go through no short convolution, and the output through no gate.
    """

    def __init__(self, shape: Shape, *, steps: Steps = None, chunk: Chunk = 64, form: forms.Fla = "auto") -> None:
        super().__init__()
        C, self.heads, self.causal = shape.C, shape.H, shape.causal
        self.core = MesaRule(shape, steps=steps, chunk=chunk, form=form)
        self.core.penalty = None  # the layer gives its own
        self.fused = {name: partial(_fused, kernel) for name, kernel in self.core.fused.items()}
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.gates = nn.Linear(C, 2 * shape.H)
        one = torch.tensor(1.0 - _LEAST).expm1().log()  # its softplus is 1 - 0.25
        self.penalty = nn.Parameter(one.repeat(shape.H, shape.D))
        self.norm = nn.RMSNorm(shape.D, eps=1e-5)
        self.out = nn.Linear(C, C, bias=False)

    def plainly(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (torch.unflatten(y, 1, (self.heads, -1)) for y in self.qkv(x).chunk(3, 1))
        q, k = (y * torch.sigmoid(y) for y in (q, k))
        beta, gamma = torch.sigmoid(self.gates(x))[..., None].chunk(2, 1)
        return q, k, v, beta, gamma.log2(), (self.penalty.exp().log1p() + _LEAST)[None]

    def plainly_finished(self, y: Tensor) -> Tensor:
        y = torch.unflatten(y, 1, (self.heads, -1))
        return self.out((y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.norm.weight).flatten(1))

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v ``(B, H, N, D)``; β and log2(γ) ``(B, H, N, 1)`` and Λ ``(1, H, 1, D)``, float32 at least."""
        dtype = accumulator(x.dtype)
        q, k, v = self.projected(x)
        beta, gamma = self.gates(x).to(dtype).mT[..., None].chunk(2, 1)
        penalty = softplus(self.penalty.to(dtype)) + _LEAST
        return q, k, v, torch.sigmoid(beta), logsigmoid(gamma) * LOG2E, penalty[None, :, None]

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return _activated(*self._projected(x))

    def _run(self, x: Tensor, _: int) -> Tensor:
        name = f"mesa:steps={self.core.steps}"
        y = forms.attend(name, self.core.form, self._plain, *self._projected(x), fast=self.fused)
        return y.transpose(1, 2).flatten(2)

    def _plain(self, *projected: Tensor) -> Tensor:
        y: Tensor = self.core.by_chunks(*_activated(*projected))
        return y

    def finished(self, y: Tensor) -> Tensor:
        return self.out(self.norm(torch.unflatten(y, 2, (self.heads, -1))).flatten(2))


def _ready(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (y.to(accumulator(y.dtype)) for y in (q, k, v))
    *rates, penalty = gates
    return unit(q), unit(k), v, *rates, penalty.expand(len(q), -1, -1, -1)


def _activated(q: Tensor, k: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    q, k = (silu(y.to(accumulator(y.dtype))) for y in (q, k))
    return q, k, *others


def _fused(kernel: Callable[..., Tensor], q: Tensor, k: Tensor, *others: Tensor) -> Tensor:
    return kernel(silu(q), silu(k), *others)


def mesa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    penalty: Tensor,
    *,
    chunk: int,
    steps: int | None = None,
) -> Tensor:
    """o_t = G_tᵀ (H_t + Λ)⁻¹ q_t, ``(G, N, E)``.

    Args:
        q, k: ``(G, N, D)``; v: ``(G, N, E)``.
        beta, log_decay: β and log2(γ) <= 0, ``(G, N, 1)``.
        penalty: the diagonal of Λ, ``(G, 1, D)``, positive.
        steps: steps of conjugate gradients; None: exact.
    """
    N = q.shape[1]
    work = partial(_stretch, penalty=penalty[:, None], steps=steps)
    return rows_in_turn(work, stretches(min(chunk, N), q, k, v, beta, log_decay), N)[0]


def _stretch(
    state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    penalty: Tensor,
    steps: int | None,
) -> tuple[Tensor, Tensor]:
    """Chunks ``(G, chunks, c, ·)`` in a row after the sums H and G in the state ``(G, D, D + E)``."""
    written = beta * k
    ((pairs,),), begun, until = faded([torch.ones_like(log_decay)], [torch.ones_like(log_decay)], log_decay)
    past, state = states_before((written * until).mT @ torch.cat([k, v], -1), begun[:, :, -1:], state)
    keys, values = torch.split(past, [k.shape[-1], v.shape[-1]], -1)

    def system(x: Tensor) -> Tensor:
        """(H + Λ) x, each token by its own."""
        return (x @ k.mT * pairs) @ written + (x * begun) @ keys + penalty * x

    def exactly(b: Tensor) -> Tensor:
        chunks = []
        for i in range(b.shape[1]):
            outer = (written[:, i, :, :, None] * k[:, i, :, None]).flatten(2)
            matrices = torch.unflatten(pairs[:, i] @ outer, 2, (k.shape[-1], -1))
            matrices = matrices + begun[:, i, :, :, None] * keys[:, i, None] + torch.diag_embed(penalty[:, 0])
            chunks.append(_solved(matrices, b[:, i, :, :, None])[..., 0])
        return torch.stack(chunks, 1)

    solve: Solve = exactly if steps is None else partial(conjugate_gradients, system, steps=steps)
    with torch.no_grad():
        x = solve(q)
    following = _Following.apply
    x = x + following(q - system(x), solve)  # type: ignore[no-untyped-call]  # untyped in torch
    out = (x @ written.mT * pairs) @ v + (x * begun) @ values
    return out.flatten(1, 2), state


def _solved(systems: Tensor, b: Tensor) -> Tensor:
    """The solution of each positive system; NaN for one that is not positive, without waiting for the device."""
    factors, failed = torch.linalg.cholesky_ex(systems)
    return torch.cholesky_solve(b, factors).masked_fill(failed[..., None, None] != 0, torch.nan)


def conjugate_gradients(system: Solve, b: Tensor, steps: int) -> Tensor:
    """The solution x of ``system(x)`` = b ``(..., n, D)``, symmetric and positive, from 0 in so many steps."""
    x, rest, along = torch.zeros_like(b), b, b
    square, least = rest.square().sum(-1, keepdim=True), torch.finfo(b.dtype).tiny
    for _ in range(steps):
        ahead = system(along)
        share = square / (along * ahead).sum(-1, keepdim=True).clamp(min=least)
        x, rest = x + share * along, rest - share * ahead
        before, square = square, rest.square().sum(-1, keepdim=True)
        along = rest + square / before.clamp(min=least) * along
    return x


class _Following(torch.autograd.Function):
    """0, with the gradient of the solution: at A x = b, that of b - A x at a fixed x is A⁻¹ times that of x."""

    @staticmethod
    def forward(ctx: Any, rest: Tensor, solve: Solve) -> Tensor:
        ctx.solve = solve
        return torch.zeros_like(rest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.solve(grad), None
