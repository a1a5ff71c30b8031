"""Attention to the own block and to one that a learned, soft permutation puts beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.errors import Unsupported
from attnbench.shape import Shape
from attnbench.variant import No, Traits, register

_FAR = 1e30


class _Balance(torch.autograd.Function):
    """Sinkhorn normalisation of exp(x); keeps only the potentials, so that no iteration is stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, iterations: int, causal: bool) -> Tensor:
        rows, steps = x.new_zeros((*x.shape[:-1], 1)), []
        for _ in range(iterations):
            y = x - rows
            columns = y.logcumsumexp(-2) if causal else y.logsumexp(-2, keepdim=True)
            # Where nothing is allowed the potential is free; 0 keeps the entry forbidden.
            columns.masked_fill_(columns < -_FAR / 2, 0)
            before, rows = rows, (x - columns).logsumexp(-1, keepdim=True)
            rows.masked_fill_(rows < -_FAR / 2, 0)
            steps += [before, columns, rows]
        balanced = (x - columns - rows).exp_()
        ctx.save_for_backward(x, balanced, *steps)
        ctx.causal = causal
        return balanced

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, balanced, *steps = ctx.saved_tensors
        dx = grad * balanced
        drows = -dx.sum(-1, keepdim=True)
        dcolumns = -dx if ctx.causal else -dx.sum(-2, keepdim=True)
        while steps:
            rows, columns, before = steps.pop(), steps.pop(), steps.pop()
            part = (x - columns - rows).exp_().mul_(drows)
            dcolumns = dcolumns - (part if ctx.causal else part.sum(-2, keepdim=True))
            dx += part
            if ctx.causal:  # in logarithms and by sign, as the factors may be far apart
                tiny = torch.finfo(x.dtype).tiny
                later = (dcolumns.clamp(min=tiny).log() - columns, (-dcolumns).clamp(min=tiny).log() - columns)
                up, down = ((x - before + t.flip(-2).logcumsumexp(-2).flip(-2)).exp_() for t in later)
                part = up - down
            else:
                part = (x - before - columns).exp_().mul_(dcolumns)
            dx += part
            drows = -part.sum(-1, keepdim=True)
            dcolumns = torch.zeros_like(dcolumns)
        return dx, None, None


