"""Quest: all keys stay, in pages, and each step reads the pages with bounds for the largest logits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from attnbench.catalogue.attention.selection.kv_budget.prompt import (
    OF_ALL,
    AfterPrompt,
    Prompt,
    Ratio,
    attend,
    attend_where,
    earlier,
)
from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import register


class Pages(NamedTuple):
    """All keys and values so far, and the bounds of each full page of keys."""

    cache: Cache
    """Room for whole pages."""
    low: Tensor
    """``(B, K, pages, D)``: the smallest number in each channel of a full page."""
    high: Tensor
    """The largest one."""
    prompt: int
    """Tokens of the prompt, which are answered exactly."""


@register(
    "quest",
    family="learned pattern",
    source="Tang et al. 2024, arXiv:2406.10774, section 3",
    formula="t ≥ P: oₜ = softmax_{j∈Sₜ}(qₜ·kⱼ/√D) vⱼ, Sₜ the pages of largest Σ_c max(q_c·min k_c, q_c·max k_c)",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=replace(OF_ALL, heads_apart=False),
    settings=("prompt=9,budget=6,page=3", "prompt=5,ratio=0.5,page=2", "budget=4,page=2"),
)
class Quest(AfterPrompt):
    """A whole cache, of which each step reads the most promising pages.

    Tang et al. 2024, "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference". q ``(B, H, N, D)``,
    k ``(B, K, N, D)`` and v ``(B, K, N, E)`` -> ``(B, H, N, E)``. The prompt is answered by softmax attention. Each
    page of ``page`` consecutive keys has the smallest and the largest number of each channel: no key of the page has a
    larger q·k than the sum over the channels of max(q_c·low_c, q_c·high_c). A step computes this bound for all full
    pages, and attends to those with the largest and to the page of its own token, ``budget`` tokens in all, rounded up
    to whole pages. Nothing is evicted: memory is that of the whole cache and 2·D numbers a page, and a step reads the
    bounds, 2·D numbers a page, and the keys and values of the budget.

    ``forward`` with ``prompt`` computes the outputs of the steps, by a mask over all keys, which saves nothing.

    A whole sequence is a prompt, unless ``prompt`` says where that ends. Without causality it always is.

    Differs from the paper: heads of queries that share keys choose together, by the mean of their bounds; the page of
    the own token is always read; there the first two layers of a model read all, here a layer knows of no other.

    Raises:
        UsageError: ``budget`` and ``ratio`` are both given.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        budget: Annotated[
            int | None, Field(ge=1, description="tokens that a step reads; none: 256, or what ratio leaves")
        ] = None,
        ratio: Ratio = None,
        page: Annotated[int, Field(ge=1, description="keys that are chosen together")] = 16,
        prompt: Prompt = None,
    ) -> None:
        super().__init__(shape, budget=budget, ratio=ratio, prompt=prompt)
        self.page = page

    def read(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        (B, H, N, _), K, P = q.shape, k.shape[1], self.prompt or 0
        pairs = torch.zeros(B, K, N - P, N, dtype=torch.bool, device=k.device)
        for b, h, t in product(range(B), range(K), range(P, N)):
            own = t // self.page
            worth = []
            for number in range(own):
                keys = k[b, h, number * self.page : (number + 1) * self.page]
                if key_mask is not None:
                    keys = keys[key_mask[b, number * self.page : (number + 1) * self.page]]
                queries = q[b, h * (H // K) : (h + 1) * (H // K), t].tolist()
                bounds = [
                    sum(max(x * float(keys[:, c].min()), x * float(keys[:, c].max())) for c, x in enumerate(one))
                    for one in queries
                    if len(keys)
                ]
                worth.append(sum(bounds) / len(bounds) if bounds else -torch.inf)
            best = sorted(range(own), key=lambda number: (-worth[number], number))
            for number in [own, *best[: -(-self.tokens_kept(t + 1) // self.page) - 1]]:
                pairs[b, h, t - P, number * self.page : (number + 1) * self.page] = True
        return pairs

    def bounds(self, q: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """No key of a page has a larger q·k, ``(B, K, n, pages)``; for heads of queries that share a key, on the mean.

        q: ``(B, H, n, D)``; low, high: ``(B, K, pages, D)``.
        """
        rows = torch.unflatten(q, 1, (low.shape[1], -1))
        up, down = rows.clamp(min=0).mean(2), rows.clamp(max=0).mean(2)
        return torch.matmul(up, high.mT) + torch.matmul(down, low.mT)

    def _pages(self, tokens: int) -> int:
        """Number of pages that a step reads after ``tokens`` tokens, including the page of its own token."""
        return -(-super().tokens_kept(tokens) // self.page)

    def tokens_kept(self, prompt: int) -> int:
        """Number of ``prompt`` tokens that the last of them would read, in whole pages."""
        return min(prompt, self._pages(prompt) * self.page)

    @torch.no_grad()
    def _pages_read(self, q: Tensor, k: Tensor, start: int, real: Tensor | None) -> Tensor:
        """The pages that are read, ``(B, K, n, pages)`` bool, by q ``(B, H, n, D)`` from place ``start`` on."""
        M, n = k.shape[2], q.shape[2]
        pages, most = -(-M // self.page), torch.finfo(k.dtype).max
        real = torch.ones(1, M, dtype=torch.bool, device=k.device) if real is None else real
        more = pages * self.page - M
        counted = torch.unflatten(pad(real, (0, more)), 1, (pages, self.page))
        keys, there = torch.unflatten(pad(k, (0, 0, 0, more)), 2, (pages, self.page)), counted[:, None, :, :, None]
        some = counted.any(-1)[:, None, :, None]
        low = keys.masked_fill(~there, most).amin(3).masked_fill(~some, 0.0)
        high = keys.masked_fill(~there, -most).amax(3).masked_fill(~some, 0.0)
        places = torch.arange(start, start + n, device=k.device)
        own, number = (places // self.page)[:, None], torch.arange(pages, device=k.device)
        worth = self.bounds(q, low, high).masked_fill(~some.mT, -torch.inf).masked_fill(number >= own, -torch.inf)
        rank = worth.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        wanted = torch.tensor([self._pages(t + 1) - 1 for t in range(start, start + n)], device=k.device)
        read: Tensor = ((rank < wanted[:, None]) & (number < own)) | (number == own)
        return read

    def _keys_read(self, q: Tensor, k: Tensor, start: int, real: Tensor | None = None) -> Tensor:
        """:meth:`_pages_read` for single keys, ``(B, K, n, M)``, without those to come."""
        M = k.shape[2]
        read = self._pages_read(q, k, start, real).repeat_interleave(self.page, -1)[..., :M]
        return read & earlier(slice(start, start + q.shape[2]), M, k.device)

    def keys_read(self, q: Tensor, k: Tensor, v: Tensor, prompt: int) -> Tensor:
        return self._keys_read(q[:, :, prompt:], k, prompt)

    def continued(self, q: Tensor, k: Tensor, v: Tensor, prompt: int, key_mask: Tensor | None) -> Tensor:
        later = q[:, :, prompt:]

        def seen(queries: slice) -> Tensor:
            pairs = self._keys_read(later[:, :, queries], k, prompt + queries.start, key_mask)
            return pairs if key_mask is None else pairs & key_mask[:, None, None]

        return attend_where(later, k, v, seen)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Pages:
        n, page = k.shape[2], self.page
        pages, full = max(1, -(-max(self.capacity, n) // page)), n // page
        low, high = (k.new_zeros(*k.shape[:2], pages, k.shape[3]) for _ in range(2))
        if full:
            keys = torch.unflatten(k[:, :, : full * page], 2, (full, page))
            low[:, :, :full], high[:, :, :full] = keys.amin(3), keys.amax(3)
        return Pages(Cache.of(k, v, pages * page), low, high, n if self.prompt is None else self.prompt)

    def step(self, state: Pages, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Pages]:
        cache, low, high, prompt = state
        page = self.page
        if cache.length == cache.k.shape[2]:
            cache = Cache.of(cache.keys, cache.values, 2 * cache.length)
            low, high = (torch.cat((x, torch.zeros_like(x)), 2) for x in (low, high))
        cache = cache.append(k, v)
        own = (cache.length - 1) // page
        if cache.length % page == 0:
            keys = cache.k[:, :, own * page : cache.length]
            low[:, :, own], high[:, :, own] = keys.amin(2), keys.amax(2)
        after = Pages(cache, low, high, prompt)
        wanted = self._pages(cache.length)
        if cache.length <= prompt or wanted > own:
            return attend(q, cache.keys, cache.values), after
        worth = self.bounds(q, low[:, :, :own], high[:, :, :own])[:, :, 0]
        chosen = pad(worth.topk(wanted - 1, sorted=False).indices, (0, 1), value=own)  # its own page is the last
        read = (wanted - 1) * page + cache.length - own * page
        k, v = (_of_pages(x, chosen, page)[:, :, :read] for x in (cache.k, cache.v))
        return attend(q, k, v), after

    @staticmethod
    def cached_bytes(shape: Shape, width: int, *, page: int, **_: object) -> int:
        """A token's key and value in each head of keys, and its part of the page's bounds, rounded up."""
        return shape.K * (shape.D + shape.E) * width - (-2 * shape.K * shape.D * width // page)


def _of_pages(x: Tensor, chosen: Tensor, page: int) -> Tensor:
    """The tokens ``(B, K, n · page, d)`` of n pages ``(B, K, n)`` of x ``(B, K, room, d)``, which has whole pages."""
    B, K, _, d = x.shape
    rows = x.view(B, K, -1, page * d)
    return rows.gather(2, chosen[..., None].expand(-1, -1, -1, page * d)).view(B, K, -1, d)
