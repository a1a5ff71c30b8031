"""Attention to a cache of few bits: keys rounded by channel, values by token; the cost in accuracy."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.catalogue.engines.decoding.kv_cache import Cache, CachedDecoding
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.tiling import budget, recomputed, row_blocks
from attnbench.contract.problem.reference import of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Rounds, Traits, register


@register(
    "quantised-cache",
    family="exact",
    source="Liu et al. 2024, arXiv:2402.02750, section 3",
    formula="O = softmax(Q·K̂ᵀ/√D)·V̂,  x̂ = l + s·round((x - l)/s), l the least of a group, s = (most - l)/(2ᵇ - 1)",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(
        bias=No("the caches that it stands for hold keys and values, and nothing is added to their logits"),
        decode=True,
        shares="by itself",
        rounds=Rounds(("group",), smooth="always", kept="recent"),
        v_dim=No("neighbouring channels of a value share a scale, so that no column is treated alone"),
        emulated="numbers are rounded to a few bits and kept as float32, which says nothing of a cache of few bits",
        exact_with=("recent={n}",),
    ),
    settings=("bits=2,group=5,recent=0", "bits=3,group=3,recent=4", "bits=4,group=2,recent=7"),
)
class QuantisedCache(CachedDecoding, nn.Module):
    """The error of keys and values that a cache keeps in 2 to 8 bits.

    Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache". q ``(B, H, N, D)``, k
    ``(B, K, M, D)`` and v ``(B, K, M, E)`` -> ``(B, H, N, E)``. Tokens come in groups of ``group``. In a group that is
    full, each channel of the keys has a least number and a step, (most - least)/(2^``bits`` - 1), and is rounded to
    whole steps from the least; keys have channels that are large for all tokens, which so keep a step of their own.
    Values have none: each value is rounded alone, ``group`` neighbouring channels with one least number and step. The
    last ``recent`` tokens before a query, its own among them, and a group that is not full, stay as they are. So a
    group is rounded for a query once it ends ``recent`` tokens or more before the next one: nothing depends on later
    tokens, and decoding reads the same numbers as the whole sequence.

    Without causality a query stands behind the last key. A group with a padded token is never full. Where ``recent`` is
    as long as the keys nothing is rounded. Its error is that of the rounding; it is an emulation in ordinary
    arithmetic, so that its time and memory mean nothing, and are refused. The bytes of a token are those of the method:
    ``bits`` for each number, and two numbers of the cache's dtype for each least number and step. Rounding has no
    gradient: only that of least numbers and steps is left to k and v.

    Differs from the authors' code: a prompt is read from the rounded cache too, as if its tokens had come one by one
    (there the prompt is read before it is rounded); keys and values of a group are rounded together, where there a
    value is rounded as soon as it is ``recent`` tokens old, and keys only when ``recent`` of them have come together;
    least number and step are kept in full, there in 16 bits. XQuant rounds the input of a layer in place of keys and
    values, and makes these again; an operator has no such input.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        bits: Annotated[int, Field(ge=1, le=8, description="bits of a number")] = 2,
        group: Annotated[int, Field(ge=1, description="tokens, of values channels, that share a step")] = 32,
        recent: Annotated[int, Field(ge=0, description="last tokens, which are not rounded")] = 128,
    ) -> None:
        super().__init__()
        self.causal, self.capacity = shape.causal, shape.M
        self.most: int = 2**bits - 1
        self.group, self.recent = group, recent

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        (B, H, N, D), M = q.shape, k.shape[2]
        real = torch.ones(B, M, dtype=torch.bool, device=k.device) if key_mask is None else key_mask

        def coarse(x: Tensor, dim: int) -> Tensor:
            least, most = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
            step = (most - least) / self.most
            levels: Tensor = ((x - least) / torch.where(step > 0, step, 1.0)).round().detach()
            return least + levels * step

        keys = torch.cat([coarse(part, 2) for part in torch.split(k, self.group, 2)], 2)
        values = torch.cat([coarse(part, 3) for part in torch.split(v, self.group, 3)], 3)
        rounded = torch.zeros(B, N, M, dtype=torch.bool, device=k.device)
        for b in range(B):
            for t in range(N):
                last = t if self.causal else M - 1
                for a in range(0, M - self.group + 1, self.group):
                    stop = a + self.group
                    age = int(real[b, stop : last + 1].sum())
                    if stop <= last + 1 and age >= self.recent and bool(real[b, a:stop].all()):
                        rounded[b, t, a:stop] = True
        seen = real[:, None, None].expand(B, 1, N, M)
        if self.causal:
            seen = seen.tril()
        there = rounded[:, None]
        k, v, keys, values = (of_query_heads(x, H) for x in (k, v, keys, values))
        logits = torch.where(there, q @ keys.mT, q @ k.mT) * D**-0.5
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0).masked_fill(~seen, 0.0)
        out: Tensor = weights.masked_fill(~there, 0.0) @ values + weights.masked_fill(there, 0.0) @ v
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        (B, H, N, _), M = q.shape, k.shape[2]
        inputs = self._both(k, v)
        real = torch.ones(1, M, dtype=torch.bool, device=k.device) if key_mask is None else key_mask
        most = max(1, budget("gathered.listed", q.device) // (B * H * M))
        rows, outputs = row_blocks(N, most), []
        for block, part in zip(rows, torch.split(q, most, 2), strict=True):
            outputs.append(recomputed(self._answers, part, block, inputs, real, wanted=len(rows) > 1))
        return torch.cat(outputs, 2).to(v.dtype)

    def _answers(self, q: Tensor, rows: slice, both: tuple[Tensor, Tensor, Tensor, Tensor], real: Tensor) -> Tensor:
        """The readings of some queries ``(B, H, n, D)`` at these places, in the accumulator."""
        seen = real[:, None].expand(-1, rows.stop - rows.start, -1)
        if self.causal:
            last = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
            seen = seen & (torch.arange(real.shape[1], device=q.device) <= last)
        return _attended(q, both, seen, self._rounded(real, seen))

    def _both(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        k, v = (x.to(accumulator(x.dtype)) for x in (k, v))
        return k, v, self._rounded_keys(k), self._rounded_values(v)

    def _rounded_keys(self, k: Tensor) -> Tensor:
        """Each channel of each group of tokens by a step of its own; a last group that is not full, too."""
        return self._coarse(k, 2)

    def _rounded_values(self, v: Tensor) -> Tensor:
        """Each group of channels of each token by a step of its own; the last group may have fewer."""
        return self._coarse(v, 3)

    def _coarse(self, x: Tensor, dim: int) -> Tensor:
        """x ``(B, H, n, d)``, with one least number and one step for each group along an axis."""
        n = x.shape[dim]
        short = (0, 0, 0, -n % self.group) if dim == 2 else (0, -n % self.group)
        inside = torch.arange(n + -n % self.group, device=x.device) < n
        cut = torch.unflatten(pad(x, short), dim, (-1, self.group))
        there = torch.unflatten(inside, 0, (-1, self.group))
        there = there[..., None] if dim == 2 else there
        least = cut.masked_fill(~there, torch.inf).amin(dim + 1, keepdim=True)
        most = cut.masked_fill(~there, -torch.inf).amax(dim + 1, keepdim=True)
        step = (most - least) / self.most
        levels = ((cut - least) / torch.where(step > 0, step, 1.0)).round().detach()
        return torch.narrow((least + levels * step).flatten(dim, dim + 1), dim, 0, n)

    def _rounded(self, real: Tensor, seen: Tensor) -> Tensor:
        """The keys that some queries find rounded, ``(1 or B, n, M)``, from masks of real and of seen keys."""
        M, group = real.shape[1], self.group
        full = torch.unflatten(pad(real, (0, -M % group)), 1, (-1, group)).all(2).repeat_interleave(group, 1)[:, :M]
        # Keys that a query sees behind the end of each key's group.
        total = seen.sum(-1, keepdim=True)
        ends = (torch.arange(M, device=real.device) // group * group + group - 1).clamp(max=M - 1)
        before = seen.cumsum(-1)[..., ends]
        return full[:, None] & seen[..., ends] & (total - before >= self.recent)

    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Cache]:
        state = state.append(k, v)
        real = torch.ones(1, state.length, dtype=torch.bool, device=q.device)
        y = _attended(q, self._both(state.keys, state.values), real[:, None], self._rounded(real, real[:, None]))
        return y.to(v.dtype), state

    @staticmethod
    def cached_bytes(shape: Shape, width: int, *, bits: int, group: int, **_: object) -> int:
        """The bits of a token's key and value, its part of the steps of its group and the steps of its value."""
        steps = shape.D / group + -(-shape.E // group)
        return -(-shape.K * int(8 * 2 * width * steps + bits * (shape.D + shape.E)) // 8)


def _attended(q: Tensor, both: tuple[Tensor, Tensor, Tensor, Tensor], seen: Tensor, there: Tensor) -> Tensor:
    """Softmax attention of queries ``(B, H, n, D)`` to keys, rounded at ``there`` ``(1 or B, n, M)``."""
    k, v, keys, values = both
    dtype, K = accumulator(q.dtype), k.shape[1]
    rows = torch.unflatten(q.to(dtype) * q.shape[-1] ** -0.5, 1, (K, -1))
    seen, there = seen[:, None, None], there[:, None, None]
    logits = torch.where(there, rows @ keys[:, :, None].mT, rows @ k[:, :, None].mT)
    weights = logits.masked_fill(~seen, hidden(dtype)).softmax(-1).masked_fill(~seen, 0.0)
    out = weights.masked_fill(~there, 0.0) @ values[:, :, None] + weights.masked_fill(there, 0.0) @ v[:, :, None]
    return out.flatten(1, 2)
