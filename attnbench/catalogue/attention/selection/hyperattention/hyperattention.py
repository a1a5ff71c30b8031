"""HyperAttention: exact attention inside blocks of hash-sorted tokens, the rest from a sample of keys."""

from __future__ import annotations

from itertools import product
from operator import eq, lt
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.attention.selection.hyperattention import causal_blocks as halves
from attnbench.catalogue.attention.selection.hyperattention.causal_blocks import GRID, HyperDecoding
from attnbench.catalogue.attention.selection.hyperattention.sampled_chunks import ChunkSoftmax
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register

_OWN_BLOCK = (
    "each query finds its block of sorted keys alone; the paper sorts the queries too, so that later ones move "
    "the blocks of earlier ones"
)


@register(
    "hyperattention",
    family="learned pattern",
    source="Han et al. 2023, arXiv:2310.05869, algorithms 1 and 3",
    formula="oᵢ = Σⱼ wᵢⱼ exp(qᵢ·kⱼ/√D) vⱼ / Σⱼ wᵢⱼ exp(qᵢ·kⱼ/√D), w = 1 in i's LSH block, else M/m·[j sampled]",
    cost="O(n·(b + m)·d)",
    memory_exponent=1.0,
    traits=Traits(
        decode=True,
        bias=No("large entries are found by hashing q and k, which knows nothing of a bias"),
        v_dim=No("keys and values are gathered side by side, in rows of one width"),
        stochastic=True,
        exact_with=("block={n},samples=0", "block=3,samples={n}"),
        knob=Knob("samples"),
        given=(("causal=true", {"own_form": _OWN_BLOCK}),),
    ),
    settings=("block=4,samples=5,bits=3", "block=6,samples=0,bits=2", "block=1,samples=4,bits=4"),
)
class HyperAttention(HyperDecoding, nn.Module):
    """Exact inside LSH-sorted blocks; a uniform sample elsewhere.

    Han et al. 2023, "HyperAttention: Long-context Attention in Near-Linear Time": sortLSH finds large entries, a
    uniform sample stands for the others. The hash of a query or key is the signs of ``bits`` random projections, read
    as a Gray code, so that neighbours in the sorted order are buckets one sign apart. Queries and keys are each sorted
    by it (equal hashes by position) and cut into ceil(M / ``block``) blocks whose sizes differ by at most one; a query
    attends to all keys of the block at its own place. Of all M sorted keys, m = ``samples`` are drawn, one in each of m
    equal strata; those outside the query's block enter the same softmax with weight M/m. On average over the draw, the
    numerator and the denominator are thus those of softmax attention. ``block`` or ``samples`` of M or more give
    softmax attention. The defaults are those of the authors' code.

    With more queries than keys, several chunks of at most ``block`` queries share a block of keys. Blocks and strata
    are cut over the real tokens only; in self-attention padded positions give 0.

    Causal: the paper's recursion. The tokens are halved until ``block`` are left, among which attention is exact. Of
    every two halves, the later one attends to the earlier one, a rectangle without a mask: a query sees one of its
    blocks of ``block`` sorted keys, and ``samples`` of its keys. All that a query sees enters one softmax. With a
    rectangle of each size on the way, the cost is O(n·log(n/b)·(b + m)·d).

    Differs from the authors' code: strata instead of independent draws, drawn once in the constructor as fractions
    of the sequence; blocks of equal size instead of a last one filled with zeros; projections are shared by the heads;
    a sampled key is never counted twice on any device; short sequences are not handed to exact attention. In the causal
    form, the paper sorts the queries of a rectangle as well, so that later ones move the borders of the blocks of
    earlier ones. Here each query finds its block alone, where its hash falls among the sorted hashes of the keys; among
    keys with its own hash, it takes those as far along as it stands in its half. The halves are cut at multiples of
    ``block``·2^i instead of at n/2, so that they do not depend on the length. Thus no later token changes anything.

    Decoding keeps all keys and values, and the hash and position of each key before the current block, sorted: a token
    costs O(log(n/b)·(b + m)·D). More tokens than ``shape.N`` are allowed.

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
        self.block, self.samples, self.length = block, samples, shape.N
        self.causal, self.cross = shape.causal, shape.cross
        self.register_buffer("projections", torch.randn(shape.D, bits))
        self.register_buffer("draws", torch.randint(1 << GRID, (samples,)))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The formula with N x M matrices, head by head; blocks and sample are found again, token by token."""
        (B, H, _, D), out = q.shape, torch.zeros_like(q)

        def hashes(x: Tensor) -> list[int]:
            codes = []
            for signs in (x.to(accumulator(x.dtype)) @ self.projections.to(accumulator(x.dtype)) > 0).tolist():
                gray = int("".join("1" if sign else "0" for sign in signs), 2)
                codes.append(next(i for i in range(1 << len(signs)) if i ^ (i >> 1) == gray))
            return codes

        for i, h in product(range(B), range(H)):
            real = torch.ones_like(k[i, h, :, 0], dtype=torch.bool) if key_mask is None else key_mask[i]
            asked = torch.ones_like(q[i, h, :, 0], dtype=torch.bool) if key_mask is None or self.cross else real
            Q, K, V = q[i, h, asked], k[i, h, real], v[i, h, real]
            if len(K) == 0:
                continue
            times = self._halves if self.causal else self._whole
            weight = torch.tensor(times(hashes(Q), hashes(K)), dtype=accumulator(q.dtype), device=q.device).log()
            out[i, h, asked] = (weight + (Q @ K.mT) * D**-0.5).softmax(-1).to(V.dtype) @ V
        return out

    def _whole(self, asked: list[int], keys: list[int]) -> list[list[float]]:
        n, m = len(asked), len(keys)
        blocks = -(-m // self.block)
        chunks = max(-(-n // self.block), blocks)
        (rank_q, rank_k), times = (_ranks(x) for x in (asked, keys)), self._sampled(m)
        own = [rank * chunks // n * blocks // chunks for rank in rank_q]
        return [[1.0 if own[i] == rank_k[j] * blocks // m else times[rank_k[j]] for j in range(m)] for i in range(n)]

    def _halves(self, asked: list[int], keys: list[int]) -> list[list[float]]:
        """w of each pair of n tokens, from their hashes: both halves, and the later one against the earlier one."""
        n, b = len(keys), self.block
        times = [[0.0] * n for _ in range(n)]

        def fill(first: int, size: int) -> None:
            if size <= b:
                for i in range(first, min(first + size, n)):
                    times[i][first : i + 1] = [1.0] * (i + 1 - first)
                return
            half = size // 2
            middle = first + half
            fill(first, half)
            if middle >= n:
                return
            fill(middle, half)
            order = sorted(range(first, middle), key=keys.__getitem__)
            sampled = self._sampled(half)
            for i in range(middle, min(first + size, n)):
                smaller, same = (sum(found(keys[j], asked[i]) for j in order) for found in (lt, eq))
                own = min(smaller + same * (i - middle) // half, half - 1) // b
                for rank, j in enumerate(order):
                    times[i][j] = 1.0 if rank // b == own else sampled[rank]

        fill(0, b << (-(-n // b) - 1).bit_length())
        return times

    def _sampled(self, m: int) -> list[float]:
        s, times = min(self.samples, m), [0.0] * m
        for j in range(s):
            times[((j << GRID) + int(self.draws[j])) * m // (s << GRID)] += m / s
        return times

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        if self.causal:
            return self._causal(q, k, v, key_mask)
        with torch.no_grad():
            plan = self._plan(q, k, key_mask)
        out: Tensor = ChunkSoftmax.apply(*(x.reshape(-1, x.shape[3]) for x in (q, k, v)), *plan)  # type: ignore[no-untyped-call]  # untyped in torch
        out = out.view(q.shape)
        if key_mask is None:
            return out
        blind = ~key_mask.any(1, keepdim=True) if self.cross else ~key_mask
        return out.masked_fill(blind[:, None, :, None], 0)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        if key_mask is not None:
            # The real tokens are moved to the front and halved there.
            order = (~key_mask).int().sort(dim=1, stable=True).indices[:, None, :, None].expand_as(q)
            first = self._causal(q.gather(2, order), k.gather(2, order), v.gather(2, order), None)
            return torch.zeros_like(first).scatter(2, order, first).masked_fill(~key_mask[:, None, :, None], 0)
        with torch.no_grad():
            asked, keys = (self.codes(x).flatten(0, 1) for x in (q, k))
        plan = halves.RectanglePlan(asked, keys, self.draws, self.block, self.projections.shape[1])
        out: Tensor = halves.CausalSoftmax.apply(*(x.reshape(-1, x.shape[3]) for x in (q, k, v)), plan)  # type: ignore[no-untyped-call]  # untyped in torch
        return out.view(q.shape)

    def codes(self, x: Tensor) -> Tensor:
        dtype = accumulator(x.dtype)
        projections = self.projections.to(dtype)
        place = 1 << torch.arange(projections.shape[1] - 1, -1, -1, device=x.device)
        codes = []
        for rows in torch.split(x.reshape(-1, x.shape[3]), 2048):
            gray = ((rows.to(dtype) @ projections > 0) * place).sum(1)
            for shift in (1, 2, 4, 8):  # each bit becomes the parity of itself and the higher ones
                gray ^= gray >> shift
            codes.append(gray)
        return torch.cat(codes).view(x.shape[:3])

    def _order(self, x: Tensor, real: Tensor | None) -> Tensor:
        (B, H, n, _), bits, code = x.shape, self.projections.shape[1], self.codes(x)
        if real is not None:
            code = code.masked_fill(~real[:, None], 1 << bits)
        heads = torch.arange(B * H, device=x.device).view(B, H, 1)
        # One flat sort is several times faster than one per head.
        tokens = (code + (heads << (bits + 1))).view(-1).sort(stable=True).indices.view(B, H, n)
        return tokens - heads * n

    def _plan(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, ...]:
        """Rows of q in each chunk (B·H·N for none), rows of k in its block and in the sample, and the bias."""
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
        none = (asked >= start[:, 1:, None]).unsqueeze(1)
        block = torch.minimum(chunk[:-1] * blocks // chunks, blocks - 1)
        own, end = (((block + i) * m + blocks - 1) // blocks for i in (0, 1))
        own = own.unsqueeze(2) + torch.arange(columns, device=device)
        drawn = torch.arange(S, device=device)
        s = m.clamp(min=1, max=max(S, 1))
        sampled = ((drawn << GRID) + self.draws[:S]) * m // (s << GRID)
        bias = torch.zeros(B, C, columns + S, dtype=accumulator(q.dtype), device=device)
        bias[:, :, :columns].masked_fill_(own >= end.unsqueeze(2), hidden(bias.dtype))
        twice = (sampled * blocks // m.clamp(min=1)).unsqueeze(1) == block.unsqueeze(2)
        bias[:, :, columns:] = (m.clamp(min=1).to(bias.dtype) / s).log().unsqueeze(2)
        bias[:, :, columns:].masked_fill_(twice | (drawn >= s).unsqueeze(1), hidden(bias.dtype))

        def token(x: Tensor, real: Tensor | None, rank: Tensor, count: Tensor) -> Tensor:
            order, length = self._order(x, real), x.shape[2]
            heads = torch.arange(B * H, device=device).view(B, H, 1) * length
            ranks = torch.minimum(rank.flatten(1), count - 1).clamp(min=0).unsqueeze(1).expand(B, H, -1)
            return (order.gather(2, ranks) + heads).flatten(0, 1)

        asked = token(q, padded_q, asked, n).view(B, H, C, rows).masked_fill_(none, B * H * N).flatten(0, 1)
        seen = token(k, key_mask, torch.cat([own.flatten(1), sampled], 1), m)
        own, sampled = torch.split(seen, [C * columns, S], 1)
        return asked, own.view(B * H, C, columns), sampled, bias.repeat_interleave(H, 0)

    @staticmethod
    def cached_bytes(shape: Shape, width: int, **_: object) -> int:
        """A token's key and value, and its hash and its place among the sorted, 4 bytes each."""
        return shape.K * (shape.D + shape.E) * width + 8 * shape.H


def _ranks(codes: list[int]) -> list[int]:
    """The places of the tokens in the order of their hashes; equal hashes are ordered by position."""
    places = [0] * len(codes)
    for rank, token in enumerate(sorted(range(len(codes)), key=codes.__getitem__)):
        places[token] = rank
    return places
