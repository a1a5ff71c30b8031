"""Say a string twice, word by word from left to right."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Generator

from attnbench.catalogue.tasks.streams import Stream
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL, Examples, Form, register_task
from attnbench.errors import Unsupported


@register_task("duplication", source="Kitaev et al. 2020, Reformer, arXiv:2001.04451, section 5 and table 2")
class Duplication(Stream):
    """Predict the next token of 0w0w, where w is random: causal only.

    w has n/2 - 1 symbols. From the second 0 on, the label at each place is the next token; the last place has none.
    Each answer is n/2 - 1 tokens before its question. Guessing gives 1/symbols.

    Raises:
        Unsupported: attention is not causal and so sees the answer, the length is odd or below 4, or it is
            cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        symbols: Annotated[int, Field(ge=2, le=65_536, description="different symbols beside 0, the classes")] = 127,
        test: Annotated[int, Field(ge=1, le=100_000, description="sequences to test on")] = 512,
    ) -> None:
        super().__init__(
            "duplication",
            shape,
            Form(vocab=(symbols + 1,), classes=symbols, per_token=True),
            settings={"symbols": symbols},
            test=test,
        )
        if not shape.causal:
            raise Unsupported("duplication predicts the next token; set causal: true")
        if shape.seq_len % 2 or shape.seq_len < 4:
            raise Unsupported(f"duplication: 0w0w has an even length of at least 4, not {shape.seq_len}")
        self._symbols = symbols

    def draw(self, count: int, generator: Generator) -> Examples:
        """Random words, in which symbol s, from 0, has the id s + 1."""
        half = self.n // 2
        word = torch.randint(self._symbols, (count, half - 1), generator=generator)
        tokens = torch.cat([torch.zeros(count, 1, dtype=torch.int64), word + 1], dim=1).repeat(1, 2)
        labels = torch.full((count, self.n), NO_LABEL)
        labels[:, half:-1] = word
        return Examples(tokens, labels)
