"""Heads that share: of queries a head of keys and values, and of values a head of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.kv_cache import CachedDecoding
from attnbench.catalogue.engines.linear.feature_attention import FeatureAttention
from attnbench.contract.capabilities import Decoding, Dense, Patterned, Prompted, Selecting, Selection, chooser

Way = Literal["query by query", "head by head"]


@dataclass(frozen=True, slots=True)
class Grouped:
    """The choices of the heads of queries of each group."""

    parts: tuple[Selection, ...]
    apart: int
    """Places from the queries of one head of a group to those of the next; 0 if each has a choice of its own."""

    def pairs(self, queries: slice) -> Tensor:
        places = [slice(queries.start + g * self.apart, queries.stop + g * self.apart) for g in range(len(self.parts))]
        return torch.stack([part.pairs(at) for part, at in zip(self.parts, places, strict=True)], 2).flatten(1, 2)


class SharedHeads(nn.Module):
    """An operator with K heads that answers queries of H = G·K heads; head h reads head h // G of keys and values.

    Ainslie et al. 2023, arXiv:2305.13245, section 2.2. q ``(B, H, N, D)``, k ``(B, K, M, D)`` and v ``(B, K, M, E)`` ->
    ``(B, H, N, E)``. Keys and values are never repeated. Random numbers and parameters belong to heads of keys and
    values: queries and keys need the same features.

    Args:
        operator: made for K heads; for ``query by query`` also for G·N queries, which are then G sequences one after
            another. ``head by head`` runs it G times, once for each head of queries that shares, its work on keys and
            values included.
        groups: G.

    Gates ``(B, K, M, ·)`` that the operator reads belong to the heads of keys and values, as their states do.
    """

    def __init__(self, operator: nn.Module, groups: int, way: Way) -> None:
        super().__init__()
        self.operator, self.groups, self.way = operator, groups, way
        if isinstance(operator, Dense):
            self.dense = self._dense
        if isinstance(operator, Decoding):
            self.begin, self.step = self._begin, self._step
            self.at_once = getattr(operator, "at_once", False) and not isinstance(operator, FeatureAttention)
        if chooser(operator) is not None:
            self.select, self.attend = self._select, self._attend
        if isinstance(operator, Patterned):
            self.pairs_by_place = operator.pairs_by_place

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, key_mask: Tensor | None = None) -> Tensor:
        (B, H, N, D), G = q.shape, self.groups
        if self.way == "query by query":
            out: Tensor = self.operator(q.reshape(B, H // G, G * N, D), k, v, key_mask=key_mask)
            return out.reshape(B, H, N, v.shape[3])
        of_group = self._by_group(q)
        if torch.is_grad_enabled():
            outputs = [self.operator(of_group[:, :, g], k, v, *gates, key_mask=key_mask) for g in range(G)]
            return torch.stack(outputs, 2).flatten(1, 2)
        first: Tensor = self.operator(of_group[:, :, 0], k, v, *gates, key_mask=key_mask)
        joined = first.new_empty(B, H // G, G, *first.shape[2:])  # one further output at a time, not all of them
        joined[:, :, 0] = first
        del first
        for g in range(1, G):
            joined[:, :, g] = self.operator(of_group[:, :, g], k, v, *gates, key_mask=key_mask)
        return joined.flatten(1, 2)

    def _by_group(self, q: Tensor) -> Tensor:
        return torch.unflatten(q, 1, (-1, self.groups))

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, key_mask: Tensor | None = None) -> Tensor:
        assert isinstance(self.operator, Dense)
        of_group = self._by_group(q)
        outputs = [self.operator.dense(of_group[:, :, g], k, v, *gates, key_mask=key_mask) for g in range(self.groups)]
        return torch.stack(outputs, 2).flatten(1, 2)

    def _select(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Grouped:
        """The choice for q ``(B, H, N, D)`` and k ``(B, K, M, D)``, of one head of each group after another."""
        assert isinstance(self.operator, Selecting)
        of_group = self._by_group(q)
        if self.way == "query by query":
            chosen = self.operator.select(of_group.flatten(2, 3), k, key_mask=key_mask)
            return Grouped((chosen,) * self.groups, q.shape[2])
        return Grouped(
            tuple(self.operator.select(of_group[:, :, g], k, key_mask=key_mask) for g in range(self.groups)), 0
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Grouped) -> Tensor:
        assert isinstance(self.operator, Selecting)
        of_group = self._by_group(q)
        if self.way == "query by query":
            out = self.operator.attend(of_group.flatten(2, 3), k, v, selection.parts[0])
            return out.reshape(*q.shape[:3], v.shape[3])
        outputs = [self.operator.attend(of_group[:, :, g], k, v, part) for g, part in enumerate(selection.parts)]
        return torch.stack(outputs, 2).flatten(1, 2)

    def _begin(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Any:
        """The state after q ``(B, H, n, D)``, k, v ``(B, K, n, ·)``; without queries: any head of a group will do."""
        assert isinstance(self.operator, Decoding)
        return self.operator.begin(self._by_group(q)[:, :, 0], k, v, *gates)

    def _step(self, state: Any, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, Any]:
        """A step for q ``(B, H, 1, D)``, k and v ``(B, K, 1, D)``; one state, which holds no queries, answers all."""
        operator = self.operator
        assert isinstance(operator, Decoding)
        if getattr(type(operator), "step", None) is CachedDecoding.step:
            return operator.step(state, q, k, v)
        of_group = self._by_group(q)
        if isinstance(operator, FeatureAttention):  # queries have no places: those of a group are rows of one step
            together, state = operator.step(state, of_group.flatten(2, 3), k, v)
            return together.flatten(1, 2)[:, :, None], state
        steps = [operator.step(state, of_group[:, :, g], k, v, *gates) for g in range(self.groups)]
        return torch.stack([out for out, _ in steps], 2).flatten(1, 2), steps[-1][1]


class ValueGroups(nn.Module):
    """An operator with H heads whose queries and keys have Q: head h reads head h // (H / Q) of these.

    q, k ``(B, Q, N, D)``, v ``(B, H, N, E)`` and gates ``(B, H, N, ·)`` -> ``(B, H, N, E)``. Models whose layers gate a
    state have such heads, since a state of H heads holds more than one of Q. Each head of q and k is copied for all
    heads of values that it serves, as code in PyTorch's operations does; the copies are a part of the time and memory.
    """

    def __init__(self, operator: nn.Module, groups: int) -> None:
        super().__init__()
        self.operator, self.groups = operator, groups
        if isinstance(operator, Dense):
            self.dense = partial(self._spread, operator.dense)
        if isinstance(operator, Decoding):
            self.begin, self.step = partial(self._spread, operator.begin), self._step
            self.at_once = getattr(operator, "at_once", False)
        if isinstance(operator, Prompted):
            self.prompted = partial(self._spread, operator.prompted)

    def forward(self, *inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self._spread(self.operator, *inputs, key_mask=key_mask)
        return out

    def _step(self, state: Any, *inputs: Tensor) -> Any:
        assert isinstance(self.operator, Decoding)
        return self._spread(partial(self.operator.step, state), *inputs)

    def _spread(self, call: Callable[..., Any], q: Tensor, k: Tensor, *others: Tensor, **named: Any) -> Any:
        return call(*(x.repeat_interleave(self.groups, 1) for x in (q, k)), *others, **named)
