"""A cache from which most of the prompt is evicted, once, when the prompt is over."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.kv_budget.prompt import AfterPrompt, attend, attend_where, earlier
from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator


class Evicted(NamedTuple):
    """The state of decoding."""

    cache: Cache
    """All tokens until the prompt is over; then its kept tokens, and all that follow."""
    seen: int
    """Tokens so far."""
    prompt: int
    """Tokens of the prompt."""
    queries: Tensor
    """``(B, H, m, D)``: the last queries, as many as the score needs, until the prompt is over; then none."""


class Evicting(AfterPrompt):
    """At the end of the prompt each key has a score, and the keys with the largest stay.

    The choice has no gradient. Each head of keys keeps its own; heads of queries that share it have one choice, and
    keys and values are not repeated for them.
    """

    @abstractmethod
    def scores(self, q: Tensor, k: Tensor, real: Tensor | None) -> Tensor:
        """A score for each key of the prompt, ``(B, 1 or K, P)``.

        Args:
            q: ``(B, H, m, D)``, the prompt's last queries, as many as :meth:`observed` says; padded ones are 0.
            k: ``(B, K, P, D)``; padded ones are 0.
            real: ``(B, P)`` bool, True for a real token.
        """

    def weighed(self, scores: Tensor, v: Tensor) -> Tensor:
        """The scores after a look at the values ``(B, K, P, E)``, which most methods do not take."""
        return scores

    def observed(self, prompt: int) -> int:
        """Number of the prompt's last queries that the score looks at."""
        return 0

    def always(self, kept: int) -> int:
        """Number of the prompt's last tokens that stay whatever their score, if ``kept`` stay in all."""
        return 0

    @torch.no_grad()
    def places(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
        """The kept tokens of the prompt, ``(B, K, kept)``, in order.

        q, k and real as of :meth:`scores`, v ``(B, K, P, E)``. Of equal scores the first ones count.
        Padded tokens stay only if there are too few others.
        """
        prompt = k.shape[2]
        kept = self.tokens_kept(prompt)
        if real is not None:
            k, v = emptied(real, k, v)
            (q,) = emptied(real[:, prompt - q.shape[2] :], q)
        scores = self.weighed(self.scores(q, k, real).to(accumulator(k.dtype)), v)
        last = min(self.always(kept), kept)
        if last:
            scores = torch.cat((scores[..., : prompt - last], torch.full_like(scores[..., :last], torch.inf)), -1)
        if real is not None:
            scores = scores.masked_fill(~real[:, None], -torch.inf)
        ranked = scores.sort(dim=-1, descending=True, stable=True).indices
        stays: Tensor = ranked[..., :kept].sort(-1).values
        return stays.expand(-1, k.shape[1], -1)

    def continued(self, q: Tensor, k: Tensor, v: Tensor, prompt: int, key_mask: Tensor | None) -> Tensor:
        kept, start = self.tokens_kept(prompt), prompt
        real = None if key_mask is None else key_mask[:, None]
        if kept < prompt:
            asked = q[:, :, prompt - self.observed(prompt) : prompt]
            there = None if key_mask is None else key_mask[:, :prompt]
            places = self.places(asked, k[:, :, :prompt], v[:, :, :prompt], there)
            k, v, start = left(k, places, prompt), left(v, places, prompt), kept
            if real is not None:
                real = left(real.expand(-1, k.shape[1], -1)[..., None], places, prompt)[..., 0]

        def seen(queries: slice) -> Tensor:
            pairs = earlier(slice(start + queries.start, start + queries.stop), k.shape[2], q.device)
            return pairs if real is None else pairs & real[:, :, None]

        return attend_where(q[:, :, prompt:], k, v, seen)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Evicted:
        n = k.shape[2]
        prompt = n if self.prompt is None else self.prompt
        first = prompt - self.observed(prompt)
        if n < prompt:
            return Evicted(Cache.of(k, v, self.capacity), n, prompt, q[:, :, first:].clone())
        return self._after(q[:, :, first:prompt], k, v, prompt)

    def _after(self, q: Tensor, k: Tensor, v: Tensor, prompt: int) -> Evicted:
        kept, n = self.tokens_kept(prompt), k.shape[2]
        room = max(self.capacity, n)
        if kept < prompt:
            places = self.places(q, k[:, :, :prompt], v[:, :, :prompt])
            k, v, room = left(k, places, prompt), left(v, places, prompt), room - prompt + kept
        return Evicted(Cache.of(k, v, room), n, prompt, q.new_empty(*q.shape[:2], 0, q.shape[3]))

    def step(self, state: Evicted, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Evicted]:
        cache, seen, prompt = state.cache.append(k, v), state.seen + 1, state.prompt
        out = attend(q, cache.keys, cache.values)
        if seen > prompt:
            return out, Evicted(cache, seen, prompt, state.queries)
        wanted = seen - (prompt - self.observed(prompt))
        queries = torch.cat((state.queries, q), 2) if wanted > 0 else state.queries
        if seen < prompt:
            return out, Evicted(cache, seen, prompt, queries)
        return out, self._after(queries, cache.keys, cache.values, prompt)

    def keys_read(self, q: Tensor, k: Tensor, v: Tensor, prompt: int) -> Tensor:
        """The keys ``(B, K, N - prompt, N)`` bool that the queries behind a prompt read."""
        (B, K, N), kept = k.shape[:3], self.tokens_kept(prompt)
        read = earlier(slice(prompt, N), N, k.device).expand(B, K, -1, -1).clone()
        if kept < prompt:
            asked = q[:, :, prompt - self.observed(prompt) : prompt]
            places = self.places(asked, k[:, :, :prompt], v[:, :, :prompt])
            stays = torch.zeros(B, K, prompt, dtype=torch.bool, device=k.device).scatter(2, places, True)
            read[..., :prompt] = stays[:, :, None]
        return read

    @abstractmethod
    def worth(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """The scores of the prompt's keys ``(B, 1 or K, P)`` again, by the formula."""

    def read(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        (B, K, N), P = k.shape[:3], self.prompt or 0
        kept = self.tokens_kept(P)
        real_keys = None if key_mask is None else key_mask[:, :P]
        scores = self.worth(q[:, :, :P], k[:, :, :P], v[:, :, :P], real_keys)
        read = torch.ones(B, K, N - P, N, dtype=torch.bool, device=k.device)
        for b in range(B):
            for h in range(K):
                row = scores[b, h % scores.shape[1]].tolist()
                real = [True] * P if key_mask is None else key_mask[b].tolist()
                last = P - min(self.always(kept), kept)
                rank = sorted(range(P), key=lambda j: (not real[j], j < last, -row[j] if j < last else 0.0, j))
                read[b, h, :, rank[kept:]] = False
        return read


def left(x: Tensor, places: Tensor, prompt: int) -> Tensor:
    """The kept part of x ``(B, K, n, d)``: the tokens at ``places`` ``(B, K, kept)``, and all behind the prompt."""
    stays = x.gather(2, places[..., None].expand(-1, -1, -1, x.shape[3]))
    return stays if x.shape[2] == prompt else torch.cat((stays, x[:, :, prompt:]), 2)
