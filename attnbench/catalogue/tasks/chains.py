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
    """Which key is ``hops`` pairs further? Pairs a to b, b to c, first, bare keys later.

    The pairs of a sequence form one ring through its keys, which is drawn anew for each sequence. They stand first, in
    an order that says nothing, each in one token with a key and the key that it leads to. Each key is asked once at a
    random later place; all other places are filler. The labels are at the questions. With ``hops=1`` an answer stands
    in the pair of the key asked; with more of them no pair names both. At most half of the ring is followed, since the
    way back would be shorter. Guessing gives 1/keys; naming any key of the sequence gives 1/pairs.

    Raises:
        UsageError: there are fewer than 2·hops pairs, or fewer keys than pairs.
        Unsupported: the sequence is too short for the pairs and the questions, or it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        hops: Annotated[int, Field(ge=1, le=1024, description="pairs from the key asked to the answer")] = 2,
        pairs: Annotated[int, Field(ge=2, le=4096, description="pairs of each sequence, one from each key")] = 8,
        keys: Annotated[int | None, Field(ge=2, le=4096, description="different keys; none: as many as pairs")] = None,
        test: Annotated[int, Field(ge=1, le=100_000, description="sequences to test on")] = 512,
    ) -> None:
        keys = pairs if keys is None else keys
        if keys < pairs:
            raise UsageError(f"chains: keys={keys} are fewer than pairs={pairs}; raise keys or lower pairs")
        if pairs < 2 * hops:
            raise UsageError(f"chains: hops={hops} need at least {2 * hops} pairs; raise pairs or lower hops")
        if shape.seq_len < 2 * pairs:
            raise Unsupported(f"chains: pairs={pairs} need a length of at least {2 * pairs}, not {shape.seq_len}")
        super().__init__(
            "chains",
            shape,
            Form(vocab=(keys + 1, keys + 1), classes=keys, per_token=True),
            settings={"hops": hops, "pairs": pairs, "keys": keys},
            version=_VERSION,
            test=test,
        )
        self._hops, self._pairs, self._keys = hops, pairs, keys

    def draw(self, count: int, generator: Generator) -> Examples:
        """Random rings, tokens ``(count, N, 2)``: key and next key, bare key and ``keys``, or ``keys`` twice."""
        ring = choices(count, self._keys, self._pairs, generator)
        order, others = (shuffles(count, self._pairs, generator) for _ in range(2))
        places = self._pairs + choices(count, self.n - self._pairs, self._pairs, generator)
        following, answer = (ring.roll(-steps, 1) for steps in (1, self._hops))
        tokens = torch.full((count, self.n, 2), self._keys)
        tokens[:, : self._pairs, 0] = ring.gather(1, order)
        tokens[:, : self._pairs, 1] = following.gather(1, order)
        tokens[..., 0].scatter_(1, places, ring.gather(1, others))
        labels = torch.full((count, self.n), NO_LABEL).scatter_(1, places, answer.gather(1, others))
        return Examples(tokens, labels)
