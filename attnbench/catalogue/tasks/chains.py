"""Follow several pairs from key to key: each lookup asks for what the one before has found."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Generator

from attnbench.catalogue.tasks.streams import Stream, choices, shuffles
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL, Examples, Form, register_task
from attnbench.errors import Unsupported, UsageError

_VERSION = 1


@register_task("chains", source="own; after the k-hop task of Sanford, Hsu & Telgarsky 2024, arXiv:2402.09268")
class Chains(Stream):
    """Which value ends the chain of this key? Pairs a to b, b to c, first, bare keys later.

    A chain has ``hops`` pairs: each leads to the key of the next one, and the last to a value, which is drawn anew for
    each sequence. So the answer takes that many lookups, and no lookup before the last tells anything of it; one hop is
    ``recall``. The pairs of all chains stand first, in an order that says nothing, each in one token with its key and
    what it leads to. The first key of each chain is asked once at a random later place; all else is filler. The labels
    are at the questions; guessing gives 1/values.

    Raises:
        UsageError: there are fewer keys than pairs.
        Unsupported: the sequence is too short for the pairs and the questions, or it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        hops: Annotated[int, Field(ge=1, le=256, description="pairs of a chain, from its first key to its value")] = 2,
        chains: Annotated[int, Field(ge=1, le=1024, description="chains, and so questions, of each sequence")] = 4,
        values: Annotated[int, Field(ge=2, le=4096, description="different values, the classes")] = 8,
        keys: Annotated[int | None, Field(ge=1, le=2**18, description="different keys; none: hops·chains")] = None,
        test: Annotated[int, Field(ge=1, le=100_000, description="sequences to test on")] = 512,
    ) -> None:
        pairs = hops * chains
        keys = pairs if keys is None else keys
        if keys < pairs:
            raise UsageError(f"chains: keys={keys} are fewer than hops·chains = {pairs}; raise keys or lower chains")
        if shape.seq_len < pairs + chains:
            raise Unsupported(
                f"chains: {pairs} pairs and {chains} questions need a length of at least {pairs + chains}, not "
                f"{shape.seq_len}"
            )
        super().__init__(
            "chains",
            shape,
            Form(vocab=(keys + 1, keys + values + 1), classes=values, per_token=True),
            settings={"hops": hops, "chains": chains, "values": values, "keys": keys},
            version=_VERSION,
            test=test,
        )
        self._chains, self._hops, self._values, self._keys = chains, hops, values, keys

    def draw(self, count: int, generator: Generator) -> Examples:
        """Random chains with tokens ``(count, N, 2)``: a key or ``keys``, and a key, ``keys`` + value or nothing."""
        pairs = self._chains * self._hops
        key = choices(count, self._keys, pairs, generator).view(count, self._chains, self._hops)
        value = torch.randint(self._values, (count, self._chains), generator=generator)
        leads_to = torch.cat([key[:, :, 1:], self._keys + value[:, :, None]], 2)
        order = shuffles(count, pairs, generator)
        places = pairs + choices(count, self.n - pairs, self._chains, generator)
        tokens = torch.tensor([self._keys, self._keys + self._values]).repeat(count, self.n, 1)
        tokens[:, :pairs] = torch.stack([part.flatten(1).gather(1, order) for part in (key, leads_to)], 2)
        tokens[..., 0].scatter_(1, places, key[:, :, 0])
        return Examples(tokens, torch.full((count, self.n), NO_LABEL).scatter_(1, places, value))
