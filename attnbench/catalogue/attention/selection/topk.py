"""Top-k attention: every query keeps its largest logits and drops the other keys."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from attnbench.catalogue.engines.decoding.kv_cache import Cache, CachedDecoding, last_row
from attnbench.catalogue.engines.gathered.choice import Choice
from attnbench.catalogue.engines.gathered.largest import largest
from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.tiling import budget, tiles
from attnbench.contract.problem.position_bias import position_bias
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, Traits, register


class _QueryTile(NamedTuple):
    heads: slice
    a: int
    b: int
    """The queries from a to b."""

    def logits(self, q: Tensor, k: Tensor, bias: Tensor | None, mask: Tensor | None, causal: bool) -> Tensor:
        """``(heads, b - a, m)`` of q ``(G, N, D)`` and k ``(G, M, D)``, -∞ for an unseen key."""
        heads, a, b = self
        dtype, N = accumulator(q.dtype), q.shape[1]
        rows = q[heads, a:b].to(dtype) * q.shape[2] ** -0.5
        logits = torch.bmm(rows, k[heads, : b if causal else k.shape[1]].mT.to(dtype))
        if bias is not None:
            lines = bias[torch.arange(heads.start, heads.stop, device=q.device) % len(bias)]
            logits += lines.unfold(1, logits.shape[2], 1)[:, N - b : N - a].flip(1)
        if causal:
            logits[:, :, a:] += torch.full_like(logits[0, :, a:], -torch.inf).triu(1)
        if mask is not None:
            logits.masked_fill_(~mask[heads, None, : logits.shape[2]], -torch.inf)
        return logits


class _TopKSoftmax(torch.autograd.Function):
    """q ``(G, N, D)``, k ``(G, M, D)``, v ``(G, M, E)``, G = B·H; mask ``(G, M)``. Keeps N·keys indices and weights.

    bias is ``(H, N + M - 1)``; its entry j - i + N - 1 is added to the logit of query i and key j.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        keys: int,
        causal: bool,
        rows: int | None,
    ) -> Tensor:
        (G, N, _), M, E = q.shape, k.shape[1], v.shape[2]
        dtype = accumulator(q.dtype)
        keep = any(ctx.needs_input_grad)
        indices = torch.empty((G, N, keys) if keep else 0, dtype=torch.int32, device=q.device)
        weights = torch.empty((G, N, keys) if keep else 0, dtype=dtype, device=q.device)
        out, table = q.new_empty(G, N, E), v.reshape(G * M, E).to(dtype)
        for heads, a, b in tiles(G, N, M, budget("topk.logits", q.device), rows):
            logits = _QueryTile(heads, a, b).logits(q, k, bias, mask, causal)
            kept, chosen = largest(logits.flatten(0, 1), min(keys, logits.shape[2]))
            # If nothing is seen, every logit is -inf and every weight 0.
            part = kept.sub_(kept.amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min)).exp_()
            part /= part.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
            few = chosen.shape[1]
            if causal and a < few:  # some see fewer keys, and a weight of 0 hides no NaN: they read the heaviest again
                chosen = torch.where(part > 0, chosen, chosen.gather(1, part.argmax(1, keepdim=True)))
            first = torch.arange(heads.start, heads.stop, device=q.device) * M
            chosen += first.repeat_interleave(b - a).unsqueeze(1)
            out[heads, a:b] = embedding_bag(chosen, table, per_sample_weights=part, mode="sum").view(-1, b - a, E)
            if keep:
                chosen, part = (x.view(-1, b - a, few) for x in (chosen, part))
                indices[heads, a:b, :few], indices[heads, a:b, few:] = chosen, chosen[..., :1]
                weights[heads, a:b, :few], weights[heads, a:b, few:] = part, 0
        ctx.save_for_backward(q, k, v, bias, indices, weights)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, indices, weights = ctx.saved_tensors
        (G, N, D), M, E = q.shape, k.shape[1], v.shape[2]
        dtype = weights.dtype
        k_table, v_table = (x.reshape(G * M, -1).to(dtype) for x in (k, v))
        dq, dk, dv = (
            torch.empty_like(q, memory_format=torch.contiguous_format),
            torch.zeros_like(k_table),
            torch.zeros_like(v_table),
        )
        dbias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        rows = max(1, budget("topk.values", q.device) // (indices.shape[2] * max(D, E)))
        flat = [x.reshape(G * N, -1) for x in (q, grad, indices, weights)]
        for a in range(0, G * N, rows):
            queries, dout, chosen, part = (x[a : a + rows] for x in flat)
            queries, dout, where = queries.to(dtype) * D**-0.5, dout.to(dtype), chosen.reshape(-1)
            gathered = v_table.index_select(0, where).view(*chosen.shape, E)
            dlogits = torch.linalg.vecdot(gathered, dout.unsqueeze(1))
            dlogits = (dlogits - torch.linalg.vecdot(dlogits, part).unsqueeze(1)) * part
            dv.index_add_(0, where, torch.mul(part.unsqueeze(2), dout.unsqueeze(1), out=gathered).view(-1, E))
            room = gathered if D == E else gathered.new_empty(*chosen.shape, D)
            dk.index_add_(0, where, torch.mul(dlogits.unsqueeze(2), queries.unsqueeze(1), out=room).view(-1, D))
            if dbias is not None:
                row = torch.arange(a, a + len(chosen), device=q.device).unsqueeze(1)
                at = row // N % len(dbias) * (N + M - 1) + chosen % M - row % N + N - 1
                dbias.view(-1).index_add_(0, at.view(-1), dlogits.view(-1).to(dbias.dtype))
            dqueries = embedding_bag(chosen, k_table, per_sample_weights=dlogits, mode="sum")
            dq.view(G * N, D)[a : a + rows] = dqueries.mul_(D**-0.5)
        return dq, dk.view_as(k).to(k.dtype), dv.view_as(v).to(v.dtype), dbias, None, None, None, None


@register(
    "topk",
    family="learned pattern",
    source="Gupta et al. 2021, arXiv:2106.06899, section 2",
    formula="oᵢ = Σ_{j∈Tᵢ} softmax_{j∈Tᵢ}(qᵢ·kⱼ/√D) vⱼ, Tᵢ the t keys of largest qᵢ·kⱼ",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(
        decode=True, bias=True, shares="query by query", permutable=True, exact_with=("keys={n}",), knob=Knob("keys")
    ),
    settings=("keys=3,chunk=5", "keys=1"),
)
class TopK(CachedDecoding, nn.Module):
    """Softmax over each query's t largest logits, in chunks of queries.

    Gupta et al. 2021, "Memory-efficient Transformers via Top-k Attention". q ``(B, H, N, D)``, k ``(B, H, M, D)`` and v
    ``(B, H, M, E)`` -> ``(B, H, N, E)``. All logits of a chunk of queries are computed, the t = ``keys`` largest of
    each row are kept, and only the values of these are read. Time stays O(n²·d) forward. Memory is O(chunk·M + n·t),
    since only indices and weights of the kept keys are saved, and the backward pass costs O(n·t·d). The default of 64
    keys is this project's.

    t >= M gives exact attention. Which of equal entries are taken is not defined. Gradients flow only through the kept
    logits; the choice has none. Where fewer than t keys are visible, all of them are kept. A bias is added before the
    largest are chosen. This implementation looks for them first among the maxima of groups of four, and on a CPU by
    their bits as integers, both faster than torch.topk.

    The operator is that of ``oracle-topk:renormalise=true``, which is plain code and stands for the best that a sparse
    method can select; this is the method itself, at its real cost.

    Differs from the authors' code: the values of the kept keys are summed as a sparse product, as in their
    AttentionNoCacheSparse, where AttentionNoCache takes a dense one; no top-k in the feed-forward layer.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        keys: Annotated[int, Field(ge=1, description="keys kept for each query")] = 64,
        chunk: Annotated[
            int | None,
            Field(ge=1, description="queries taken at a time; none: what is fast. Moves time and memory only"),
        ] = None,
    ) -> None:
        super().__init__()
        self.causal, self.keys, self.chunk, self.capacity = shape.causal, keys, chunk, shape.M
        self.position_bias = position_bias(shape)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if self.position_bias is not None:
            logits = logits + self.position_bias(slice(0, q.shape[2]), slice(0, k.shape[2]), q.dtype)
        logits = logits.masked_fill(~visible_pairs(q, k, self.causal, key_mask), -torch.inf)
        rank = logits.argsort(-1, descending=True).argsort(-1)
        weights = logits.masked_fill(rank >= self.keys, -torch.inf).softmax(-1)
        return torch.matmul(weights.nan_to_num(0), v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        H = q.shape[1]
        flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
        mask = None if key_mask is None else key_mask.repeat_interleave(H, 0)
        keys = min(self.keys, k.shape[2])
        bias = None
        if self.position_bias is not None:
            distances = torch.arange(1 - q.shape[2], k.shape[2], device=q.device)
            bias = self.position_bias.along(distances, accumulator(q.dtype))
        out: Tensor = _TopKSoftmax.apply(*flat, bias, mask, keys, self.causal, self.chunk)  # type: ignore[no-untyped-call] # torch
        return out.view(*q.shape[:3], -1)

    @property
    def selects(self) -> bool:
        return self.position_bias is None

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Choice:
        (k,) = emptied(key_mask, k)
        (B, H, N), M = q.shape[:3], k.shape[2]
        x, y = (one.reshape(B * H, *one.shape[2:]) for one in (q, k))
        mask = None if key_mask is None else key_mask.repeat_interleave(H, 0)
        chosen = torch.full((B * H, N, min(self.keys, M)), -1, dtype=torch.int32, device=q.device)
        for tile in map(_QueryTile._make, tiles(B * H, N, M, budget("topk.logits", q.device), self.chunk)):
            logits = tile.logits(x, y, None, mask, self.causal)
            _, found = largest(logits.flatten(0, 1), min(self.keys, logits.shape[2]))
            chosen[tile.heads, tile.a : tile.b, : found.shape[1]] = found.view(*logits.shape[:2], -1).int()
        return Choice(torch.unflatten(chosen, 0, (B, H)), H, M, causal=self.causal, real=key_mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Choice) -> Tensor:
        return selection.attend(q, k, v)

    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Cache]:
        state = state.append(k, v)
        dtype = accumulator(q.dtype)
        logits = torch.matmul(q * q.shape[-1] ** -0.5, state.keys.mT).to(dtype)
        if self.position_bias is not None:
            logits = logits + last_row(self.position_bias, state.length, dtype)
        kept, chosen = largest(logits.flatten(0, 2), min(self.keys, state.length))
        weights = kept.softmax(-1).view(*q.shape[:3], -1)
        values = state.values.gather(2, chosen.view(*q.shape[:2], -1, 1).expand(-1, -1, -1, v.shape[3]))
        return torch.matmul(weights.to(v.dtype), values), state
