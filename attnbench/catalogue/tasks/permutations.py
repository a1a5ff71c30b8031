"""Multiply permutations: a state that every token changes, and that no shorter sum of the tokens tells."""

from __future__ import annotations

from itertools import permutations
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Generator

from attnbench.catalogue.tasks.streams import Stream
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL, Examples, Form, register_task
from attnbench.errors import Unsupported


@register_task(
    "permutations",
    source="word problems of S3 and S5: Merrill et al. 2024, arXiv:2404.08819; Grazzi et al. 2024, arXiv:2411.12537",
)
class Permutations(Stream):
    """Which permutation do the tokens so far make together?

    Each token is a permutation of ``size`` things, and the label at a place is the product s_i = s_(i-1)·p_i of all
    tokens up to it, which maps j to s_(i-1)(p_i(j)). Ids are in lexicographic order. The first token is any of the
    size! permutations, so that every product is as likely as any other; it has no label. With ``moves=swaps`` all
    later ones exchange two things each, and one step of the delta rule with β = 2 is such an exchange. With ``size=2``
    it is parity. A diagonal recurrence whose factors are all positive cannot follow any of these groups at all
    lengths; for S5 no fixed number of attention layers is believed to. Guessing gives 1/size!.

    Raises:
        Unsupported: the sequence has fewer than two tokens, or it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        size: Annotated[int, Field(ge=2, le=6, description="things that are permuted: 3 for S3, 5 for S5")] = 3,
        moves: Annotated[
            Literal["all", "swaps"], Field(description="tokens after the first: any permutation, or exchanges of two")
        ] = "all",
        answers: Annotated[Literal["each", "last"], Field(description="label each place, or the last one alone")] = (
            "each"
        ),
        test: Annotated[int, Field(ge=1, le=100_000, description="sequences to test on")] = 512,
    ) -> None:
        if shape.seq_len < 2:
            raise Unsupported("permutations: a product has two tokens or more, not 1; raise the length")
        elements = torch.tensor(list(permutations(range(size))))
        super().__init__(
            "permutations",
            shape,
            Form(vocab=(len(elements),), classes=len(elements), per_token=True),
            settings={"size": size, "moves": moves, "answers": answers},
            test=test,
        )
        digits = size ** torch.arange(size).flip(0)
        self._products = torch.searchsorted(elements @ digits, elements[:, elements] @ digits)
        """int64 ``(size!, size!)``: the id of a·b in row a and column b."""
        moved = (elements != torch.arange(size)).sum(1)
        self._moves = torch.nonzero((moved == 2) | (moves == "all")).flatten()
        self._last = answers == "last"

    def draw(self, count: int, generator: Generator) -> Examples:
        """Random permutations and their products."""
        tokens = self._moves[torch.randint(len(self._moves), (count, self.n), generator=generator)]
        state = tokens[:, 0] = torch.randint(len(self._products), (count,), generator=generator)
        labels = torch.full_like(tokens, NO_LABEL)
        for place in range(1, self.n):
            state = labels[:, place] = self._products[state, tokens[:, place]]
        if self._last:
            labels[:, :-1] = NO_LABEL
        return Examples(tokens, labels)
