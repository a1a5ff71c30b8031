"""Look up the value of a key: pairs first, questions later.

Source: the key-value retrieval of Schlag, Irie & Schmidhuber 2021, arXiv:2102.11174, section 6.1, where one token holds
key and value of a pair, so that one lookup answers. Our own additions: each sequence asks many questions, and in the
form ``long`` the facts do not grow with n and no answer is within a window around its question.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Generator, Tensor

from attnbench.catalogue.tasks.streams import Stream, choices, shuffles
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL, Examples, Form, register_task
from attnbench.errors import Unsupported, UsageError


@register_task("recall", source="after Schlag et al. 2021, arXiv:2102.11174, section 6.1")
class Recall(Stream):
    """What value did this key have? Pairs first, bare keys later.

    The keys' values are drawn anew for each sequence, so that only other tokens can reveal them.
    Form ``filler``: the first tokens are the pairs, each key once, in random order. Each key is asked once at a random
    later place; all other places are filler.
    Form ``long``: the first half of the sequence repeats the pairs at random, each at least once. Every place in the
    second half asks for a random key.
    The labels are at the questions; guessing gives 1/values.

    Raises:
        UsageError: there are fewer keys than pairs.
        Unsupported: the sequence is too short for the pairs and the questions, the length is odd with form ``long``, or
            it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        pairs: Annotated[int, Field(ge=1, le=4096, description="keys with a value in each sequence")] = 16,
        values: Annotated[int, Field(ge=2, le=4096, description="different values, the classes")] = 8,
        keys: Annotated[int | None, Field(ge=1, le=4096, description="different keys; none: as many as pairs")] = None,
        ids: Annotated[
            Literal[1, 2], Field(description="ids of a token: one for each (key, value), or one for each of the two")
        ] = 1,
        form: Annotated[
            Literal["filler", "long"],
            Field(description="each key once and filler, or n/2 repeated pairs, n/2 questions"),
        ] = "filler",
        test: Annotated[int, Field(ge=1, le=100_000, description="sequences to test on")] = 512,
    ) -> None:
        keys = pairs if keys is None else keys
        if keys < pairs:
            raise UsageError(f"recall: keys={keys} are fewer than pairs={pairs}; raise keys or lower pairs")
        if shape.seq_len < 2 * pairs:
            raise Unsupported(f"recall: pairs={pairs} need a length of at least {2 * pairs}, not {shape.seq_len}")
        if form == "long" and shape.seq_len % 2:
            raise Unsupported(f"recall: form=long needs an even length, not {shape.seq_len}")
        filler = form == "filler"
        vocab = (keys * values + keys + filler,) if ids == 1 else (keys + filler, values + 1)
        super().__init__(
            "recall",
            shape,
            Form(vocab=vocab, classes=values, per_token=True),
            settings={"pairs": pairs, "values": values, "keys": keys, "ids": ids, "form": form},
            test=test,
        )
        self._pairs, self._values, self._keys, self._ids, self._long = pairs, values, keys, ids, not filler

    def draw(self, count: int, generator: Generator) -> Examples:
        """Examples with tokens ``(count, N)``, or ``(count, N, 2)`` if each token has two ids."""
        known = choices(count, self._keys, self._pairs, generator)
        value = torch.randint(self._values, (count, self._pairs), generator=generator)
        pair, asked = (self._places_long if self._long else self._places_filler)(count, generator)
        # At each place: the number of the pair that is there or is asked for, or -1.
        which = torch.where(pair >= 0, pair, asked)
        filled, at = which >= 0, which.clamp(min=0)
        key = torch.where(filled, known.gather(1, at), self._keys)
        of_key = value.gather(1, at)
        tokens = self._tokens(key, torch.where(pair >= 0, of_key, self._values))
        return Examples(tokens, torch.where(asked >= 0, of_key, NO_LABEL))

    def _tokens(self, key: Tensor, value: Tensor) -> Tensor:
        """Tokens of keys and values; the key number ``keys`` means filler, the value number ``values`` a bare key."""
        if self._ids == 2:
            return torch.stack([key, value], dim=2)
        bare = self._keys * self._values + key
        return torch.where(value < self._values, key * self._values + value, bare)

    def _places_filler(self, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """The number of the pair at each place, and of the pair asked for there, each ``(count, N)``, -1 for none."""
        pair = torch.full((count, self.n), -1)
        pair[:, : self._pairs] = torch.arange(self._pairs)
        asked = torch.full_like(pair, -1)
        places = self._pairs + choices(count, self.n - self._pairs, self._pairs, generator)
        asked.scatter_(1, places, torch.arange(self._pairs).expand(count, -1))
        return pair, asked

    def _places_long(self, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
        half = self.n // 2
        pair, asked = torch.full((2, count, self.n), -1)
        more = torch.randint(self._pairs, (count, half - self._pairs), generator=generator)
        each = torch.cat([torch.arange(self._pairs).expand(count, -1), more], dim=1)
        pair[:, :half] = each.gather(1, shuffles(count, half, generator))
        asked[:, half:] = torch.randint(self._pairs, (count, half), generator=generator)
        return pair, asked