class _Attend(torch.autograd.Function):
    """Softmax over own and sorted block, tile by tile; the backward pass computes the weights again.

    q, k, v ``(G, n, b, D)`` with G = B·H heads of n blocks; sort ``(G, n, n)``; log_mass and real ``(G, n, b)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sort: Tensor,
        log_mass: Tensor | None,
        real: Tensor | None,
        causal: bool,
    ) -> Tensor:
        out = torch.empty_like(q)
        for heads, blocks in _tiles(q):
            _, _, values, weights = _tile((q, k, v, sort, log_mass, real), causal, heads, blocks)
            part = out[heads, blocks]
            part.copy_(torch.bmm(weights, values).view(part.shape))
        ctx.save_for_backward(q, k, v, sort, log_mass, real, out)
        ctx.causal = causal
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sort, log_mass, _, out = ctx.saved_tensors
        n, b, D = q.shape[1:]
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=sort.dtype, device=x.device) for x in (k, v))
        dsort, dmass = torch.zeros_like(sort), None if log_mass is None else torch.empty_like(log_mass)
        for heads, blocks in _tiles(q):
            queries, keys, values, weights = _tile(ctx.saved_tensors[:6], ctx.causal, heads, blocks)
            dout = grad[heads, blocks].reshape(-1, b, D).to(sort.dtype)
            dot = torch.linalg.vecdot(dout, out[heads, blocks].reshape(-1, b, D).to(sort.dtype)).unsqueeze(-1)
            dvalues = torch.bmm(weights.mT, dout)
            dlogits = torch.bmm(dout, values.mT).sub_(dot).mul_(weights)
            if dmass is not None:
                dmass[heads, blocks] = dlogits[:, :, b:].sum(1).view(dmass[heads, blocks].shape)
            dlogits.mul_(D**-0.5)
            dq[heads, blocks] = torch.bmm(dlogits, keys).view(dq[heads, blocks].shape).to(dq.dtype)
            dkeys = torch.bmm(dlogits.mT, queries)
            mixing = sort[heads, blocks]
            for x, dx, joined, djoined in ((k, dk, keys, dkeys), (v, dv, values, dvalues)):
                own, moved = djoined.view(len(mixing), -1, 2, b, D).unbind(2)
                if dmass is not None:
                    assert log_mass is not None
                    dmass[heads, blocks] -= torch.linalg.vecdot(moved, joined.view(len(mixing), -1, 2, b, D)[:, :, 1])
                    moved = moved * _inverse(log_mass[heads, blocks])
                flat = moved.reshape(len(mixing), -1, b * D)
                dx[heads].view(-1, n, b * D).baddbmm_(mixing.mT, flat)
                dx[heads, blocks] += own
                dsort[heads, blocks] += torch.bmm(flat, x[heads].flatten(2).mT.to(sort.dtype))
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsort, dmass, None, None


def _tiles(q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Heads and blocks whose weights stay in cache: several whole heads, or a part of one."""
    G, n, b, _ = q.shape
    most = max(1, (1 << (18 if q.device.type == "cpu" else 26)) // (2 * b * b))
    heads = max(1, most // n)
    for head in range(0, G, heads):
        for block in range(0, n, most):
            yield slice(head, head + heads), slice(block, min(block + most, n))


def _inverse(log_mass: Tensor) -> Tensor:
    return log_mass.clamp(min=-80).neg().exp().unsqueeze(-1)  # no mass: 0 times a finite number


def _tile(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    causal: bool,
    heads: slice,
    blocks: slice,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries ``(g, b, D)``, own and sorted keys and values ``(g, 2b, D)``, and weights ``(g, b, 2b)``."""
    q, k, v, sort, log_mass, real = tensors
    b, D = q.shape[2:]
    mixing = sort[heads, blocks]

    def join(x: Tensor) -> Tensor:
        joined = x.new_empty((*mixing.shape[:2], 2, b * D), dtype=sort.dtype)
        joined[:, :, 0] = x[heads, blocks].flatten(2)
        torch.bmm(mixing, x[heads].flatten(2).to(sort.dtype), out=joined[:, :, 1])
        if log_mass is not None:
            joined[:, :, 1].view(*mixing.shape[:2], b, D).mul_(_inverse(log_mass[heads, blocks]))
        return joined.view(-1, 2 * b, D)

    queries, keys, values = q[heads, blocks].reshape(-1, b, D).to(sort.dtype), join(k), join(v)
    weights = queries.new_empty((len(queries), b, 2 * b))
    torch.baddbmm(weights, queries, keys.mT, beta=0, alpha=D**-0.5, out=weights)
    if causal:
        weights[:, :, :b] += torch.full((b, b), -_FAR, dtype=sort.dtype, device=q.device).triu_(1)
    if real is not None and log_mass is not None:
        weights[:, :, :b].masked_fill_(~real[heads, blocks].reshape(-1, 1, b), -_FAR)
        weights[:, :, b:] += log_mass[heads, blocks].reshape(-1, 1, b)
    elif causal and blocks.start == 0:
        weights.view(*mixing.shape[:2], b, 2 * b)[:, 0, :, b:] = -_FAR  # nothing is before the first block
    return queries, keys, values, torch.softmax(weights, -1, out=weights)


@register(
    "sinkhorn",
    family="learned pattern",
    source="Tay et al. 2020, arXiv:2002.11296",
    formula="o_I = softmax(Q_I [K_I; Σ_J S_IJ K_J]ᵀ/√d) [V_I; Σ_J S_IJ V_J], S = Sinkhorn(exp(sort(q, k)/τ))",
    cost="O(n·b·d + n²·d/b)",
    time_exponent=2.0,
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        causal=True,
        cross=No("a block of queries attends to the block of keys at its own place"),
        key_padding=True,
    ),
    settings=("block=4", "block=4,sort=learned"),
)
class Sinkhorn(nn.Module):
    """Own block and one softly sorted block, by Sinkhorn-balanced scores.

    Tay et al. 2020, sections 3.1-3.3. The sequence is cut into n / ``block`` blocks, a sort net scores pairs of blocks,
    ``iterations`` of Sinkhorn normalisation make exp(scores / ``temperature``) doubly stochastic (S), and block I
    attends with one softmax to its own keys and to the mixture Σ_J S_IJ K_J, offset by offset. No Gumbel noise: the
    operator is deterministic. Mixing costs n²·d/b operations, as much as attending at n = 2·b²; memory is
    O(n·d + (n/b)²), of which the second part is the smaller one up to n = b²·d.

    ``sort``: ``bilinear`` scores the mean query of block I against the mean key of block J, without parameters and for
    any N; ``learned`` is the paper's net, relu(x̄ W + w) U on the mean key x̄ of block I, whose outputs are the
    blocks J, so that N may not exceed ``shape.seq_len`` (a bias per block J would cancel in the normalisation).

    Causal: block I is scored from the mean over its first token and all before it, S is strictly lower triangular, and
    column sums run only over blocks up to I (the paper's run over all, which reads later tokens): S_IJ =
    exp(R_IJ - f_I) / Σ_{L<=I} exp(R_LJ - f_L), with f making rows sum to 1. The first block attends to itself only.

    Last block shorter, or padded: means run over real tokens, blocks without any take no part, and where block J has no
    token at an offset the mixture there averages the others and weighs as much as they have in S. With padding at the
    end the result is that of the shorter sequence.

    Differs from the authors' code: iterations end with the rows, so that every mixture is an average (rows of S sum to
    exactly 1, columns nearly); one softmax over both blocks instead of the sum of two logits or of two softmaxes.

    Shapes: q, k, v ``(B, H, N, D)`` -> ``(B, H, N, D)``; ``key_mask`` ``(B, N)``.

    Raises:
        Unsupported: ``sort=learned`` at a length above ``shape.seq_len``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, Field(ge=1, description="tokens per block")] = 64,
        temperature: Annotated[float, Field(gt=0, description="divides the sort net's scores")] = 0.75,
        iterations: Annotated[int, Field(ge=1, description="Sinkhorn normalisations of columns and rows")] = 8,
        sort: Annotated[
            Literal["bilinear", "learned"], Field(description="sort net: mean q · mean k, or two learned layers")
        ] = "bilinear",
    ) -> None:
        super().__init__()
        self.block, self.temperature, self.iterations, self.causal = block, temperature, iterations, shape.causal
        self.net = nn.ParameterDict()
        if sort == "learned":
            H, D, most = shape.H, shape.D, -(-shape.N // block)
            for name, size in {"W": (H, D, D), "w": (H, 1, D), "U": (H, D, most)}.items():
                self.net[name] = nn.Parameter(torch.empty(size).uniform_(-(D**-0.5), D**-0.5))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        B, H, N, D = q.shape
        b = min(self.block, N)
        n = -(-N // b)
        short, real = n * b - N, None
        if key_mask is not None or short:
            mask = q.new_ones((B, N), dtype=torch.bool) if key_mask is None else key_mask
            real = pad(mask, (0, short)).view(B, 1, n, b).expand(B, H, n, b).reshape(-1, n, b)
        q, k, v = ((pad(x, (0, 0, 0, short)) if short else x).reshape(-1, n, b, D) for x in (q, k, v))
        if real is not None:
            k, v = (x.masked_fill(~real.unsqueeze(-1), 0) for x in (k, v))
        sort = self.sort_matrix(q, k, H, real)
        log_mass = None
        if real is not None:
            mass = sort @ real.to(sort.dtype)
            log_mass = mass.masked_fill(mass <= 0, 1).log().masked_fill(mass <= 0, -_FAR)
        out: Tensor = _Attend.apply(q, k, v, sort, log_mass, real, self.causal)  # type: ignore[no-untyped-call] # torch
        if real is not None:
            own = real.cumsum(-1) > 0 if self.causal else real.any(-1, keepdim=True)
            out = out.masked_fill(~(own | (mass > 0).any(-1, keepdim=True)).unsqueeze(-1), 0)
        return out.view(B, H, n * b, D)[:, :, :N]

    def sort_matrix(self, q: Tensor, k: Tensor, H: int, real: Tensor | None = None) -> Tensor:
        """S ``(B·H, n, n)`` of q, k ``(B·H, n, b, D)``; ``real`` ``(B·H, n, b)``; k is 0 where not real."""
        G, n, _, D = q.shape
        dtype = torch.promote_types(q.dtype, torch.float32)
        if self.net:
            W, w, U = (self.net[name].to(dtype) for name in ("W", "w", "U"))
            if n > U.shape[-1]:
                raise Unsupported(f"sort=learned knows {U.shape[-1]} blocks and the sequence has {n}")
            mean = self._mean(k, real, self.causal, dtype).view(-1, H, n, D)
            scores = ((mean @ W + w).relu() @ U[..., :n]).view(G, n, n)
        else:
            seen = q if real is None else q.masked_fill(~real.unsqueeze(-1), 0)
            mean = self._mean(seen, real, self.causal, dtype) * D**-0.5
            scores = mean @ self._mean(k, real, False, dtype).mT
        scores = scores / self.temperature
        if real is not None:
            some = real.any(-1)
            scores = scores.masked_fill(~(some.unsqueeze(-1) & some.unsqueeze(-2)), -_FAR)
        if self.causal:
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(), -_FAR)
        balanced: Tensor = _Balance.apply(scores, self.iterations, self.causal)  # type: ignore[no-untyped-call] # torch
        return balanced

    @staticmethod
    def _mean(x: Tensor, real: Tensor | None, cumulative: bool, dtype: torch.dtype) -> Tensor:
        """``(G, n, D)``: over each block, or over its first token and everything before it."""
        total = x.sum(2, dtype=dtype)
        if real is None:
            count = x.new_full((1, x.shape[1], 1), x.shape[2], dtype=dtype)
            first = x.new_ones((), dtype=dtype)
        else:
            count, first = real.sum(2, dtype=dtype).unsqueeze(-1), real[:, :, :1].to(dtype)
        if cumulative:
            # Shifted, not subtracted: what comes later must not even leave a rounding error.
            total = pad(total.cumsum(1), (0, 0, 1, -1)) + x[:, :, 0].to(dtype)
            count = pad(count.cumsum(1), (0, 0, 1, -1)) + first
        return total / count.clamp(min=1)
