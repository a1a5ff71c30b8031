"""Compressed sparse attention: near tokens one by one, and those entries for earlier runs that an index ranks first."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm

from attnbench.catalogue.attention.selection.compressed.layer import (
    EPS,
    ROWS,
    CompressedLayer,
    CompressedState,
    normed,
    turned_by_formula,
)
from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.decoding.ring import Ring
from attnbench.catalogue.engines.gathered.chosen import best
from attnbench.catalogue.engines.gathered.key_index import Index, lesson, taught
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.tiling import budget, recomputed, row_blocks, tiles
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register


class Overlapping(nn.Module):
    """One entry for every run of tokens, made of that run and the one before it."""

    def __init__(self, shape: Shape, width: int, run: int) -> None:
        super().__init__()
        self.run, self.width = run, width
        self.parts = nn.Linear(shape.C, 4 * width, bias=False)
        self.places = nn.Parameter(torch.zeros(2 * run, width))
        self.norm = nn.RMSNorm(width, eps=EPS)

    def forward(self, parts: Tensor, real: Tensor | None = None) -> Tensor:
        """``(B, n // run, width)`` from parts ``(B, n, 4·width)``: contents for the next entry and the own, then gates.

        In the accumulator: an entry goes through a mean and a norm before it is read. ``real`` is ``(1 or B, n)`` bool;
        the run before the first does not count.
        """
        B, n, _ = parts.shape
        runs, dtype = n // self.run, accumulator(parts.dtype)
        if not runs:
            return parts.new_zeros(B, 0, self.width, dtype=dtype)
        there = torch.ones(1, n, dtype=torch.bool, device=parts.device) if real is None else real
        cut, counts = (torch.unflatten(x[:, : runs * self.run], 1, (runs, self.run)) for x in (parts.to(dtype), there))
        earlier, own, gate_of_earlier, gate = torch.split(cut, self.width, -1)
        contents = torch.cat([pad(earlier[:, :-1], (0, 0, 0, 0, 1, 0)), own], 2)
        gates = torch.cat([pad(gate_of_earlier[:, :-1], (0, 0, 0, 0, 1, 0)), gate], 2) + self.places.to(dtype)
        counts = torch.cat([pad(counts[:, :-1], (0, 0, 1, 0)), counts], 2)
        made = (contents * gates.masked_fill(~counts[..., None], hidden(dtype)).softmax(2)).sum(2)
        return rms_norm(made, (self.width,), self.norm.weight.to(dtype), EPS)


@register(
    "csa",
    kind="mixer",
    family="learned pattern",
    also=("low rank", "fixed pattern"),
    source="DeepSeek-AI 2026 (DeepSeek-V4), section 2.3; transformers, modeling_deepseek_v4.py",
    formula="o = ρ⁻¹ softmax([q·kⱼ near, q·e_r for r∈T, s])·[k; e; 0],  T the t runs of largest Σ_h w_h·relu(a_h·b_r)",
    cost="O(n·w·d + n²·d/m)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        sink=No("its softmax has a learned sink of its own"),
        meets="mixtures",
        cross=No("window and runs are counted from a token's own place in one sequence"),
        decode=True,
        stochastic=True,
        rows_sum_to_one=False,
        knob=Knob("top_k"),
        own_form_both_ways="a window on both sides and a choice of all runs; the paper defines the causal form only",
    ),
    settings=(
        "run=4,window=5,q_rank=3,top_k=2,index_heads=2,index_dim=3",
        "run=3,window=2,rope_dim=2,top_k=20,index_heads=1,index_dim=5",
    ),
)
class CSA(CompressedLayer):
    """Compressed sparse attention (CSA) of DeepSeek-V4.

    DeepSeek-AI 2026, "DeepSeek-V4". x ``(B, N, C)`` -> ``(B, N, C)``. All heads of queries share one head of width D,
    whose keys are its values too. A query sees the last ``window`` tokens, its own included, and ``top_k`` entries, one
    for each run of ``run`` tokens that is closed, all in one softmax, in which a learned number of each head, its sink,
    takes weight and gives nothing. Windows, norms, rotary places and sink are those of ``hca``.

    Runs overlap: a token has two contents and two gates, one pair for the entry of its own run and one for that of the
    next. An entry is the average of 2·``run`` contents, channel by channel, by the softmax of their gates plus a
    learned number for each place and channel. The first run has nothing before it, which takes no weight.

    An index chooses the entries of a query, for all heads: of the ``top_k`` largest Σ_h w_h·relu(a_h·b_r), where b_r is
    an entry of width ``index_dim`` that has its own contents and gates, the ``index_heads`` queries a_h are made of the
    latent of the layer's queries, and the weights w_h of the input. No gradient flows through a choice. The index has a
    loss of its own, the cross entropy of its softmax with the mean of the heads' weights over the chosen entries, whose
    gradient reaches it alone, apart from the model's own loss.

    Logits exist for a tile of queries at a time, and of the entries those that its queries have chosen: memory is O(n).
    Time keeps a square, N²/run products of the index. Decoding keeps the window, the last two runs, the entries and the
    index's keys. A padded token gives nothing to the next run's entry, and no query sees that of its own run. Runs
    of 4 are the paper's; window, rope_dim and q_rank are as in ``hca``; top_k, index_heads and index_dim are this
    project's, for shorter sequences. As many entries as there are leave out none.

    Differs from the authors' code: one matrix makes the output, where theirs goes through a low rank in groups of
    heads; rotary angles have the base 10000, without any extension to longer contexts, and pairs are the channels c and
    c + rope_dim/2; the index has no rotary part, no Hadamard rotation and no 8-bit numbers, and learns from the start,
    without a first stage with attention to all entries.

    Raises:
        UsageError: ``rope_dim`` is odd, or more than D.
        Unsupported: D is 1, and rotary positions turn pairs.
    """

    entries_of: ClassVar[type[Overlapping]] = Overlapping

    def __init__(
        self,
        shape: Shape,
        *,
        run: Annotated[int, Field(ge=1, description="tokens from one entry to the next")] = 4,
        window: Annotated[int, Field(ge=1, description="nearest tokens, the query's own included")] = 128,
        top_k: Annotated[int, Field(ge=1, description="entries kept for each query")] = 64,
        index_heads: Annotated[int, Field(ge=1, description="heads of the index")] = 4,
        index_dim: Annotated[int, Field(ge=1, description="width of a head of the index")] = 64,
        q_rank: Annotated[
            int | None, Field(ge=1, description="width of the queries' latent; none: 2·D, at most C")
        ] = None,
        rope_dim: Annotated[int | None, Field(ge=2, description="channels that are turned, even; none: D/8")] = None,
    ) -> None:
        super().__init__(shape, "csa", window, q_rank, rope_dim)
        self.run, self.top_k, self.index_heads = run, top_k, index_heads
        self.entry = self.entries_of(shape, self.D, run)
        self.index_entry = self.entries_of(shape, index_dim, run)
        self.index_q = nn.Linear(self.q_down.out_features, index_heads * index_dim, bias=False)
        self.index_w = nn.Linear(shape.C, index_heads, bias=False)

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Head by head with the matrix of all tokens and entries; those of lower rank are hidden."""
        (x,) = emptied(key_mask, x)
        (B, N, _), D, m = x.shape, self.D, self.run
        i, runs = torch.arange(N, device=x.device), N // m
        real = torch.ones(B, N, dtype=torch.bool, device=x.device) if key_mask is None else key_mask

        turned = partial(turned_by_formula, P=self.P)

        def entries(made_by: Overlapping, y: Tensor) -> Tensor:
            before, own, gate_before, gate = (y @ made_by.parts.weight.mT).chunk(4, -1)
            made = []
            for r in range(runs):
                here, last = slice(r * m, r * m + m), slice(max(0, r - 1) * m, r * m)
                contents = torch.cat([before[:, last], own[:, here]], 1)
                gates = torch.cat([gate_before[:, last], gate[:, here]], 1) + made_by.places[-contents.shape[1] :]
                counts = torch.cat([real[:, last], real[:, here]], 1)[..., None]
                made.append((contents * gates.masked_fill(~counts, torch.finfo(x.dtype).min).softmax(1)).sum(1))
            return normed(torch.stack(made, 1)) * made_by.norm.weight if made else y.new_zeros(B, 0, made_by.width)

        latent = normed(x @ self.q_down.weight.mT) * self.q_norm.weight
        made = turned(entries(self.entry, x), torch.arange(runs, device=x.device) * m)
        keys = torch.cat([turned(normed(x @ self.kv.weight.mT) * self.kv_norm.weight, i), made], 1)
        near = ((i[:, None] - i).abs() < self.window) & (i <= i[:, None] if self.causal else i >= 0) & real[:, None]
        closed = torch.arange(1, runs + 1, device=x.device) * m <= (i[:, None] + 1 if self.causal else N)
        whole = [real[:, r * m : r * m + m].all(1) for r in range(runs)]
        closed = closed.expand(B, N, runs) & (torch.stack(whole, 1)[:, None] if runs else True)
        a = torch.unflatten(latent.detach() @ self.index_q.weight.mT, 2, (self.index_heads, -1))
        w = x.detach() @ self.index_w.weight.mT * a[0, 0].numel() ** -0.5
        b = entries(self.index_entry, x.detach())
        scores = (torch.einsum("bnid,brd->bnir", a, b).clamp(min=0) * w[..., None]).sum(2)
        # A stable order from the last entry back: of equal indices the latest comes first.
        order = scores.masked_fill(~closed, -torch.inf).float().flip(-1).argsort(dim=-1, descending=True, stable=True)
        kept = closed & (order.argsort(-1).flip(-1) < self.top_k)
        heads, of_entries = [], x.new_zeros(B, N, runs)
        for to_query, sink in zip(self.q_up.weight.chunk(self.H), self.sink, strict=True):
            q = turned(normed(latent @ to_query.mT), i)
            logits = (q @ keys.mT * D**-0.5).masked_fill(~torch.cat([near, kept], 2), -torch.inf)
            weights = torch.cat([logits, sink.expand(B, N, 1)], -1).softmax(-1)[..., :-1]
            heads.append(turned(weights @ keys, -i))
            of_entries = of_entries + logits[..., N:].detach().softmax(-1).nan_to_num(0) / self.H
        out: Tensor = self.out(torch.cat(heads, -1))
        surprise = -(of_entries * scores.masked_fill(~kept, torch.finfo(x.dtype).min).log_softmax(-1)).sum(-1)
        return taught(out, (surprise * real).sum() / real.sum()) if runs else out

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        B, N, _ = x.shape
        latent = self._latent(x)
        q, tokens, entries = (
            self._queries(latent, 0),
            self._tokens(x, 0),
            self._entries(self.entry.parts(x), 0, key_mask),
        )
        index = self._index(x, latent, key_mask)
        chosen = self._choose(index, key_mask)
        width = self.H * (self.window + chosen.shape[2]) + chosen.shape[2] * self.D
        # No more than the window's length: a tile has the logits of all near tokens that one of its queries sees.
        most = max(ROWS, min(self.window, budget("gathered.listed", x.device) // (B * width)))
        rows, outputs = row_blocks(N, most), []
        for block, part, picks in zip(rows, torch.split(q, most, 2), torch.split(chosen, most, 1), strict=True):
            near = self._near(block, N)
            seen = self._seen_near(block, near, x.device)[None]
            if key_mask is not None:
                seen = seen & key_mask[:, None, near]
            inputs = part, tokens[:, near], entries, picks, self.sink, seen
            outputs.append(recomputed(_attended, *inputs, wanted=len(rows) > 1))
        out = self._joined(torch.cat(outputs, 2), 0)
        if not torch.is_grad_enabled() or not entries.shape[1]:
            return out
        return taught(out, lesson(index, chosen, q, entries[:, None], key_mask))

    def _entries(self, parts: Tensor, first: int, real: Tensor | None = None) -> Tensor:
        return self._turned(self.entry(parts, real)[:, None], first, self.run)[:, 0]

    def _index(self, x: Tensor, latent: Tensor, key_mask: Tensor | None) -> Index:
        """The ranking of entries. Only the index's own loss trains it."""
        x = x.detach()
        a, w = self._asks(x, latent.detach())
        return Index(a, self.index_entry(self._index_parts(x), key_mask), w)

    def _asks(self, x: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Queries of the index ``(B, n, I, d)`` and their weights ``(B, n, I)``.

        In the accumulator from the input on, as their keys are: rounding must not choose.
        """
        dtype = accumulator(x.dtype)
        a, w = (linear(y, one.weight.to(dtype)) for y, one in ((latent, self.index_q), (x.to(dtype), self.index_w)))
        return torch.unflatten(a, 2, (self.index_heads, -1)), w * a.shape[2] ** -0.5

    def _index_parts(self, x: Tensor) -> Tensor:
        dtype = accumulator(x.dtype)
        return linear(x.to(dtype), self.index_entry.parts.weight.to(dtype))

    @torch.no_grad()
    def _choose(self, index: Index, key_mask: Tensor | None) -> Tensor:
        """The entries of each query, ``(B, N, min(top_k, entries))`` int32; -1 if fewer are closed."""
        (B, N, heads), runs = index.a.shape[:3], index.b.shape[1]
        device = index.a.device
        chosen = torch.full((B, N, min(self.top_k, runs)), -1, dtype=torch.int32, device=device)
        open_ = None
        if key_mask is not None:
            open_ = ~torch.unflatten(key_mask[:, : runs * self.run], 1, (runs, self.run)).all(2)
        for examples, a, b in tiles(B, N, heads * max(1, runs), budget("topk.logits", device)):
            last = b // self.run if self.causal else runs  # the entries that the last of these queries can see
            if not last:
                continue
            unseen = torch.zeros(1, b - a, last, dtype=torch.bool, device=device)
            if self.causal:
                ends = torch.arange(1, last + 1, device=device) * self.run - 1
                unseen = unseen | (ends > torch.arange(a, b, device=device)[:, None])
            if open_ is not None:
                unseen = unseen | open_[examples, None, :last]
            scores = index.scores(examples, slice(a, b), last)
            found = best(scores.masked_fill(unseen, -torch.inf), self.top_k)
            chosen[examples, a:b, : found.shape[2]] = found
        return chosen

    def begin(self, x: Tensor) -> CompressedState:
        tokens, m = self._tokens(x, 0)[:, None], self.run
        parts = self._parts(x)
        pending = parts.new_zeros(x.shape[0], 2 * m, parts.shape[2])
        last = torch.arange(max(0, x.shape[1] // m * m - m), x.shape[1], device=x.device)
        pending[:, last % (2 * m)] = parts[:, last]
        of_entries, of_index = self._split(parts)
        entries, keys = self._entries(of_entries, 0)[:, None].to(x.dtype), self.index_entry(of_index)[:, None]
        window = Ring.of(tokens, tokens[..., :0], self.window, self.room)
        return CompressedState(window, pending, Cache.of(entries, keys, self.room // m), m)

    def step(self, state: CompressedState, x: Tensor) -> tuple[Tensor, CompressedState]:
        t, m, pending, entries = state.window.length, self.run, state.pending, state.entries
        token, latent = self._tokens(x, t)[:, None], self._latent(x)
        window = state.window.append(token, token[..., :0])
        pending[:, t % (2 * m)] = self._parts(x)[:, 0]
        if (t + 1) % m == 0:
            in_order = pending if (t + 1) % (2 * m) == 0 else pending.roll(m, 1)
            of_entries, of_index = self._split(pending[:, :m] if t < m else in_order)
            made = self.entry(of_entries)[:, None, -1:], self.index_entry(of_index)[:, None, -1:]
            entries = entries.append(self._turned(made[0], t + 1 - m), made[1])
        with torch.no_grad():
            a, w = self._asks(x, latent)
            keys = entries.values[:, 0]
            scores = Index(a, keys, w).scores(slice(None), slice(None), entries.length)
            chosen = best(scores, self.top_k) if entries.length else scores.to(torch.int32)
        seen = torch.ones(1, 1, window.keys.shape[2], dtype=torch.bool, device=x.device)
        y = _attended(self._queries(latent, t), window.keys[:, 0], entries.keys[:, 0], chosen, self.sink, seen)
        return self._joined(y, t), CompressedState(window, pending, entries, m)

    def _parts(self, x: Tensor) -> Tensor:
        return torch.cat([self.entry.parts(x), self._index_parts(x)], -1)

    def _split(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        of_entries, of_index = torch.split(parts, [4 * self.D, 4 * self.index_entry.width], -1)
        return of_entries, of_index

    @staticmethod
    def cached_bytes(shape: Shape, width: int, *, run: int, index_dim: int, **_: object) -> int:
        """A token's part of an entry and of the index's key, which has float32 at least, rounded up."""
        return -(-(shape.D * width + index_dim * max(width, 4)) // run)


def _attended(q: Tensor, tokens: Tensor, entries: Tensor, chosen: Tensor, sink: Tensor, seen: Tensor) -> Tensor:
    """softmax([q·tokens/√D, q·entries/√D, sink])·[tokens; entries; 0], of the entries that each query has chosen.

    Args:
        q: ``(B, H, n, D)``; tokens: ``(B, m, D)``; entries: ``(B, R, D)``; sink: ``(H,)``.
        chosen: ``(B, n, T)``; below 0: none.
        seen: ``(1 or B, n, m)``, of the tokens.

    Returns:
        ``(B, H, n, D)`` in the accumulator.
    """
    (B, H, n, D), dtype, T = q.shape, accumulator(q.dtype), chosen.shape[2]
    tokens, entries = tokens.to(dtype), entries.to(dtype)
    at = chosen.long().clamp(min=0).flatten(1)[..., None].expand(-1, -1, D)
    picked = entries.gather(1, at).view(B, n, T, D)
    rows = (q.to(dtype) * D**-0.5).transpose(1, 2)
    near = torch.matmul(rows.flatten(1, 2), tokens.mT).view(B, n, H, -1).masked_fill(~seen[:, :, None], hidden(dtype))
    far = torch.matmul(rows, picked.mT).masked_fill((chosen < 0)[:, :, None], hidden(dtype))
    column = sink.to(dtype)[:, None].expand(B, n, H, 1)
    weights = torch.cat([near, far, column], -1).softmax(-1)
    of_near, of_far, _ = torch.split(weights, [tokens.shape[1], T, 1], -1)
    out = torch.matmul(of_near.flatten(1, 2), tokens).view(B, n, H, D) + torch.matmul(of_far, picked)
    return out.transpose(1, 2)
