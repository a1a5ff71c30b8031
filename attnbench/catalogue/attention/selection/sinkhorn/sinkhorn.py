"""Attention to a query's own block and to one that a learned, soft permutation joins to it."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from attnbench.catalogue.attention.selection.sinkhorn.mixing import Balance, SortedSoftmax, inverse_mass, learned_scores
from attnbench.catalogue.attention.selection.sinkhorn.sorted_steps import SinkhornDecoding
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register
from attnbench.errors import Unsupported


@register(
    "sinkhorn",
    family="learned pattern",
    source="Tay et al. 2020, arXiv:2002.11296, section 3",
    formula="o_I = softmax(Q_I [K_I; Σ_J S_IJ K_J]ᵀ/√D) [V_I; Σ_J S_IJ V_J], S = Sinkhorn(exp(sort(q, k)/τ))",
    cost="O(n·b·d + n²·d/b)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        meets="mixtures",
        cross=No("a block of queries attends to the block of keys at its own place"),
        decode=True,
        bias=No("a sorted block mixes keys of several positions, so that a pair has no one distance"),
        shares=No("blocks of keys are sorted for the queries of their head, and heads that share them differ"),
        v_dim=No("keys and values are sorted side by side, in blocks of one width"),
        given=(
            ("sort=learned", {"stochastic": True, "longer": No("the sort net knows the blocks that it is made for")}),
            ("sort=bilinear", {"own_form": "mean queries and mean keys score the blocks; the paper learns a sort net"}),
            (
                "causal=true,sort=learned",
                {"own_form": "columns are balanced over the blocks so far; the paper's over all, later ones included"},
            ),
        ),
    ),
    settings=("block=4", "block=4,sort=learned", "block=4,sort_cut=2"),
)
class Sinkhorn(SinkhornDecoding, nn.Module):
    """Each block sees itself and one block that is sorted softly to it.

    Tay et al. 2020, "Sparse Sinkhorn Attention". The sequence is cut into n / ``block`` blocks. A sort net scores pairs
    of blocks, and ``iterations`` of Sinkhorn normalisation make exp(scores / ``temperature``) doubly stochastic (S).
    Block I attends with one softmax to its own keys and to the mixture Σ_J S_IJ K_J, offset by offset. Mixing costs
    n²·d/b operations, as much as attending at n = 2·b². Memory is O(n·d + (n/b)²); the second part is the smaller one
    up to n = b²·d.

    ``sort=bilinear`` scores the mean query of block I against the mean key of block J, without parameters and for
    any N. ``sort=learned`` is the paper's net, relu(x̄ W + w) U on the mean key x̄ of block I. Its outputs are the
    blocks J, so that N may not exceed ``shape.N`` (a bias per block J would cancel in the normalisation).

    Causal: block I is scored from the mean over its first token and all before it, S is strictly lower triangular, and
    column sums run only over blocks up to I (the paper's run over all, which reads later tokens): S_IJ =
    exp(R_IJ - f_I) / Σ_{L<=I} exp(R_LJ - f_L), with f making rows sum to 1. The first block attends only to itself.
    Decoding sorts in one of every ``block`` steps, which costs O(n·d); the others cost O(b·d).

    ``sort_cut``: the paper's SortCut. No query sees its own block; all attend only to the first ``sort_cut`` mixtures,
    Σ_J S_IJ K_J for I < ``sort_cut``, or to all of them if there are fewer. That costs O(n·sort_cut·b·d), beside the
    scores of pairs of blocks.

    If the last block is shorter, or padded: means run over real tokens, and blocks without any take no part. Where
    block J has no token at an offset, the mixture there averages the others and weighs as much as they have in S. With
    padding at the end, the result is that of the shorter sequence.

    Differs from the authors' code: iterations end with the rows, so that every mixture is an average (rows of S sum to
    exactly 1, columns nearly); one softmax over both blocks instead of the sum of two logits or of two softmaxes; no
    Gumbel noise on the scores, so that the same input gives the same output.

    q, k, v ``(B, H, N, D)`` -> ``(B, H, N, D)``; ``key_mask`` ``(B, N)``.

    Raises:
        Unsupported: causal with ``sort_cut``; in ``forward``, ``sort=learned`` at a length above ``shape.N``.
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
        sort_cut: Annotated[
            int | None,
            Field(ge=1, description="queries see only this many sorted blocks; none: own block and a sorted one"),
        ] = None,
    ) -> None:
        super().__init__()
        if sort_cut and shape.causal:
            raise Unsupported("causal: the first sorted blocks mix tokens of the whole sequence")
        self.seen: SortCut | OwnAndSorted = SortCut(sort_cut) if sort_cut else OwnAndSorted(shape.causal)
        self.block, self.temperature, self.iterations, self.causal = block, temperature, iterations, shape.causal
        self.tokens = shape.N
        self.net = nn.ParameterDict()
        if sort == "learned":
            H, D, most = shape.H, shape.D, -(-shape.N // block)
            for name, size in {"W": (H, D, D), "w": (H, 1, D), "U": (H, D, most)}.items():
                self.net[name] = nn.Parameter(torch.empty(size).uniform_(-(D**-0.5), D**-0.5))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        N, D = q.shape[2:]
        b, position = min(self.block, N), torch.arange(N, device=q.device)
        real = (torch.ones_like(q[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask)[:, None, None]
        home, offset, n = position // b, position % b, -(-N // b)
        blocks = torch.arange(n, device=q.device)
        inside = real & (home == blocks[:, None])
        before = real & (position <= b * blocks[:, None]) if self.causal else inside
        inside_mean, pool_mean = (
            m / m.sum(-1, keepdim=True).clamp(min=1) for m in (inside.to(q.dtype), before.to(q.dtype))
        )
        if self.net:
            hidden = (pool_mean @ k @ self.net["W"].to(q.dtype) + self.net["w"].to(q.dtype)).relu()
            scores = hidden @ self.net["U"][..., :n].to(q.dtype)
        else:
            scores = pool_mean @ q @ (inside_mean @ k).mT * D**-0.5
        allowed = inside.any(-1)[..., None] & inside.any(-1)[..., None, :]
        if self.causal:
            allowed = allowed & (blocks[:, None] > blocks)
        scores = scores / self.temperature
        weights = (scores - scores.amax((-1, -2), keepdim=True)).exp() * allowed
        rows = torch.ones_like(weights[..., :1])
        for _ in range(self.iterations):
            used = weights / rows
            columns = used.cumsum(-2) if self.causal else used.sum(-2, keepdim=True)
            S = weights / columns.masked_fill(columns == 0, 1)
            rows = S.sum(-1, keepdim=True)
            rows = torch.where(rows > 0, rows, 1)
        share = (S / rows)[..., home][:, :, :, None] * (
            real[:, :, :, None] & (offset == torch.arange(b, device=q.device)[:, None])
        )
        mass = share.sum(-1)  # (B, H, n, b): the mass of the mixture at each offset of a block
        some = mass.masked_fill(mass == 0, 1)[..., None]
        keys, values = (share @ x[:, :, None] / some for x in (k, v))
        mass, keys, values = (self.seen.dense(x, home) for x in (mass, keys, values))
        # For each query, the mixtures that it sees and then all tokens: (B, H, N, mixtures + N).
        logits = torch.cat([(q[..., None, :] * keys).sum(-1), q @ k.mT], -1) * D**-0.5
        own = real & (home[:, None] == home) & self.seen.own
        own = own & (position[:, None] >= position) if self.causal else own
        mass = torch.cat([mass.expand(*logits.shape[:3], -1), own.expand_as(logits[..., -N:])], -1)
        weights = (logits - logits.amax(-1, keepdim=True)).exp() * mass
        weights = weights / weights.sum(-1, keepdim=True).masked_fill(~(mass > 0).any(-1, keepdim=True), 1)
        out: Tensor = (weights[..., :-N, None] * values).sum(-2) + weights[..., -N:] @ v
        return out

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
            log_mass = mass.masked_fill(mass <= 0, 1).log().masked_fill(mass <= 0, hidden(mass.dtype))
        return self.seen(q, k, v, sort, log_mass, real).view(B, H, n * b, D)[:, :, :N]

    def sort_matrix(self, q: Tensor, k: Tensor, H: int, real: Tensor | None = None) -> Tensor:
        """S ``(B·H, n, n)`` from q, k ``(B·H, n, b, D)``; ``real`` is ``(B·H, n, b)``; k is 0 where not real."""
        G, n, _, D = q.shape
        dtype = accumulator(q.dtype)
        if self.net:
            mean = self._mean(k, real, self.causal, dtype).view(-1, H, n, D)
            scores = learned_scores(self.net, mean, n).reshape(G, n, n)
        else:
            seen = q if real is None else q.masked_fill(~real.unsqueeze(-1), 0)
            mean = self._mean(seen, real, self.causal, dtype) * D**-0.5
            scores = mean @ self._mean(k, real, False, dtype).mT
        scores = scores / self.temperature
        if real is not None:
            some = real.any(-1)
            scores = scores.masked_fill(~(some.unsqueeze(-1) & some.unsqueeze(-2)), hidden(dtype))
        if self.causal:
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(), hidden(dtype))
        balanced: Tensor = Balance.apply(scores, self.iterations, self.causal)  # type: ignore[no-untyped-call] # torch
        return balanced

    @staticmethod
    def _mean(x: Tensor, real: Tensor | None, cumulative: bool, dtype: torch.dtype) -> Tensor:
        """The means ``(G, n, D)`` over each block, or over its first token and everything before it."""
        total = x.sum(2, dtype=dtype)
        if real is None:
            count = x.new_full((1, x.shape[1], 1), x.shape[2], dtype=dtype)
            first = x.new_ones((), dtype=dtype)
        else:
            count, first = real.sum(2, dtype=dtype).unsqueeze(-1), real[:, :, :1].to(dtype)
        if cumulative:
            # Shifted, not subtracted: later tokens must not even leave a rounding error.
            total = pad(total.cumsum(1), (0, 0, 1, -1)) + x[:, :, 0].to(dtype)
            count = pad(count.cumsum(1), (0, 0, 1, -1)) + first
        return total / count.clamp(min=1)

    @staticmethod
    def cached_bytes(shape: Shape, width: int, *, block: int, iterations: int, **_: object) -> int:
        """A token's key and value, and its block's part of the sums of each normalisation, rounded up."""
        return shape.K * (shape.D + shape.E) * width - (-shape.H * iterations * max(width, 4) // block)


# The two fields of view of a query. Both are called with q, k, v (G, n, b, D) of G = B·H heads cut into n blocks, sort
# (G, n, n) and, if tokens are missing, log_mass (G, n, b) of the mixtures and real (G, n, b) bool.


class OwnAndSorted:
    """A query's own block and its mixture, in one softmax."""

    own = True

    def __init__(self, causal: bool) -> None:
        self.causal = causal

    def dense(self, mixtures: Tensor, home: Tensor) -> Tensor:
        """The mixtures, of ``(B, H, n, b, ...)``, that the tokens of the blocks ``home`` see: ``(B, H, N, b, ...)``."""
        return mixtures[:, :, home]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sort: Tensor, log_mass: Tensor | None, real: Tensor | None
    ) -> Tensor:
        out: Tensor = SortedSoftmax.apply(q, k, v, sort, log_mass, real, self.causal)  # type: ignore[no-untyped-call] # torch
        if log_mass is None or real is None:
            return out
        own = real.cumsum(-1) > 0 if self.causal else real.any(-1, keepdim=True)
        mixed = (log_mass > hidden(log_mass.dtype)).any(-1, keepdim=True)
        return out.masked_fill(~(own | mixed).unsqueeze(-1), 0)


class SortCut:
    """The first ``cut`` mixtures alone, the same for all queries."""

    own = False

    def __init__(self, cut: int) -> None:
        self.cut = cut

    def dense(self, mixtures: Tensor, home: Tensor) -> Tensor:
        """The mixtures, of ``(B, H, n, b, ...)``, that every token sees: ``(B, H, 1, cut·b, ...)``."""
        return mixtures[:, :, None, : self.cut].flatten(3, 4)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sort: Tensor, log_mass: Tensor | None, real: Tensor | None
    ) -> Tensor:
        sort = sort[:, : self.cut]
        mixed = [torch.bmm(sort, x.flatten(2).to(sort.dtype)).view(len(q), -1, q.shape[3]) for x in (k, v)]
        bias = None
        if log_mass is not None:
            log_mass = log_mass[:, : self.cut].reshape(len(q), 1, -1)
            mixed = [x * inverse_mass(log_mass[:, 0]) for x in mixed]
            bias = log_mass.clamp(min=hidden(q.dtype)).to(q.dtype).unsqueeze(1)
        # With a head axis of 1: only for four axes is there a kernel without the matrix of weights.
        keys, values = (x.to(q.dtype).unsqueeze(1) for x in mixed)
        return scaled_dot_product_attention(q.flatten(1, 2).unsqueeze(1), keys, values, attn_mask=bias).squeeze(1)
