"""Heavily compressed attention: near tokens one by one, and one entry for every run of earlier ones."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import rms_norm

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
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.tiling import budget, recomputed, row_blocks
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register


@register(
    "hca",
    kind="mixer",
    family="low rank",
    also=("fixed pattern",),
    source="DeepSeek-AI 2026 (DeepSeek-V4), section 2.3.2; transformers, modeling_deepseek_v4.py",
    formula="o = ρ⁻¹ softmax([q·kⱼ near, q·e_r closed, s])·[k; e; 0],  e_r = ρ(norm(Σ_j softmax_j(z_j + b_j)∘c_j))",
    cost="O(n·w·d + n²·d/m)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        sink=No("its softmax has a learned sink of its own"),
        cross=No("window and runs are counted from a token's own place in one sequence"),
        decode=True,
        stochastic=True,
        rows_sum_to_one=False,
        own_form_both_ways="a window on both sides and all closed runs; the paper defines the causal form only",
    ),
    settings=("run=4,window=5,q_rank=3", "run=3,window=2,rope_dim=2"),
)
class HCA(CompressedLayer):
    """Heavily compressed attention (HCA) of DeepSeek-V4.

    DeepSeek-AI 2026, "DeepSeek-V4". x ``(B, N, C)`` -> ``(B, N, C)``. All heads of queries share one head of width D,
    whose keys are its values too. A query sees the last ``window`` tokens, its own included, and one entry for each
    closed run of ``run`` tokens, all in one softmax, in which a learned number of each head, its sink, takes weight and
    gives nothing. An entry is made of its run channel by channel: contents c, averaged by the softmax over the run of
    the gates z plus a learned number for each place and channel. It can be seen from the last token of its run on. A
    near token whose run is closed is seen twice.

    Tokens and entries go through a root-mean-square norm with a learned scale, the queries of a head, which come of a
    latent of ``q_rank`` numbers, through one without. After it the last ``rope_dim`` channels are turned by the place,
    those of an entry by the place of its run's first token. Readings are turned too, since keys are values: the
    output is turned back by the query's place, so that it depends on distances.

    Logits exist for a tile of queries at a time: memory is O(n). Time keeps a square, of N²/run pairs. Decoding keeps
    the window, the open run and the entries. Padding keeps its places: a window that holds some has fewer tokens, and
    no query sees an entry with a padded token. Defaults: run and window of 128 are the paper's; rope_dim = D/8 (64 of
    512) and q_rank = 2·D, at most C, are in the proportions of its smaller model.

    Differs from the authors' code: one matrix makes the output, where theirs goes through a low rank in groups of
    heads; rotary angles have the base 10000, without any extension to longer contexts; their pairs are the channels c
    and c + rope_dim/2.

    Raises:
        UsageError: ``rope_dim`` is odd, or more than D.
        Unsupported: D is 1, and rotary positions turn pairs.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        run: Annotated[int, Field(ge=1, description="tokens that make one entry")] = 128,
        window: Annotated[int, Field(ge=1, description="nearest tokens, the query's own included")] = 128,
        q_rank: Annotated[
            int | None, Field(ge=1, description="width of the queries' latent; none: 2·D, at most C")
        ] = None,
        rope_dim: Annotated[int | None, Field(ge=2, description="channels that are turned, even; none: D/8")] = None,
    ) -> None:
        super().__init__(shape, "hca", window, q_rank, rope_dim)
        C, D, self.run = shape.C, shape.D, run
        self.entry = nn.Linear(C, 2 * D, bias=False)
        self.places = nn.Parameter(torch.zeros(run, D))
        self.entry_norm = nn.RMSNorm(D, eps=EPS)

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        (B, N, _), D, m = x.shape, self.D, self.run
        i = torch.arange(N, device=x.device)

        turned = partial(turned_by_formula, P=self.P)
        content, gate = (x @ self.entry.weight.mT).chunk(2, -1)
        starts = range(0, N - m + 1, m)
        parts = [(content[:, a : a + m] * (gate[:, a : a + m] + self.places).softmax(1)).sum(1) for a in starts]
        entries = torch.stack(parts, 1) if parts else x.new_zeros(B, 0, D)
        entries = turned(normed(entries) * self.entry_norm.weight, torch.arange(len(starts), device=x.device) * m)
        keys = torch.cat([turned(normed(x @ self.kv.weight.mT) * self.kv_norm.weight, i), entries], 1)
        near = (i[:, None] - i).abs() < self.window
        closed = torch.arange(1, len(starts) + 1, device=x.device) * m <= (i[:, None] + 1 if self.causal else N)
        seen = torch.cat([near & (i <= i[:, None]) if self.causal else near, closed.expand(N, -1)], 1).expand(B, -1, -1)
        if key_mask is not None:
            whole = [key_mask[:, a : a + m].all(1, keepdim=True) for a in starts]
            seen = seen & torch.cat([key_mask, *whole], 1)[:, None]
        query, heads = normed(x @ self.q_down.weight.mT) * self.q_norm.weight, []
        for to_query, sink in zip(self.q_up.weight.chunk(self.H), self.sink, strict=True):
            q = turned(normed(query @ to_query.mT), i)
            logits = (q @ keys.mT * D**-0.5).masked_fill(~seen, -torch.inf)
            weights = torch.cat([logits, sink.expand(B, N, 1)], -1).softmax(-1)[..., :-1]
            heads.append(turned(weights @ keys, -i))
        out: Tensor = self.out(torch.cat(heads, -1))
        return out

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        B, N, _ = x.shape
        q, tokens, entries = self._queries(self._latent(x), 0), self._tokens(x, 0), self._entries(self.entry(x), 0)
        whole = None
        if key_mask is not None:
            whole = torch.unflatten(key_mask[:, : N // self.run * self.run], 1, (N // self.run, self.run)).all(2)
        most = max(ROWS, budget("gathered.listed", x.device) // (B * self.H * (self.window + entries.shape[1])))
        rows, outputs = row_blocks(N, most), []
        for block, part in zip(rows, torch.split(q, most, 2), strict=True):
            near, count = self._near(block, N), block.stop // self.run if self.causal else entries.shape[1]
            seen = self._seen(block, near, count, x.device)
            if key_mask is not None and whole is not None:
                seen = seen & torch.cat([key_mask[:, near], whole[:, :count]], 1)[:, None]
            inputs = part, torch.cat([tokens[:, near], entries[:, :count]], 1), self.sink, seen
            outputs.append(recomputed(_attended, *inputs, wanted=len(rows) > 1))
        return self._joined(torch.cat(outputs, 2), 0)

    def _seen(self, rows: slice, near: slice, count: int, device: torch.device) -> Tensor:
        of_entries = torch.ones(rows.stop - rows.start, count, dtype=torch.bool, device=device)
        if self.causal:
            last = torch.arange(1, count + 1, device=device) * self.run - 1
            of_entries = last <= torch.arange(rows.start, rows.stop, device=device)[:, None]
        return torch.cat([self._seen_near(rows, near, device), of_entries], 1)[None]

    def _entries(self, parts: Tensor, first: int) -> Tensor:
        """One entry for every whole run of parts ``(B, n, 2·D)``, from place ``first`` on.

        In the accumulator: an entry goes through a mean, a norm and a turn before it is read.
        """
        B, n, _ = parts.shape
        runs, dtype = n // self.run, accumulator(parts.dtype)
        if not runs:
            return parts.new_zeros(B, 0, self.D, dtype=dtype)
        cut = torch.unflatten(parts[:, : runs * self.run].to(dtype), 1, (runs, self.run))
        content, gate = torch.split(cut, self.D, -1)
        made = (content * (gate + self.places.to(dtype)).softmax(2)).sum(2)
        made = rms_norm(made, (self.D,), self.entry_norm.weight.to(dtype), EPS)
        return self._turned(made[:, None], first, self.run)[:, 0]

    def begin(self, x: Tensor) -> CompressedState:
        tokens, parts = self._tokens(x, 0)[:, None], self.entry(x)
        entries = self._entries(parts, 0)[:, None].to(x.dtype)
        open_ = x.shape[1] % self.run
        pending = parts.new_zeros(x.shape[0], self.run, 2 * self.D)
        pending[:, :open_] = parts[:, x.shape[1] - open_ :]
        window = Ring.of(tokens, tokens[..., :0], self.window, self.room)
        return CompressedState(window, pending, Cache.of(entries, entries[..., :0], self.room // self.run), self.run)

    def step(self, state: CompressedState, x: Tensor) -> tuple[Tensor, CompressedState]:
        t = state.window.length
        token, entries = self._tokens(x, t)[:, None], state.entries
        window = state.window.append(token, token[..., :0])
        state.pending[:, t % self.run] = self.entry(x)[:, 0]
        if (t + 1) % self.run == 0:
            made = self._entries(state.pending, t + 1 - self.run)[:, None]
            entries = entries.append(made, made[..., :0])
        keys = torch.cat([window.keys, entries.keys], 2)[:, 0]
        seen = torch.ones(1, 1, keys.shape[1], dtype=torch.bool, device=x.device)
        y = _attended(self._queries(self._latent(x), t), keys, self.sink, seen)
        return self._joined(y, t), CompressedState(window, state.pending, entries, self.run)

    @staticmethod
    def cached_bytes(shape: Shape, width: int, *, run: int, **_: object) -> int:
        """A token's part of an entry, rounded up; window and open run do not grow with the tokens."""
        return -(-shape.D * width // run)


def _attended(q: Tensor, keys: Tensor, sink: Tensor, seen: Tensor) -> Tensor:
    """softmax([q·keys/√D, sink])·[keys; 0], in the accumulator.

    q: ``(B, H, n, D)``; keys: ``(B, m, D)``; sink: ``(H,)``; seen: ``(1 or B, n, m)``.
    """
    (B, H, n, D), dtype = q.shape, accumulator(q.dtype)
    keys = keys.to(dtype)
    rows = (q.to(dtype) * D**-0.5).flatten(1, 2)
    logits = torch.unflatten(torch.matmul(rows, keys.mT), 1, (H, n)).masked_fill(~seen[:, None], hidden(dtype))
    column = sink.to(dtype)[:, None, None].expand(B, H, n, 1)
    weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
    return torch.unflatten(torch.matmul(weights.flatten(1, 2), keys), 1, (H, n))
