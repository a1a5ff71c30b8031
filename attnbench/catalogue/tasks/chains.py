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


@register_task("chains", source="own; after the k-hop task of Sanford, Hsu & Telgarsky 2024, arXiv:2402.09268")
class Chains(Stream):
    """Which value is so many lookups away? Each key names the next.

    The keys of a sequence form one ring, drawn anew for each sequence. Each stands first in one token with the key that
    it leads to and with a value of its own, which no other key has; the order of these tokens says nothing. Then each
    key is asked once at a random later place; all else is filler. The label is the value of the key that is hops - 1
    steps along the ring: one hop is ``recall``, and every further one looks up what the one before has found. At most
    half of the ring is walked, since the way back would be shorter. Guessing gives 1/values; naming any value of the
    sequence gives 1/keys of it.

    Raises:
        UsageError: the ring is shorter than 2·(hops - 1), or there are fewer different keys or values than in it.
        Unsupported: the sequence is too short for the keys and the questions, or it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        hops: Annotated[int, Field(ge=1, le=1024, description="lookups from the key asked to the answer")] = 2,
        ring: Annotated[int, Field(ge=1, le=4096, description="keys of each sequence, each with the next one")] = 8,
        values: Annotated[
            int | None, Field(ge=1, le=4096, description="different values; none: as many as ring")
        ] = None,
        keys: Annotated[int | None, Field(ge=1, le=4096, description="different keys; none: as many as ring")] = None,
        test: Annotated[int, Field(ge=1, le=100_000, description="sequences to test on")] = 512,
    ) -> None:
        values, keys = ring if values is None else values, ring if keys is None else keys
        if min(keys, values) < ring:
            raise UsageError(f"chains: {min(keys, values)} keys or values are fewer than ring={ring}; lower ring")
        if ring < 2 * (hops - 1):
            raise UsageError(f"chains: hops={hops} need a ring of at least {2 * (hops - 1)}; raise ring or lower hops")
        if shape.seq_len < 2 * ring:
            raise Unsupported(f"chains: ring={ring} needs a length of at least {2 * ring}, not {shape.seq_len}")
        super().__init__(
            "chains",
            shape,
            Form(vocab=(keys + 1, keys + 1, values + 1), classes=values, per_token=True),
            settings={"hops": hops, "ring": ring, "values": values, "keys": keys},
            test=test,
        )
        self._hops, self._ring, self._values, self._keys = hops, ring, values, keys

    def draw(self, count: int, generator: Generator) -> Examples:
        """Random rings with tokens ``(count, N, 3)``: a key, the next one and its value; ``keys`` and ``values`` in the
        place of none."""
        ring, value = (choices(count, most, self._ring, generator) for most in (self._keys, self._values))
        order, others = (shuffles(count, self._ring, generator) for _ in range(2))
        places = self._ring + choices(count, self.n - self._ring, self._ring, generator)
        tokens = torch.tensor([self._keys, self._keys, self._values]).repeat(count, self.n, 1)
        known = torch.stack([ring, ring.roll(-1, 1), value], 2)
        tokens[:, : self._ring] = known.gather(1, order[:, :, None].expand(-1, -1, 3))
        tokens[..., 0].scatter_(1, places, ring.gather(1, others))
        answer = value.roll(1 - self._hops, 1).gather(1, others)
        return Examples(tokens, torch.full((count, self.n), NO_LABEL).scatter_(1, places, answer))
