"""Associative recall with two tokens per pair: the model must first learn that a value belongs to the key before it.

Source: multi-query associative recall in Arora et al. 2023, "Zoology", arXiv:2312.04927, figure 2.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Generator, Tensor

from attnbench.catalogue.tasks.streams import Stream, choices
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL, Examples, Form, register_task
from attnbench.errors import Unsupported, UsageError


@register_task("mqar", source="Arora et al. 2023, arXiv:2312.04927, figure 2")
class MQAR(Stream):
    """What value followed this key? Key value key value ..., then keys.

    Half of the vocabulary are keys, half are values; no key and no value occurs twice among the pairs of a sequence.
    After the pairs each key is asked once. The places there are grouped in twos, and each question takes the first
    place of another two, chosen by a power law so that most questions come soon: the g-th two after the pairs, from
    g = 1, has the weight g^(power-1). The labels are at the questions; everything else is filler. The published task is
    for models that predict the next token, so its input has the value after each key asked. An encoder would see it
    there, so that place is filler here. Guessing gives 2/vocab; naming any value of the sequence gives 1/pairs.

    Published settings: n 64, 128, 256, 512 with 4, 8, 16, 64 pairs; 100,000 sequences to train on, 3,000 to test on.

    Raises:
        UsageError: there are fewer keys than pairs, or the vocabulary is odd.
        Unsupported: the sequence has fewer than 4 tokens per pair, or it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        pairs: Annotated[int, Field(ge=1, le=4096, description="keys with a value in each sequence")] = 8,
        vocab: Annotated[int, Field(ge=4, le=65_536, description="different tokens, half keys, half values")] = 8192,
        power: Annotated[
            float,
            Field(gt=0, le=1, description="exponent for the gaps: near 0 they are short, at 1 all are equally likely"),
        ] = 0.01,
        test: Annotated[int, Field(ge=1, le=100_000, description="sequences to test on")] = 512,
    ) -> None:
        if vocab % 2 or vocab // 2 < pairs:
            raise UsageError(f"mqar: vocab={vocab} must be even and at least 2·pairs = {2 * pairs}")
        if shape.seq_len < 4 * pairs:
            raise Unsupported(f"mqar: pairs={pairs} need a length of at least {4 * pairs}, not {shape.seq_len}")
        super().__init__(
            "mqar",
            shape,
            Form(vocab=(vocab + 1,), classes=vocab // 2, per_token=True),
            settings={"pairs": pairs, "vocab": vocab, "power": power},
            test=test,
        )
        self._pairs, self._half, self._filler, self._power = pairs, vocab // 2, vocab, power

    def draw(self, count: int, generator: Generator) -> Examples:
        """Random pairs and questions; keys have the ids below vocab/2, values those from there on, filler ``vocab``."""
        key = choices(count, self._half, self._pairs, generator)
        value = choices(count, self._half, self._pairs, generator)
        places = 2 * self._pairs + 2 * self._gaps(count, generator)
        tokens = torch.full((count, self.n), self._filler)
        tokens[:, 0 : 2 * self._pairs : 2] = key
        tokens[:, 1 : 2 * self._pairs : 2] = self._half + value
        tokens.scatter_(1, places, key)
        labels = torch.full((count, self.n), NO_LABEL).scatter_(1, places, value)
        return Examples(tokens, labels)

    def _gaps(self, count: int, generator: Generator) -> Tensor:
        twos = (self.n - 2 * self._pairs) // 2
        weights = torch.arange(1, twos + 1, dtype=torch.float64) ** (self._power - 1)
        # Exponential waiting times at these rates, in order of arrival, are a draw without replacement.
        uniform = torch.rand(count, twos, dtype=torch.float64, generator=generator)
        return (-torch.log1p(-uniform) / weights).argsort(1)[:, : self._pairs]
