"""What stands around a variant, wrong on purpose: each has the mistake that is made most easily there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from attnbench.catalogue.engines.shared_heads import ValueGroups
from attnbench.contract.capabilities import Decoding
from attnbench.harness.score.loop import WIDTH
from attnbench.models.added_tokens import AddedTokens
from attnbench.models.decoder import CrossAttention
from attnbench.models.encoder import MultiHead
from attnbench.models.fewer_queries import FewerQueries, means


class TurnedByPlaceZero(MultiHead):
    """Every token of a step is turned as the first of its sequence."""

    def step(self, state: Any, x: Tensor) -> tuple[Tensor, Any]:
        place, inner = state
        out, (_, inner) = super().step((0, inner), x)
        return out, (place + 1, inner)


class PromptNotCounted(MultiHead):
    """After a prompt the places begin anew."""

    def begin(self, x: Tensor) -> Any:
        return 0, cast(Decoding, self.operator).begin(*self._projected(x))


class GroupsInRound(ValueGroups):
    """Head h reads head h % Q of the queries and keys, and not h // (H / Q)."""

    def _spread(self, call: Callable[..., Any], q: Tensor, k: Tensor, *others: Tensor, **named: Any) -> Any:
        return call(*(x.repeat(1, self.groups, 1, 1) for x in (q, k)), *others, **named)


class CutFromTheEnd(AddedTokens):
    """The outputs of the last tokens are left out, and not those of the tokens that were added."""

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if key_mask is not None:
            key_mask = torch.cat([key_mask.new_ones(len(x), len(self.tokens)), key_mask], 1)
        y: Tensor = self.layer(self._longer(x), key_mask=key_mask)
        return y[:, : x.shape[1]]


class MaskedFromTheEnd(AddedTokens):
    """The mask is made longer behind, where tokens of the sequence then count as padding that are none."""

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if key_mask is not None:
            key_mask = torch.cat([key_mask, key_mask.new_ones(len(x), len(self.tokens))], 1)
        y: Tensor = self.layer(self._longer(x), key_mask=key_mask)
        return y[:, len(self.tokens) :]


def divided_by_the_stride(x: Tensor, stride: int, key_mask: Tensor | None = None) -> Tensor:
    """Means of fewer tokens, at the end or beside padding, are divided by ``stride`` all the same."""
    x = x if key_mask is None else x.masked_fill(~key_mask[:, :, None], 0.0)
    return torch.unflatten(pad(x, (0, 0, 0, -x.shape[1] % stride)), 1, (-1, stride)).mean(2)


def with_padding(x: Tensor, stride: int, key_mask: Tensor | None = None) -> Tensor:
    """The padding has its part in the means."""
    return means(x, stride)


class OfTheFirstToken(FewerQueries):
    """The query is that of the first token of several."""

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.crossing(x[:, :: self.stride], x, key_mask=key_mask)
        return y


def distance_in_tokens(n: int, m: int, width: float = WIDTH) -> Tensor:
    """The diagonal of equal places, also where the lengths differ, and a width of less than a token."""
    i, j = (torch.arange(length, dtype=torch.float64) for length in (n, m))
    return -torch.expm1(-(i[:, None] - j).square() / (2 * width**2))


def with_padded_queries(weights: Tensor, key_mask: Tensor | None = None, *, width: float = WIDTH) -> Tensor:
    """The guided-attention loss over all rows, those of padding too."""
    i, j = (torch.arange(length, dtype=torch.float64) / length for length in weights.shape[-2:])
    far = -torch.expm1(-(i[:, None] - j).square() / (2 * width**2))
    return (weights * far.to(weights)).sum(-1).mean()


class AttendsToItself(CrossAttention):
    """Keys and values of what writes, and not of what was read."""

    def forward(self, x: Tensor, y: Tensor, key_mask: Tensor | None) -> Tensor:
        z = self.before(x)
        out: Tensor = x + self.drop(self.crossing(z, z))
        return out


class PaddingIsRead(CrossAttention):
    """The padding of what is read counts as tokens."""

    def forward(self, x: Tensor, y: Tensor, key_mask: Tensor | None) -> Tensor:
        return super().forward(x, y, None)


def with_one_length(kernel: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The estimate of exp(q·k/√D) without the factor of the query alone: the key's length stays in it."""
    of_q = torch.linalg.vecdot(q, q) * (-0.5 * q.shape[-1] ** -0.5)
    estimate: Tensor = kernel * of_q[..., :, None].exp()
    return estimate


def distances_of_vectors(q: Tensor, k: Tensor, distances: Tensor) -> tuple[Tensor, Tensor]:
    """Keys so many away from the query itself, and not from it over D^¼."""
    queries = q[0, 0, :, None, None]
    return queries, queries + normalize(k[0, 0, :, None, None] - queries, dim=-1) * distances[:, None]
