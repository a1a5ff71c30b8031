"""MonarchAttention: softmax attention projected onto products of two block-diagonal matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.catalogue.engines.low_rank.segments import take
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.tiling import budget, large_steps, recomputed
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register


@register(
    "monarch",
    family="low rank",
    source="Yaras et al. 2025, arXiv:2505.18698, authors' code, ma_torch.py",
    formula="P = L∘R,  P_(l,j),(k,i) = L_jkl·R_kji,  argmax over L, then R, … of ⟨P, Q·Kᵀ/√D⟩ + entropy(P);  O = P·V",
    cost="O(t·n^1.5·d)",
    memory_exponent=1.0,
    traits=Traits(
        causal=No("each update of a factor averages over queries and keys of all blocks, later ones included"),
        exact_with=("block={n}", "block=1"),
        knob=Knob("steps", step=1),
    ),
    settings=("block=4", "block=5,steps=1", "block=3,steps=3"),
)
class Monarch(nn.Module):
    """Softmax attention projected onto Monarch matrices, in O(n√n).

    Yaras et al. 2025, "MonarchAttention". Queries are numbered (l, j), keys (k, i): block l or k, place j or i among
    its ``block`` = b tokens. The matrix is P = L_jkl·R_kji with L a distribution over k and R over i, so that its rows
    sum to 1. A row of softmax maximises ⟨p, logits⟩ + entropy(p). The sum of this over all rows of P is maximised over
    R and L in turn, ``steps`` times, starting from L_jkl = [k = l]:

    - R_kj· = softmax_i(x_jk·k_ki), x_jk = Σ_l L_jkl q_lj / Σ_l L_jkl (queries scaled by 1/√D);
    - L_j·l = softmax_k(q_lj·Σ_i R_kji k_ki - Σ_i R_kji log R_kji);

    and o_lj = Σ_k L_jkl Σ_i R_kji v_ki. No step lowers the sum. It is exact where logits are a function of (j, k, l)
    plus one of (k, j, i), and with ``block`` = 1 or b >= n. Neighbours share blocks: the order of the tokens matters.

    The last block may be partly empty: empty places get no weight and hold no query, and where no query is left in Σ_l,
    R is uniform. Padding is cut out first (real tokens move together), so that a padded sequence gives the output of
    the shorter one in the same module. Cross-attention cuts both sequences into blocks of the same size.

    Differs from the authors' code: x is computed as a softmax over l of log L, which neither divides by a small sum nor
    adds a constant to it; by default b is √M, rounded up, for the shape the module was made for; memory holds one tile
    of L or R at a time, forward and backward.

    q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` -> ``(B, H, N, D)``; ``key_mask`` ``(B, M)``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int | None, Field(ge=1, description="tokens per block b; none: √M of the shape")] = None,
        steps: Annotated[int, Field(ge=1, description="updates of both factors")] = 2,
    ) -> None:
        super().__init__()
        self.block = math.isqrt(shape.M - 1) + 1 if block is None else block
        self.steps, self.cross = steps, shape.cross

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The updates with all N x M logits and the whole matrix P, example by example over its real tokens."""
        out, D, b = q.new_zeros(*q.shape[:3], v.shape[3]), q.shape[3], self.block
        for e in range(len(q)):
            seen = torch.ones(k.shape[2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask[e]
            asked = (
                torch.ones(q.shape[2], dtype=torch.bool, device=q.device) if key_mask is None or self.cross else seen
            )
            n, m = int(asked.sum()), int(seen.sum())
            rows, columns = -(-n // b), -(-m // b)
            if m == 0:
                continue
            Q, K, V = (
                pad(x[e][:, real], (0, 0, 0, size * b - int(real.sum()))).view(-1, size, b, x.shape[3])
                for x, real, size in ((q, asked, rows), (k, seen, columns), (v, seen, columns))
            )
            logits = torch.einsum("hljd,hkid->hljki", Q, K) * D**-0.5
            is_query = (torch.arange(rows * b, device=q.device) < n).view(rows, b).T[:, None]  # (j, 1, l)
            is_key = (torch.arange(columns * b, device=q.device) < m).view(columns, 1, b)
            L = torch.eye(columns, rows, dtype=q.dtype, device=q.device) * is_query.expand(b, columns, rows)
            L = L.expand(len(Q), -1, -1, -1)
            for _ in range(self.steps):
                asking = L.sum(-1).mT.unsqueeze(-1)
                share = torch.einsum("hjkl,hljki->hkji", L, logits) / asking.masked_fill(asking == 0, 1)
                log_R = share.masked_fill(~is_key, -torch.inf).log_softmax(-1)
                R = log_R.exp()
                entropy = -(R * log_R.masked_fill(~is_key, 0)).sum(-1).mT.unsqueeze(-1)
                gain = torch.einsum("hkji,hljki->hjkl", R, logits) + entropy
                L = gain.softmax(2) * is_query
            P = torch.einsum("hjkl,hkji->hljki", L, R).reshape(len(Q), rows * b, columns * b)
            out[e][:, asked] = (P @ V.flatten(1, 2))[:, :n]
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        if key_mask is None:
            return self._attend(q, k, v, None, None)
        order = key_mask.logical_not().sort(dim=1, stable=True).indices
        keys = torch.arange(k.shape[2], device=k.device) < key_mask.sum(1, keepdim=True)
        k, v = take(k, order), take(v, order)
        if self.cross:
            return self._attend(q, k, v, None, keys).masked_fill(~key_mask.any(1)[:, None, None, None], 0)
        out = self._attend(take(q, order), k, v, keys, keys).masked_fill(~keys[:, None, :, None], 0)
        return take(out, order.argsort(1))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, asked: Tensor | None, keys: Tensor | None) -> Tensor:
        """The output for real tokens at the front, which ``asked`` ``(B, N)`` and ``keys`` ``(B, M)`` mark."""
        (B, H, N, D), M = q.shape, k.shape[2]
        G, b, dtype = B * H, min(self.block, max(N, M)), accumulator(q.dtype)
        rows, columns = -(-N // b), -(-M // b)
        queries = q.to(dtype) * D**-0.5
        if asked is not None:
            queries = queries.masked_fill(~asked[:, None, :, None], 0)
        queries, key, value = (
            pad(x.to(dtype).reshape(G, *x.shape[2:]), (0, 0, 0, n * b - x.shape[2])).reshape(G, n, b, x.shape[3])
            for x, n in ((queries, rows), (k, columns), (v, columns))
        )
        x = pad(queries, (0, 0, 0, 0, 0, columns - rows))  # L is the identity; a negative width cuts off
        queries = queries.transpose(1, 2).reshape(G * b, rows, D)  # all blocks at each place
        key, value = (x.reshape(-1, b, x.shape[3]) for x in (key, value))
        no_key, no_query = _hidden(keys, k, columns * b, dtype), _hidden(asked, q, rows * b, dtype)
        if no_key is not None:
            no_key = no_key.view(-1, 1, b)
        if no_query is not None:
            no_query = no_query.view(G, rows, b).transpose(1, 2).reshape(-1, rows, 1)
        cells = budget("monarch.factors", q.device)
        if not large_steps(q):
            cells = min(cells, 32 * max(N, M))
        for step in range(1, self.steps + 1):
            last = step == self.steps
            parts = _in_tiles(_right, cells // b**2, x.reshape(-1, b, D), key, value if last else None, no_key)
            mean, entropy, *read = (
                p.view(G, columns, b, -1).transpose(1, 2).reshape(G * b, columns, -1) for p in parts
            )
            ends = (read[0], None) if last else (None, no_query)
            (x,) = _in_tiles(_left, cells // (rows * columns), queries, mean, entropy.mT, *ends)
            x = x.reshape(G, b, -1, x.shape[-1]).transpose(1, 2)
        return x.reshape(B, H, rows * b, -1)[:, :, :N].to(q.dtype)


def _hidden(real: Tensor | None, x: Tensor, places: int, dtype: torch.dtype) -> Tensor | None:
    """``(B·H, places)``: far below 0 for a missing token of x ``(B, H, n, D)``; None if every place has one."""
    B, H, n, _ = x.shape
    if real is None and n == places:
        return None
    real = torch.ones(B, n, dtype=torch.bool, device=x.device) if real is None else real
    bias = torch.zeros(B, places, dtype=dtype, device=x.device).masked_fill_(~pad(real, (0, places - n)), hidden(dtype))
    return bias.repeat_interleave(H, 0)


def _right(x: Tensor, k: Tensor, v: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    """For each row of R, from x and keys ``(g, b, D)``: the mean key, Σ R log R and, with v, the mean value."""
    logits = torch.bmm(x, k.mT)
    if bias is not None:
        logits = logits + bias
    R = logits.softmax(-1)
    mean = torch.bmm(R, k)
    # The largest weight is exp(largest logit) / sum: cheaper to read than a sum of exponentials.
    log_sum = logits.amax(-1, keepdim=True) - R.amax(-1, keepdim=True).log()
    entropy = (x * mean).sum(-1, keepdim=True) - log_sum
    return (mean, entropy) if v is None else (mean, entropy, torch.bmm(R, v))


def _left(q: Tensor, mean: Tensor, entropy: Tensor, read: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Each query's readings by L, or the mean query of each block k; q is ``(g, l, D)``, mean keys ``(g, k, D)``."""
    gain = torch.bmm(q, mean.mT) - entropy
    if read is not None:
        return (torch.bmm(gain.softmax(-1), read),)
    log_L = gain.log_softmax(-1)
    return (torch.bmm((log_L if bias is None else log_L + bias).softmax(1).mT, q),)


def _in_tiles(
    function: Callable[..., tuple[Tensor, ...]], step: int, x: Tensor, *others: Tensor | None
) -> list[Tensor]:
    """``function`` applied to ``step`` entries at a time and joined; the backward pass computes each tile again."""
    tensors, count = (x, *others), -(-len(x) // max(1, step))
    # Split, not sliced: the gradient of a slice is as large as the whole.
    tiles = zip(*([None] * count if t is None else torch.split(t, max(1, step)) for t in tensors), strict=True)
    learned = any(t is not None and t.requires_grad for t in tensors)
    parts = [recomputed(function, *tile, wanted=learned) for tile in tiles]
    return [torch.cat(column) for column in zip(*parts, strict=True)]
