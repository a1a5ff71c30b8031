"""Repeat a string by position alone, whatever the symbols are."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Generator

from attnbench.catalogue.tasks.streams import Stream
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL, Examples, Form, register_task
from attnbench.errors import Unsupported


@register_task("copy", source="own; its like is common, e.g. Graves et al. 2014, arXiv:1410.5401, section 4.1")
class Copy(Stream):
    """What was symbol i? Random symbols, then as many blanks.

    Blank i must name symbol i: a lookup by position, while ``recall`` looks up by content. Places after the last blank,
    if any, are blank too, but have no label. Guessing gives 1/symbols.

    Raises:
        Unsupported: the sequence is too short for the symbols and the blanks, or it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        symbols: Annotated[int, Field(ge=2, le=65_536, description="different symbols, the classes")] = 16,
        count: Annotated[int | None, Field(ge=1, description="symbols of a sequence; none: n/2")] = None,
        test: Annotated[int, Field(ge=1, le=100_000, description="sequences to test on")] = 512,
    ) -> None:
        length = shape.seq_len // 2 if count is None else count
        if not 1 <= length <= shape.seq_len // 2:
            raise Unsupported(
                f"copy: {max(1, length)} symbols and as many blanks do not fit into {shape.seq_len} tokens"
            )
        super().__init__(
            "copy",
            shape,
            Form(vocab=(symbols + 1,), classes=symbols, per_token=True),
            settings={"symbols": symbols, "count": length},
            test=test,
        )
        self._symbols, self._count = symbols, length

    def draw(self, count: int, generator: Generator) -> Examples:
        """Random symbols and blanks; the blank's id is ``symbols``."""
        word = torch.randint(self._symbols, (count, self._count), generator=generator)
        tokens = torch.full((count, self.n), self._symbols)
        labels = torch.full((count, self.n), NO_LABEL)
        tokens[:, : self._count] = word
        labels[:, self._count : 2 * self._count] = word
        return Examples(tokens, labels)
