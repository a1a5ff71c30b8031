"""HyperAttention: exact attention inside blocks of hash-sorted tokens, the rest from a sample of keys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.attention.matrix_tiles import fitting, tiles
from attnbench.attention.precision import accumulator
from attnbench.shape import Shape
from attnbench.variant import No, Traits, register

_FAR = -1e30  # finite, so that a row without any key makes no NaN
_GRID = 20  # bits of a drawn position: integers stay exact in a module cast to half precision


class _Attend(torch.autograd.Function):
    """Chunks of queries to their block of keys and to the sample, in one softmax; backward computes weights again.

    q ``(G, C, r, D)`` with G = B·H heads of C chunks; k, v ``(G, C, c, D)``; the sample ``(G, S, D)``; bias
    ``(G, C, c + S)``.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sk: Tensor, sv: Tensor, bias: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for tile in _tiles(q, bias.shape[2]):
            _, _, values, weights = _tile((q, k, v, sk, sv, bias), tile)
            part = out[tile]
            part.copy_(torch.bmm(weights, values).view(part.shape))
        ctx.save_for_backward(q, k, v, sk, sv, bias, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sk, sv, _, out = ctx.saved_tensors
        c, D = k.shape[2:]
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        dsk, dsv = (torch.zeros(x.shape, dtype=accumulator(q.dtype), device=q.device) for x in (sk, sv))
        for tile in _tiles(q, c + sk.shape[1]):
            queries, keys, values, weights = _tile(ctx.saved_tensors[:6], tile)
            dout = grad[tile].to(keys.dtype).reshape(queries.shape)
            dot = torch.linalg.vecdot(dout, out[tile].to(keys.dtype).reshape(queries.shape)).unsqueeze(-1)
            dvalues = torch.bmm(weights.mT, dout)
            dlogits = torch.bmm(dout, values.mT).sub_(dot).mul_(weights)
            dq[tile] = torch.bmm(dlogits, keys).mul_(D**-0.5).view(dq[tile].shape).to(dq.dtype)
            for dx, ds, dboth in ((dk, dsk, torch.bmm(dlogits.mT, queries)), (dv, dsv, dvalues)):
                dboth = dboth.view(*dx[tile].shape[:2], -1, D)
                dx[tile] = dboth[:, :, :c].to(dx.dtype)
                ds[tile[0]] += dboth[:, :, c:].sum(1)
        return dq, dk, dv, dsk.to(sk.dtype), dsv.to(sv.dtype), None


def _tiles(q: Tensor, width: int) -> Iterator[tuple[slice, slice]]:
    """Heads and chunks whose weights stay in cache: several whole heads, or a part of one."""
    G, C, r, _ = q.shape
    return ((heads, slice(a, b)) for heads, a, b in tiles(G, C, r * width, fitting(q.device)))


def _tile(tensors: tuple[Tensor, ...], tile: tuple[slice, slice]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scaled queries ``(g, r, D)``, keys and values ``(g, c + S, D)``, and weights ``(g, r, c + S)``."""
    q, k, v, sk, sv, bias = tensors
    dtype, D = accumulator(q.dtype), q.shape[3]

    def join(own: Tensor, sample: Tensor) -> Tensor:
        shared = sample[tile[0]].unsqueeze(1).expand(-1, own[tile].shape[1], -1, -1)
        return torch.cat([own[tile], shared], 2).to(dtype).flatten(0, 1)

    queries = (q[tile].to(dtype) * D**-0.5).flatten(0, 1)
    keys, values = join(k, sk), join(v, sv)
    weights = torch.baddbmm(bias[tile].reshape(len(keys), 1, -1), queries, keys.mT)
    return queries, keys, values, torch.softmax(weights, -1, out=weights)


@register(
    "hyperattention",
    family="learned pattern",
    source="Han et al. 2023, arXiv:2310.05869, algorithms 1 and 3",
    formula="oᵢ = Σⱼ wᵢⱼ exp(qᵢ·kⱼ/√D) vⱼ / Σⱼ wᵢⱼ exp(qᵢ·kⱼ/√D), w = 1 in i's LSH block, else M/m·[j sampled]",
    cost="O(n·(b + m)·d)",
    traits=Traits(
        causal=No("queries are sorted together with later ones, which moves the borders of earlier queries' blocks"),
        bias=No("large entries are found by hashing q and k, which knows nothing of a bias"),
        stochastic=True,
        exact_with=("block={n},samples=0", "block=3,samples={n}"),
    ),
    settings=("block=4,samples=5,bits=3", "block=6,samples=0,bits=2", "block=1,samples=4,bits=4"),
)
class HyperAttention(nn.Module):
    """LSH-sorted blocks exactly, all other keys from a uniform sample.

    Han et al. 2023, "HyperAttention: Long-context Attention in Near-Linear Time": sortLSH finds large entries, a
    uniform sample stands for the others. The hash of a query or key is the signs of ``bits`` random projections, read
    as a Gray code, so that neighbours in the sorted order are buckets one sign apart. Queries and keys are each sorted
    by it (equal hashes by position) and cut into ceil(M / ``block``) blocks whose sizes differ by at most one; a query
    attends to all keys of the block at its own place. Of all M sorted keys, m = ``samples`` are drawn, one in each of m
    equal strata; those outside the own block enter the same softmax with weight M/m. On average over the draw, the
    numerator and the denominator are thus those of softmax attention. ``block`` or ``samples`` of M or more give
    softmax attention. The defaults are those of the authors' code.

    More queries than keys: chunks of at most ``block`` queries, several of which share a block of keys. Blocks and
    strata are cut over the real tokens only; in self-attention padded positions give 0.

    Differs from the authors' code: strata instead of independent draws, drawn once in the constructor as fractions
    of the sequence; blocks of equal size instead of a last one filled with zeros; projections are shared by the heads;
    a sampled key is never counted twice on any device; short sequences are not handed to exact attention. The causal
    form of the paper (halves, recursively) is not here: a later query can move an earlier one to another block.

    q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` -> ``(B, H, N, D)``; ``key_mask`` ``(B, M)``.
    """

    projections: Tensor
    draws: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, Field(ge=1, description="keys of a block b; M or more: softmax attention")] = 256,
        samples: Annotated[int, Field(ge=0, description="sampled keys m; M or more: softmax attention")] = 256,
        bits: Annotated[int, Field(ge=1, le=16, description="signs of a hash, 2^bits buckets")] = 7,
    ) -> None:
        super().__init__()
        self.block, self.samples, self.cross = block, samples, shape.cross
        self.register_buffer("projections", torch.randn(shape.D, bits))
        self.register_buffer("draws", torch.randint(1 << _GRID, (samples,)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        B, H, N, D = q.shape
        with torch.no_grad():
            asked, own, sampled, bias, slot = self._plan(q, k, key_mask)

        def take(x: Tensor, tokens: Tensor) -> Tensor:
            first = torch.arange(B * H, device=x.device).view(B, H, *[1] * (tokens.ndim - 2)) * x.shape[2]
            return x.reshape(-1, D).index_select(0, (tokens + first).view(-1)).view(B * H, *tokens.shape[2:], D)

        parts = (take(q, asked), take(k, own), take(v, own), take(k, sampled), take(v, sampled))
        out: Tensor = _Attend.apply(*parts, bias)  # type: ignore[no-untyped-call]  # untyped in torch
        out = take(out.view(B, H, -1, D), slot).view(B, H, N, D)
        if key_mask is None:
            return out
        blind = ~key_mask.any(1, keepdim=True) if self.cross else ~key_mask
        return out.masked_fill(blind[:, None, :, None], 0)

    def _order(self, x: Tensor, real: Tensor | None) -> Tensor:
        """``(B, H, n)``: tokens by hash and position, padding last."""
        B, H, n, D = x.shape
        dtype = accumulator(x.dtype)
        positive = x.reshape(-1, D).to(dtype) @ self.projections.to(dtype) > 0
        bits = positive.shape[1]
        place = 1 << torch.arange(bits - 1, -1, -1, device=x.device)
        code = ((positive.cumsum(1) & 1) * place).sum(1).view(B, H, n)
        if real is not None:
            code = code.masked_fill(~real[:, None], 1 << bits)
        heads = torch.arange(B * H, device=x.device).view(B, H, 1)
        # One flat sort is several times faster than one per head.
        tokens = (code + (heads << (bits + 1))).view(-1).sort(stable=True).indices.view(B, H, n)
        return tokens - heads * n

    def _plan(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, ...]:
        """Tokens of each chunk of queries, of its block of keys, of the sample; bias; slot of each query."""
        (B, H, N, _), M, device = q.shape, k.shape[2], q.device
        b, S = min(self.block, max(N, M)), min(self.samples, M)
        C = -(-max(N, M) // b)
        rows, columns = (b, b) if key_mask is not None else (-(-N // C), -(-M // -(-M // b)))
        m = torch.full((B, 1), M, device=device) if key_mask is None else key_mask.sum(1, keepdim=True)
        padded_q = None if self.cross else key_mask
        n = torch.full((B, 1), N, device=device) if padded_q is None else m
        blocks = ((m + b - 1) // b).clamp(min=1)
        chunks = torch.maximum((n + b - 1) // b, blocks)
        chunk = torch.arange(C + 1, device=device)
        start = torch.minimum((chunk * n + chunks - 1) // chunks, n)
        asked = start[:, :-1, None] + torch.arange(rows, device=device)
        block = torch.minimum(chunk[:-1] * blocks // chunks, blocks - 1)
        own, end = (((block + i) * m + blocks - 1) // blocks for i in (0, 1))
        own = own.unsqueeze(2) + torch.arange(columns, device=device)
        drawn = torch.arange(S, device=device)
        s = m.clamp(min=1, max=max(S, 1))
        sampled = ((drawn << _GRID) + self.draws[:S]) * m // (s << _GRID)
        bias = torch.zeros(B, C, columns + S, dtype=accumulator(q.dtype), device=device)
        bias[:, :, :columns].masked_fill_(own >= end.unsqueeze(2), _FAR)
        twice = (sampled * blocks // m.clamp(min=1)).unsqueeze(1) == block.unsqueeze(2)
        bias[:, :, columns:] = (m.clamp(min=1).to(bias.dtype) / s).log().unsqueeze(2)
        bias[:, :, columns:].masked_fill_(twice | (drawn >= s).unsqueeze(1), _FAR)

        order_q, order_k = self._order(q, padded_q), self._order(k, key_mask)

        def token(order: Tensor, rank: Tensor, count: Tensor) -> Tensor:
            rank = torch.minimum(rank.flatten(1), count - 1).clamp(min=0)
            return order.gather(2, rank.unsqueeze(1).expand(B, H, -1))

        rank = torch.arange(N, device=device).expand(B, N)
        at = torch.minimum(rank * chunks // n.clamp(min=1), chunks - 1)
        slot = (at * rows + rank - start.gather(1, at)).masked_fill(rank >= n, 0)
        slots = torch.empty_like(order_q).scatter_(2, order_q, slot.unsqueeze(1).expand(B, H, N))
        return (
            token(order_q, asked, n).view(B, H, C, rows),
            token(order_k, own, m).view(B, H, C, columns),
            token(order_k, sampled, m),
            bias.unsqueeze(1).expand(-1, H, -1, -1).reshape(B * H, C, -1),
            slots,
        )

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The formula with N x M matrices, head by head; blocks and sample are found again, token by token."""
        (B, H, _, D), out = q.shape, torch.zeros_like(q)

        def ranks(x: Tensor) -> Tensor:
            codes = []
            for signs in (x.to(accumulator(x.dtype)) @ self.projections.to(accumulator(x.dtype)) > 0).tolist():
                gray = int("".join("1" if sign else "0" for sign in signs), 2)
                codes.append(next(i for i in range(1 << len(signs)) if i ^ (i >> 1) == gray))
            return torch.tensor(sorted(range(len(codes)), key=lambda t: codes[t]), device=x.device).argsort()

        for i, h in product(range(B), range(H)):
            real = torch.ones_like(k[i, h, :, 0], dtype=torch.bool) if key_mask is None else key_mask[i]
            asked = torch.ones_like(q[i, h, :, 0], dtype=torch.bool) if key_mask is None or self.cross else real
            Q, K, V = q[i, h, asked], k[i, h, real], v[i, h, real]
            n, m = len(Q), len(K)
            if m == 0:
                continue
            b, s = self.block, min(self.samples, m)
            blocks = -(-m // b)
            chunks = max(-(-n // b), blocks)
            rank = ranks(K)
            drawn = [((j << _GRID) + int(self.draws[j])) * m // (s << _GRID) for j in range(s)]
            times = torch.zeros(m, dtype=accumulator(q.dtype), device=q.device)
            for r in drawn:
                times[rank == r] += m / s
            together = (ranks(Q) * chunks // n * blocks // chunks).unsqueeze(1) == rank * blocks // m
            weight = torch.where(together, 1.0, times).log() + (Q @ K.mT) * D**-0.5
            out[i, h, asked] = weight.softmax(-1).to(V.dtype) @ V
        return out
