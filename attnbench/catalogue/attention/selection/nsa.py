"""Native sparse attention: pooled blocks, the blocks that score best, and a window, added up by gates."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.decoding import kv_cache
from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.flex.block_mask import by_places
from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, FlexPattern
from attnbench.catalogue.engines.gathered.choice import Choice
from attnbench.catalogue.engines.gathered.chosen import answer_from_chosen, best
from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.patterns.bands import band
from attnbench.catalogue.engines.patterns.pattern_softmax import attend
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.tiling import budget, recomputed, row_blocks
from attnbench.contract.problem.reference import masked_attention, of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, Needs, No, Traits, register
from attnbench.errors import UsageError

_POOLED = Needs("branch=all or branch=compressed or branch=selected")
_SELECTED, _NEAR = Needs("branch=all or branch=selected"), Needs("branch=all or branch=window")
_ROWS = 16
"""Fewest queries with pooled keys scored at a time."""
_FORCED = torch.finfo(torch.float32).max
"""Score of a block that is always taken, below that of the query's own."""


class Pooled(NamedTuple):
    """The state of decoding: every key and value, and those of the complete pooled blocks."""

    cache: Cache
    pooled: Cache


@register(
    "nsa",
    family="learned pattern",
    also=("fixed pattern",),
    source="Yuan et al. 2025, arXiv:2502.11089, section 3",
    formula="o = σ(g₁·q)·o_pooled + σ(g₂·q)·o_selected + σ(g₃·q)·o_window, each a softmax over its own keys",
    cost="O(n²·d/s + n·w·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        cross=No("blocks and window are counted from a query's own place, among the keys of the same sequence"),
        decode=True,
        stochastic=True,
        rows_sum_to_one=False,
        bias=No("a bias belongs to a pair of tokens, and a pooled key is no token"),
        shares="by itself",
        heads_apart=False,
        exact_with=("branch=selected,block=4,length=4,stride=2,top_n={n}", "branch=window,window={n}"),
        knob=Knob("top_n", step=1),
        own_form="three branches on the same keys and values, pooled by a learned average; the paper has keys and "
        "values for each, pooled by an MLP",
        given=(
            COMPILED,
            ("form=fla", {"key_padding": No(fla.NO_MASK)}),
            ("branch=compressed", {"stochastic": False, "knob": None}),
            (
                "branch=selected",
                {
                    "target": "softmax",
                    "stochastic": False,
                    "rows_sum_to_one": True,
                    "own_form": "scores blocks by means of keys; the paper by what another branch has learned",
                },
            ),
            (
                "branch=window",
                {
                    "target": "softmax",
                    "stochastic": False,
                    "rows_sum_to_one": True,
                    "knob": Knob("window"),
                    "own_form": "",
                },
            ),
        ),
    ),
    settings=(
        "block=4,length=4,stride=2,top_n=4,window=5",
        "block=6,length=6,stride=3,top_n=3,branch=selected",
        "length=3,stride=1,branch=compressed",
        "branch=window,window=4",
    ),
)
class NSA(nn.Module):
    """Native sparse attention (NSA): pooled, selected and near keys.

    Yuan et al. 2025, "Native Sparse Attention". q ``(B, H, N, D)``, k ``(B, K, N, D)`` and v ``(B, K, N, E)`` ->
    ``(B, H, N, E)``. Three softmaxes are added up, each times a gate σ(g·q) of its head:

    - pooled: one key and value for every ``length`` tokens, one such block every ``stride`` tokens; a weighted average
      whose weights are learned for each place in a block and each head of keys, and equal at first. A query sees the
      blocks that end at its token or before it; none gives 0. No query sees a block with a padded token;
    - selected: the tokens of ``top_n`` blocks of ``block`` tokens. A block scores the weights of the pooled blocks,
      each once for every ``stride`` tokens that both have in common, summed over all heads of queries that share a head
      of keys: these make one choice. A query's own block, the one before it and the first are always taken, in this
      order;
    - window: the last ``window`` tokens, its own included, and padded ones, which leave fewer keys.

    ``branch`` runs one of them alone, without a gate. ``selected`` alone is an approximation of softmax attention, and
    its blocks are scored by plain averages. Scores are compared in float32; of equal ones the later block is taken.

    Time is quadratic in the pooled scores, N² / stride of them, which exist for a tile of queries at a time. Of the
    selected keys those of some queries are gathered at a time: memory is O(n). All defaults are
    the paper's. ``form=fla`` has the selected keys by the authors' way, a block for all heads of a group; a group of
    fewer than 16 heads costs as much as one of 16.

    Without causality all pooled blocks count, the block behind a query's own is always selected as well, and the window
    reaches as far behind as before; the paper is causal.

    Differs from the paper: all branches share keys and values, as in public code; an average takes the place of its MLP
    with a code of each place; gates are made of the queries, not of the layer's input. The authors' kernel loads each
    block once for all heads of a group; here each query gathers its own.

    Raises:
        UsageError: ``stride`` does not divide ``length`` and ``block``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, Field(ge=1, description="tokens of a block that is selected"), _SELECTED] = 64,
        length: Annotated[int, Field(ge=1, description="tokens of a block that is pooled"), _POOLED] = 32,
        stride: Annotated[int, Field(ge=1, description="tokens from one pooled block to the next"), _POOLED] = 16,
        top_n: Annotated[
            int, Field(ge=1, description="blocks selected for each query, with those that always are"), _SELECTED
        ] = 16,
        window: Annotated[int, Field(ge=2, description="nearest tokens, the query's own included"), _NEAR] = 512,
        branch: Annotated[
            Literal["all", "compressed", "selected", "window"], Field(description="all, or one alone, without a gate")
        ] = "all",
        form: Annotated[Literal["auto", "torch", "fla", "flex"], Field(description=forms.WHICH)] = "auto",
    ) -> None:
        super().__init__()
        # The tokens of a block are the columns of a product in its kernel.
        by_block = shape.causal and block >= 16 and block.bit_count() == 1 and branch in ("all", "selected")
        self.fused = {"fla": partial(fla.run, "nsa", block_size=block)} if by_block and form in ("auto", "fla") else {}
        if form == "fla":
            forms.require("nsa", form, self.fused)
        self.form = form
        for option, value in (("length", length), ("block", block)):
            if value % stride and not (option == "block" and branch == "compressed"):
                raise UsageError(f"nsa: option {option}={value} must be a multiple of stride={stride}")
        self.causal, self.capacity, self.branch = shape.causal, shape.M, branch
        self.block, self.length, self.stride, self.top_n, self.window = block, length, stride, top_n, window
        fits, name = branch != "compressed", f"causal={shape.causal}"
        of_pairs = "torch" if form == "fla" else form
        self.flex = FlexPattern(f"nsa, block={block}, {name}", of_pairs, fits=fits)
        self.flex_near = FlexPattern(f"nsa, window={window}, {name}", of_pairs, fits=fits)
        self.of_keys: nn.Parameter | None = None
        self.of_values: nn.Parameter | None = None
        self.gate: nn.Parameter | None = None
        if branch in ("all", "compressed"):
            self.of_keys, self.of_values = (nn.Parameter(torch.zeros(shape.K, length)) for _ in range(2))
        if branch == "all":
            self.gate = nn.Parameter((2 * torch.rand(shape.H, 3, shape.D) - 1) * shape.D**-0.5)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        q, k, v = emptied(key_mask, q, k, v)
        (H, N), K, l, s = q.shape[1:3], k.shape[1], self.length, self.stride
        seen, i = visible_pairs(q, k, self.causal, key_mask), torch.arange(N, device=q.device)
        # Pooled blocks: their keys and values, the queries that see them, and the weights.
        starts = range(0, N - l + 1, s)
        pooled = []
        for x, weights in ((k, self.of_keys), (v, self.of_values)):
            w = x.new_ones(K, l) / l if weights is None else weights.softmax(-1)
            blocks = [(x[:, :, a : a + l] * w[..., None]).sum(2) for a in starts]
            pooled.append(of_query_heads(torch.stack(blocks, 2) if blocks else x[:, :, :0], H))
        ends = torch.tensor([a + l - 1 for a in starts], device=q.device)
        whole = torch.ones(1, len(starts), dtype=torch.bool, device=q.device)
        if key_mask is not None and starts:
            whole = torch.stack([key_mask[:, a : a + l].all(1) for a in starts], 1)
        open_ = whole[:, None, None] & ((ends <= i[:, None]) if self.causal else torch.ones_like(ends).bool())
        logits = q @ pooled[0].mT * q.shape[-1] ** -0.5
        p = logits.masked_fill(~open_, torch.finfo(q.dtype).min).softmax(-1).masked_fill(~open_, 0.0)
        # Blocks to select from: their overlap with the pooled ones, and those always taken.
        places = range(0, N, self.block)
        common = [[max(0, min(a + l, b + self.block) - max(a, b)) // s for b in places] for a in starts]
        scores = torch.unflatten(p, 1, (K, -1)).sum(2) @ q.new_tensor(common).view(len(starts), len(places))
        b, own = torch.arange(len(places), device=q.device), i[:, None] // self.block
        forced = (b == 0) | (b == own) | (b == own - 1) | ((b == own + 1) & (not self.causal))
        never = (b > own) & self.causal
        if key_mask is not None:
            some = torch.stack([key_mask[:, a : a + self.block].any(1) for a in places], 1)
            never = never | ~some[:, None, None]
        scores = scores.masked_fill(forced, _FORCED).masked_fill(b == own, torch.inf).masked_fill(never, -torch.inf)
        # A stable order from the last block back: of equal scores that of the later block comes first.
        order = scores.float().flip(-1).argsort(dim=-1, descending=True, stable=True)
        taken = (order.argsort(-1).flip(-1) < self.top_n) & ~never
        selected = of_query_heads(taken[..., i // self.block], H) & seen
        near = ((i[:, None] - i).abs() < self.window) & seen
        keys, values = of_query_heads(k, H), of_query_heads(v, H)
        outputs: dict[str, Tensor] = {
            "compressed": p @ pooled[1],
            "selected": masked_attention(q, keys, values, selected),
            "window": masked_attention(q, keys, values, near),
        }
        if self.gate is None:
            return outputs[self.branch]
        gates = (q[:, :, :, None] * self.gate[:, None]).sum(-1).sigmoid()
        added: Tensor = (torch.stack(list(outputs.values()), -1) * gates[..., None, :]).sum(-1)
        return added

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        q, k, v = emptied(key_mask, q, k, v)
        outputs = []
        if self.branch != "window":
            values = v[..., :0] if self.branch == "selected" else v  # its scores need no values
            of_pooled, chosen = self._pooled(q, k, values, key_mask)
            if self.branch != "selected":
                outputs.append(of_pooled)
            if self.branch != "compressed":

                def by_queries(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
                    return self.attend(q, k, v, self._choice(q, k, chosen, key_mask))

                if self.fused and key_mask is None:
                    given, name = (q, k, v, chosen), f"nsa:block={self.block}"
                    outputs.append(forms.attend(name, self.form, by_queries, *given, fast=self.fused))
                else:
                    outputs.append(by_queries(q, k, v, chosen))
        if self.branch in ("all", "window"):
            near = partial(by_places, self._sees)
            outputs.append(self.flex_near.attend(self._near, near, q, k, v, key_mask=key_mask))
        return self._gated(q, outputs).to(v.dtype)

    @property
    def selects(self) -> bool:
        return self.branch == "selected"

    def select(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Choice:
        q, k = emptied(key_mask, q, k)
        _, chosen = self._pooled(q, k, k[..., :0], key_mask)
        return self._choice(q, k, chosen, key_mask)

    def _choice(self, q: Tensor, k: Tensor, chosen: Tensor, key_mask: Tensor | None) -> Choice:
        choice = Choice(chosen, q.shape[1], k.shape[2], self.block, self.causal, key_mask)
        if self.flex.may_run(q):
            choice.block_mask  # noqa: B018  # made here, as a part of the choice, and kept
        return choice

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Choice) -> Tensor:
        return selection.attend_in_form(self.flex, q, k, v)

    def _gated(self, q: Tensor, outputs: list[Tensor]) -> Tensor:
        if self.gate is None:
            return outputs[0]
        dtype = accumulator(q.dtype)
        gates = torch.einsum("bhnd,hcd->bhnc", q.to(dtype), self.gate.to(dtype)).sigmoid()
        parts = (gates[..., c, None] * out.to(dtype) for c, out in enumerate(outputs))
        return torch.stack(list(parts)).sum(0)

    def _sees(self, i: Tensor, j: Tensor) -> Tensor:
        near = (i - j).abs() < self.window
        return near & (j <= i) if self.causal else near

    def _near(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        parts = []
        for one in torch.unflatten(q, 1, (k.shape[1], -1)).unbind(2):
            tiles = band(one, (self.window - 1, 0 if self.causal else self.window - 1))
            parts.append(attend(one, k, v, tiles, key_mask=key_mask))
        return torch.stack(parts, 2).flatten(1, 2)

    def _pool(self, x: Tensor, weights: Tensor | None) -> Tensor:
        """One vector for every ``length`` tokens of x ``(B, K, n, ·)``, in the accumulator."""
        dtype, (B, K, n, width) = accumulator(x.dtype), x.shape
        if n < self.length:
            return x.new_zeros(B, K, 0, width, dtype=dtype)
        blocks = x.to(dtype).unfold(2, self.length, self.stride)
        if weights is None:
            return blocks.mean(-1)
        return torch.einsum("bkndl,kl->bknd", blocks, weights.to(dtype).softmax(-1))

    def _pooled(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output of the pooled blocks, and the blocks that each query selects ``(B, K, N, ·)``."""
        (B, H, N), K = q.shape[:3], k.shape[1]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.branch != "selected"):
            keys, values = self._pool(k, self.of_keys), self._pool(v, self.of_values)
            whole = some = None
            if key_mask is not None:
                some = torch.unflatten(pad(key_mask, (0, -N % self.block)), 1, (-1, self.block)).any(2)
                whole = key_mask.unfold(1, self.length, self.stride).all(2) if keys.shape[2] else key_mask[:, :0]
            rows = max(_ROWS, budget("gathered.listed", q.device) // (B * H * max(1, keys.shape[2])))
            every = row_blocks(N, rows)
            outputs, choices = [], []
            for block, part in zip(every, torch.split(q, rows, 2), strict=True):
                count = keys.shape[2]
                if self.causal:  # those that end at the last of these queries or before it
                    count = max(0, (block.stop - self.length) // self.stride + 1)
                closed = self._closed(block, count, whole, q.device)
                seen = part, keys[:, :, :count], values[:, :, :count], closed
                out, weights = recomputed(_weighed, *seen, wanted=len(every) > 1)
                outputs.append(out)
                if self.branch != "compressed":
                    choices.append(self._select(weights, block, -(-N // self.block), some))
        chosen = torch.cat(choices, 2) if choices else torch.empty(B, K, N, 0, dtype=torch.int32, device=q.device)
        return torch.cat(outputs, 2), chosen

    def _closed(self, rows: slice, blocks: int, whole: Tensor | None, device: torch.device) -> Tensor:
        """The pairs of queries and first pooled blocks that are hidden, ``(1 or B, rows, blocks)``."""
        closed = torch.zeros(1, rows.stop - rows.start, blocks, dtype=torch.bool, device=device)
        if self.causal:
            ends = torch.arange(blocks, device=device) * self.stride + self.length - 1
            closed = closed | (ends > torch.arange(rows.start, rows.stop, device=device)[:, None])
        return closed if whole is None else closed | ~whole[:, None, :blocks]

    @torch.no_grad()
    def _select(self, weights: Tensor, rows: slice, blocks: int, some: Tensor | None) -> Tensor:
        """The blocks that some queries take, ``(B, K, rows, min(top_n, blocks))``; -1 if there are fewer.

        Args:
            weights: of the pooled blocks, summed over the heads of a group, ``(B, K, rows, pooled)``.
            blocks: number of blocks to select from.
            some: ``(B, blocks)``, those that have a real token.
        """
        shifts = self.length // self.stride
        # In units of stride tokens: each one's share of the pooled blocks that it is a part of.
        units = pad(weights, (0, shifts - 1))
        for shift in range(1, shifts):
            units = units + pad(weights, (shift, shifts - 1 - shift))
        each = self.block // self.stride
        whole = pad(units, (0, blocks * each - units.shape[3]))  # or cut: a pooled block may be longer than all tokens
        scores = torch.unflatten(whole, 3, (blocks, each)).sum(4)
        own = torch.arange(rows.start, rows.stop, device=weights.device)[:, None] // self.block
        number = torch.arange(blocks, device=weights.device)
        forced = (number == 0) | (number == own) | (number == own - 1)
        never = torch.zeros_like(forced)[None, None]
        if self.causal:
            never = never | (number > own)
        else:
            forced = forced | (number == own + 1)
        if some is not None:
            never = never | ~some[:, None, None]
        scores = scores.masked_fill(forced, _FORCED).masked_fill(number == own, torch.inf)
        return best(scores.masked_fill(never, -torch.inf), self.top_n)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Pooled:
        if self.branch == "window":
            pooled = Cache.of(k[:, :, :0], v[:, :, :0], 0)
        else:
            keys, values = self._pool(k, self.of_keys).to(k.dtype), self._pool(v, self.of_values).to(v.dtype)
            pooled = Cache.of(keys, values, max(0, self.capacity - self.length) // self.stride + 1)
        return Pooled(Cache.of(k, v, self.capacity), pooled)

    def step(self, state: Pooled, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Pooled]:
        cache, pooled = state.cache.append(k, v), state.pooled
        n, keys, values = cache.length, cache.keys, cache.values
        outputs = []
        if self.branch != "window":
            if n >= self.length and (n - self.length) % self.stride == 0:
                last = slice(n - self.length, n)
                made = self._pool(keys[:, :, last], self.of_keys), self._pool(values[:, :, last], self.of_values)
                pooled = pooled.append(*made)
            none = torch.zeros(1, 1, pooled.length, dtype=torch.bool, device=q.device)
            out, weights = _weighed(q, pooled.keys, pooled.values, none)
            if self.branch != "selected":
                outputs.append(out)
            if self.branch != "compressed":
                chosen = self._select(weights, slice(n - 1, n), -(-n // self.block), None)
                outputs.append(answer_from_chosen(q, keys, values, chosen, self.block))
        if self.branch in ("all", "window"):
            outputs.append(kv_cache.attend(q, keys[:, :, -self.window :], values[:, :, -self.window :]))
        return self._gated(q, outputs).to(v.dtype), Pooled(cache, pooled)

    @staticmethod
    def cached_bytes(shape: Shape, width: int, *, stride: int, branch: str, **_: object) -> int:
        """A token's key and value in each head of keys, and its part of a pooled block, rounded up."""
        token = shape.K * (shape.D + shape.E) * width
        return token + (0 if branch == "window" else -(-token // stride))


def _weighed(q: Tensor, keys: Tensor, values: Tensor, closed: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention to pooled blocks, and its weights summed over the heads of a group, without a gradient.

    q ``(B, H, n, D)``, keys, values ``(B, K, m, ·)``, closed ``(1 or B, n, m)`` -> ``(B, H, n, E)``, 0 if nothing
    counts, and ``(B, K, n, m)``.
    """
    dtype, K = accumulator(q.dtype), keys.shape[1]
    if not keys.shape[2]:
        return q.new_zeros(*q.shape[:3], values.shape[3], dtype=dtype), q.new_zeros(
            q.shape[0], K, q.shape[2], 0, dtype=dtype
        )
    rows = torch.unflatten(q.to(dtype) * q.shape[-1] ** -0.5, 1, (K, -1))
    logits = torch.unflatten(torch.matmul(rows.flatten(2, 3), keys.to(dtype).mT), 2, rows.shape[2:4])
    logits = logits.masked_fill(closed[:, None, None], hidden(dtype))
    p = logits.softmax(-1).masked_fill(closed.all(-1)[:, None, None, :, None], 0.0)
    out = torch.matmul(p.flatten(2, 3), values.to(dtype))
    return torch.unflatten(out, 2, rows.shape[2:4]).flatten(1, 2), p.detach().sum(2)
