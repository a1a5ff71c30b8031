"""PaTH attention: the tokens between two others reflect the key, which so encodes its position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.decoding.kv_cache import AndRecent, Cache, attend
from attnbench.catalogue.engines.head_layer import HeadLayer
from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.precision import accumulator, hidden, unit
from attnbench.catalogue.engines.recurrent.stretches import by_heads, chunked, rows_in_turn
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import DIRECTION, REFLECTION
from attnbench.contract.variant import Core, No, Traits, register

_WIDTH = 3
"""Tokens under the convolution of w, as in the authors' code."""
_Chunk = Annotated[int, Field(ge=1, description="tokens gathered by one solve. Moves time and memory only")]
_TRAITS = Traits(
    target="other",
    cross=No("keys are reflected by the tokens between key and query, which stand in one sequence"),
    bias=No("the reflections are its positions, and the paper adds nothing to the logits"),
    sink=No("the paper's softmax has none"),
    decode=True,
    own_form_both_ways="a later key is reflected from the other end, as if the sequence were turned round; "
    "the paper is causal",
    given=(("form=fla", {"key_padding": No(fla.NO_MASK)}),),
)


class Reflected(Cache):
    """A cache whose keys each later token reflects: to cut it does not take that token back."""

    overwrites = ()


class Reflections(nn.Module):
    """Softmax attention to keys that the tokens in between reflect.

    q, k and w ``(B, H, N, D)``, v ``(B, H, N, E)`` and β ``(B, H, N, 1)``: the logit of query i and key j is
    q_iᵀ H_i H_{i-1} … H_{j+1} k_j/√D with H_l = I - β_l w_l w_lᵀ. w gets length 1 here, as in the layer, whose
    projections and convolution are left out. A padded token has β = 0. Not causal: a later key is treated as in the
    sequence turned round, its own matrix left out and the query's not.

    Differs from the paper: the attention alone is here, without its layer.
    """

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """One token after the other, all earlier keys reflected by its matrix; N × N logits."""
        k, v, w, beta = emptied(key_mask, k, v, *gates)
        size, N = torch.linalg.vector_norm(w, dim=-1, keepdim=True), q.shape[2]
        w = w / size.masked_fill(size == 0, 1.0)

        def logits(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Tensor:
            rows, keys = [], k[:, :, :0]
            for i in range(N):
                along = keys @ w[:, :, i, :, None]
                keys = keys - beta[:, :, i, :, None] * along * w[:, :, i, None]
                keys = torch.cat((keys, k[:, :, i : i + 1]), 2)
                rows.append(pad((keys @ q[:, :, i, :, None])[..., 0], (0, N - 1 - i)))
            found: Tensor = torch.stack(rows, 2) / q.shape[-1] ** 0.5
            return found

        scores = logits(q, k, w, beta)
        if not self.causal:
            turned = logits(*(y.flip(2) for y in (q, k, w, beta))).flip(2, 3)
            scores = torch.where(torch.ones_like(scores, dtype=torch.bool).tril(), scores, turned)
        allowed = visible_pairs(q, k, self.causal, key_mask)
        return scores.masked_fill(~allowed, hidden(scores.dtype)).softmax(-1) @ v

    def __init__(self, shape: Shape, *, chunk: _Chunk = 64, form: forms.Fla = "auto") -> None:
        super().__init__()
        fits = shape.causal and shape.D in fla.WIDTHS and shape.E == shape.D and chunk == 64
        self.fused = {"fla": partial(fla.run, "path")} if fits else {}
        self.form = forms.require("path", form, self.fused)
        self.causal, self.capacity, self.chunk = shape.causal, shape.N, chunk

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self.read(q, *emptied(key_mask, k, v, *gates), key_mask=key_mask)

    def read(self, *parts: Tensor, key_mask: Tensor | None) -> Tensor:
        q, k, v, w, beta = parts
        fast, chunks = self.fused if key_mask is None else {}, partial(self._by_chunks, key_mask=key_mask)
        return forms.attend("path", self.form, chunks, q, k, v, unit(w), beta, fast=fast)

    def _by_chunks(
        self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, *, key_mask: Tensor | None
    ) -> Tensor:
        real = torch.ones_like(beta)
        if key_mask is not None:
            real = real.masked_fill(~key_mask[:, None, :, None], 0.0)
        return by_heads(partial(_attend, causal=self.causal, chunk=self.chunk), q, k, v, w, beta, real)

    @torch.no_grad()
    def begin(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Reflected:
        keys, n = k.to(accumulator(k.dtype)), k.shape[2]
        if n:
            w, beta = (x.to(keys.dtype) for x in gates)
            parts = _carried([y.flatten(0, 1) for y in (torch.zeros_like(keys), keys, unit(w), beta)], self.chunk)
            keys = parts.joined(parts.keys.shape[1])[0][:, 0, :n].view_as(keys)
        return Reflected(*Cache.of(keys, v, self.capacity))

    @torch.no_grad()
    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, Reflected]:
        room, values, length = state
        w, beta = (x.to(room.dtype) for x in gates)
        w = unit(w)
        # A new tensor: the state that was given stays as it is.
        cache = Cache(room - beta * (room @ w.mT) * w, values, length).append(k.to(room.dtype), v)
        return attend(q.to(room.dtype), cache.keys, cache.values), Reflected(*cache)

    @staticmethod
    def cached_bytes(shape: Shape, width: int, **_: object) -> int:
        """A token's keys, float32 at least since each step changes them, and its values."""
        return shape.K * (shape.D * max(width, 4) + shape.E * width)


@register(
    "path",
    kind="mixer",
    family="pairwise",
    also=("recurrence",),
    source="Yang et al. 2025, arXiv:2505.16381, authors' code, path_attn.py",
    formula="oᵢ = Σ_{j<=i} softmax_j(qᵢᵀ·Hᵢ·…·H_{j+1}·kⱼ/√D) vⱼ,  H_l = I - β_l·w_l·w_lᵀ,  ‖w‖ = 1, 0 < β < 2",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=replace(_TRAITS, stochastic=True, rows_sum_to_one=False),
    settings=("rank=3,chunk=5", "rank=3,chunk=64"),
    core=Core(
        make=Reflections,
        formula="oᵢ = Σ_{j<=i} softmax_j(qᵢᵀ·Hᵢ·…·H_{j+1}·kⱼ/√D) vⱼ,  H_l = I - β_l·w_l·w_lᵀ,  ‖w‖ = 1",
        traits=replace(_TRAITS, reads=(DIRECTION, REFLECTION)),
        settings=("chunk=5", "chunk=64"),
    ),
)
class PaTH(HeadLayer):
    """Softmax attention whose positions are products of reflections.

    Yang et al. 2025, "PaTH Attention: Position Encoding via Accumulating Householder Transformations". Each token l has
    a matrix H_l = I - β_l w_l w_lᵀ for each head, and the logit of query i and key j is
    q_iᵀ H_i H_{i-1} … H_{j+1} k_j/√D: the key's own matrix is not in the product, the query's is. β in (0, 2), so that
    no product is longer than its key. With β = 0 it is softmax attention without positions.

    x ``(B, N, C)`` gives q, k and v by C × C projections, w by C × ``rank`` and ``rank`` × C ones, a depthwise
    convolution over each token and the two before it and a division by its length in each head, and β = 2σ(u·x + b),
    one for each head. The output projection is C × C. A padded token has β = 0, and counts as 0 in the convolution.

    Computed in chunks of ``chunk`` tokens. The matrices of a chunk multiply to I minus a product of two thin matrices,
    by one triangular solve. Queries are carried to the start of their chunk and keys to the end of theirs; between them
    a chunk of queries goes from chunk to chunk, by one D × D product each, and over longer runs of chunks by one for a
    run: √(2n/``chunk``) products for a query, beside which softmax attention has n·D. Memory is O(n): the scores of one
    chunk of queries at a time. Decoding keeps keys and values; every step reflects all keys once more and rounds them
    to float32 at least.

    Not causal: a later key is treated as in the sequence turned round, its own matrix left out and the query's not; the
    window of the convolution is centred.

    Differs from the authors' code: no SiLU after the convolution, no forget gate (an option there), no norm of q and k;
    w is not rounded to float16; one softmax for all keys of a chunk of queries.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        rank: Annotated[int, Field(ge=1, description="width in the middle of the projection that gives w")] = 32,
        chunk: _Chunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__()
        C, self.heads, self.causal = shape.C, shape.H, shape.causal
        self.core = Reflections(shape, chunk=chunk, form=form)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.direction = nn.Sequential(nn.Linear(C, rank, bias=False), nn.Linear(rank, C, bias=False))
        self.kernel = nn.Parameter(torch.empty(C, _WIDTH).uniform_(-1, 1) * _WIDTH**-0.5)
        self.beta = nn.Linear(C, shape.H)
        self.out = nn.Linear(C, C, bias=False)

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The formula of the operator within, between projections."""
        (x,) = emptied(key_mask, x)
        q, k, v = (torch.unflatten(part, -1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        before, N = _WIDTH - 1 if self.causal else _WIDTH // 2, x.shape[1]
        given = pad(self.direction(x), (0, 0, before, _WIDTH - 1 - before))
        w = torch.stack([given[:, t : t + N] * self.kernel[:, t] for t in range(_WIDTH)]).sum(0)
        w, beta = torch.unflatten(w, -1, (self.heads, -1)).transpose(1, 2), 2 * torch.sigmoid(self.beta(x)).mT
        return self.joined(self.core.dense(q, k, v, w, beta[..., None], key_mask=key_mask))

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        before = _WIDTH - 1 if self.causal else _WIDTH // 2
        w = self._convolved(pad(self.direction(x), (0, 0, before, _WIDTH - 1 - before)))
        (beta,) = emptied(key_mask, self._beta(x))
        return self.joined(self.core.read(*self.projected(x), w, beta, key_mask=key_mask))

    def _convolved(self, given: Tensor) -> Tensor:
        """w ``(B, H, n, D)`` of any length, float32 at least, of windows of the tokens ``(B, n + 2, C)``."""
        dtype = accumulator(given.dtype)
        w = conv1d(given.mT.to(dtype), self.kernel.to(dtype)[:, None], groups=len(self.kernel)).mT
        return torch.unflatten(w, -1, (self.heads, -1)).transpose(1, 2)

    def _beta(self, x: Tensor) -> Tensor:
        return 2 * torch.sigmoid(self.beta(x).to(accumulator(x.dtype))).mT[..., None]

    @torch.no_grad()
    def begin(self, x: Tensor) -> AndRecent:
        n, given = x.shape[1], pad(self.direction(x), (0, 0, _WIDTH - 1, 0))
        gates = (self._convolved(given), self._beta(x)) if n else ()
        return AndRecent(self.core.begin(*self.projected(x), *gates), given[:, n:].clone())

    @torch.no_grad()
    def step(self, state: AndRecent, x: Tensor) -> tuple[Tensor, AndRecent]:
        given = torch.cat((state.recent, self.direction(x)), 1)
        y, cache = self.core.step(state.cache, *self.projected(x), self._convolved(given), self._beta(x))
        return self.joined(y), AndRecent(cache, given[:, 1:])

    cached_bytes = staticmethod(Reflections.cached_bytes)


class _Carried(NamedTuple):
    """Chunks ``(G, chunks, c, ·)`` with queries carried to the start of their chunk and keys to its end."""

    queries: Tensor
    keys: Tensor
    across: Tensor
    """The product of all matrices of a chunk, which a row is multiplied with, ``(G, chunks, D, D)``."""
    scores: Tensor
    """Scores of the pairs in a chunk, ``(G, chunks, c, c)``, for keys up to the query."""

    def joined(self, count: int) -> tuple[Tensor, Tensor]:
        """``keys`` and ``across`` of ``count`` chunks each, without the chunks that are left over."""
        keys, across = (torch.unflatten(x[:, : x.shape[1] // count * count], 1, (-1, count)) for x in self[1:3])
        parts, behind = [keys[:, :, -1]], across[:, :, -1]
        for chunk in range(count - 2, -1, -1):
            parts.append(keys[:, :, chunk] @ behind.mT)
            behind = behind @ across[:, :, chunk]
        return torch.cat(parts[::-1], 2), behind

    def rows(self) -> Callable[[int], list[Tensor]]:
        """A function from a chunk to the scores of its queries and all keys up to its end, in pieces, as they stand.

        A query goes from chunk to chunk to the start of its run of chunks, and from run to run before it.
        """
        count = max(1, round((self.keys.shape[1] / 2) ** 0.5))  # steps within runs are then about as many as over them
        # Apart here, once: the gradient of an index would fill a tensor of all chunks for each of its uses.
        queries, keys, across, own, far_keys, far = (x.unbind(1) for x in (*self, *self.joined(count)))

        def scores(chunk: int) -> list[Tensor]:
            row, runs, parts, step = queries[chunk], chunk // count, [own[chunk]], None
            near = range(chunk - 1, runs * count - 1, -1)
            passed = [(keys[i], across[i]) for i in near] + [(far_keys[i], far[i]) for i in range(runs - 1, -1, -1)]
            for held, product in passed:
                row = row if step is None else torch.bmm(row, step)
                parts.append(torch.bmm(row, held.mT))
                step = product
            return parts[::-1]

        return scores


def _carried(inputs: list[Tensor], chunk: int) -> _Carried:
    """Chunks of scaled queries, keys and w ``(G, N, D)`` and β ``(G, N, 1)``; tokens behind the last have β = 0."""
    q, k, w, beta = (chunked(x, min(chunk, x.shape[1])) for x in inputs)
    weighted = beta * w
    ahead = (w @ k.mT).tril(-1)  # each token's finds among the keys before it
    right = torch.cat((weighted, beta * ahead), -1)
    solved = torch.linalg.solve_triangular((weighted @ w.mT).tril(-1), right, upper=False, unitriangular=True)
    u, s = solved[..., : w.shape[-1]], solved[..., w.shape[-1] :]
    found = (q @ w.mT).tril()
    eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    return _Carried(q - found @ u, k - s.mT @ w, eye - w.mT @ u, (q @ k.mT - found @ s).tril())


def _attend(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, real: Tensor, *, causal: bool, chunk: int
) -> Tensor:
    """The outputs ``(G, N, D)``; q, k, v, w ``(G, N, D)``, β and real ``(G, N, 1)``, real being 1, or 0 for padding."""
    N = q.shape[1]
    c = min(chunk, N)
    count = -(-N // c)
    inputs = [pad(x, (0, 0, 0, count * c - N)) for x in (q * q.shape[-1] ** -0.5, k, w, beta)]
    values, there = (pad(x, (0, 0, 0, count * c - N)) for x in (v, real))
    forth = _carried(inputs, c).rows()
    back = None if causal else _carried([x.flip(1) for x in inputs], c).rows()
    below = hidden(q.dtype)

    def one(_: None, number: int) -> tuple[Tensor, None]:
        *earlier, own = forth(number)
        keep, last = torch.ones(c, c, dtype=torch.bool, device=q.device).tril(), (number + 1) * c
        parts = [*earlier, own.masked_fill(~keep, below)]
        if back is not None:
            # Rows and columns of the sequence turned round: the last columns are those of the chunk itself.
            turned, *later = [part.flip(1, 2) for part in reversed(back(count - 1 - number))]
            parts, last = [*earlier, torch.where(keep, own, turned), *later], count * c
        scores = torch.cat(parts, -1).masked_fill(there[:, None, :last, 0] == 0, below)
        return torch.bmm(scores.softmax(-1), values[:, :last]), None

    return rows_in_turn(one, [(number,) for number in range(count)], N)[0]
