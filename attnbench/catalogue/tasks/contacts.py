"""Sequences over 20 letters in which distant places depend on each other, as residues of a protein do that touch.

A stand-in, and no protein: letters are drawn from a model with few rules, all of them known. Choromanski et al. 2021
trained on TrEMBL, millions of real sequences, which this is not. It shares with them the question, a masked
letter, and the reason why it can be answered: in a folded protein places far apart in the sequence touch, and change
together. Here the rules are known, so that the best possible accuracy is, too.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Generator, Tensor

from attnbench.catalogue.tasks.streams import Stream
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL, Examples, Form, register_task, stream_seed
from attnbench.errors import Unsupported

LETTERS = 20
MASK = LETTERS


@register_task("contacts", source="own; after masked residues of proteins, Choromanski et al. 2021, arXiv:2009.14794")
class Contacts(Stream):
    """Which letter is masked? A partner far away tells; no real proteins.

    The first token names the family. Each family has pairs of places, n/4 or more apart, that never change: its
    contacts. Letters are drawn alike from 20, but with the probability ``coupling`` the second letter of a contact is
    the partner of the first; ten pairs of letters are partners of each other. One place of each contact, either, is
    masked, and its letter is the label. All other places are noise, which no label needs.

    Nobody can know more than the partner: the best possible accuracy is coupling + (1 - coupling)/20. Guessing gives
    1/20.

    Raises:
        Unsupported: the sequence is too short for the contacts, or it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        contacts: Annotated[int | None, Field(ge=1, le=4096, description="contacts of a family; none: n/4")] = None,
        families: Annotated[int, Field(ge=1, le=1000, description="families, each with its own contacts")] = 2,
        coupling: Annotated[float, Field(gt=0, le=1, description="probability that a contact decides")] = 0.9,
        test: Annotated[int, Field(ge=1, le=100_000, description="sequences to test on")] = 512,
    ) -> None:
        pairs = max(1, shape.seq_len // 4) if contacts is None else contacts
        if shape.seq_len < 8 or pairs > shape.seq_len // 4:
            raise Unsupported(f"contacts: {pairs} contacts need a length of at least {max(8, 4 * pairs)}")
        super().__init__(
            "contacts",
            shape,
            Form(vocab=(LETTERS + 1 + families,), classes=LETTERS, per_token=True),
            settings={"contacts": pairs, "families": families, "coupling": coupling},
            test=test,
        )
        rules = torch.Generator().manual_seed(stream_seed(self._label, "rules"))
        self.partner = torch.empty(LETTERS, dtype=torch.int64)
        """int64 ``(20,)``: the partner of each letter; the relation is mutual."""
        some, others = torch.randperm(LETTERS, generator=rules).view(2, -1)
        self.partner[some], self.partner[others] = others, some
        self.places = torch.stack([_far_pairs(self.n, pairs, rules) for _ in range(families)])
        """int64 ``(families, contacts, 2)``: the two places of each contact."""
        self._coupling = coupling

    @property
    def best(self) -> float:
        return self._coupling + (1 - self._coupling) / LETTERS

    def draw(self, count: int, generator: Generator) -> Examples:
        """Random sequences; a family's token is 21 and more, the mask 20."""
        family = torch.randint(len(self.places), (count,), generator=generator)
        tokens = torch.randint(LETTERS, (count, self.n), generator=generator)
        first, second = self.places[family].unbind(2)
        coupled = torch.rand(first.shape, dtype=torch.float64, generator=generator) < self._coupling
        told = self.partner[tokens.gather(1, first)]
        tokens.scatter_(1, second, torch.where(coupled, told, tokens.gather(1, second)))
        masked = torch.where(torch.randint(2, first.shape, generator=generator) == 0, first, second)
        labels = torch.full_like(tokens, NO_LABEL).scatter_(1, masked, tokens.gather(1, masked))
        tokens.scatter_(1, masked, MASK)
        tokens[:, 0] = MASK + 1 + family
        return Examples(tokens, labels)


def _far_pairs(n: int, count: int, generator: Generator) -> Tensor:
    """``count`` pairs of different places after the first, n/4 or more apart, int64 ``(count, 2)``.

    n/4 pairs always exist: at least n/2 places are left before the last pair, and the outermost two are far enough
    apart.
    """
    order = (1 + torch.randperm(n - 1, generator=generator)).tolist()
    left, pairs = dict.fromkeys(order), list[tuple[int, int]]()
    for place in order:
        if len(pairs) == count:
            break
        other = next((one for one in left if abs(one - place) * 4 >= n), None) if place in left else None
        if other is not None:
            pairs.append((place, other))
            del left[place], left[other]
    return torch.tensor(pairs)
