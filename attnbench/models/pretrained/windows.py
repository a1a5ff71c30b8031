"""Windows of text: the input of a trained model, and the right answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Windows:
    """Sequences of one length, without padding."""

    tokens: Tensor
    """int64 ``(W, N)``."""
    targets: Tensor
    """int64 ``(W, N)``: the right answer at each position, or ``NO_LABEL``."""

    def __len__(self) -> int:
        return len(self.tokens)

    def each(self) -> Iterator[Windows]:
        """One window after the other, as ``(1, N)``: the rest of the memory is for the model."""
        for place in range(len(self)):
            yield Windows(self.tokens[place : place + 1], self.targets[place : place + 1])

    def to(self, device: str) -> Windows:
        return Windows(self.tokens.to(device), self.targets.to(device))


class Text(Protocol):
    """A source of windows. The same call always gives the same windows."""

    name: str
    digest: str
    """Sixteen hex digits of its source."""
    length: int
    most: int | None
    """Number of windows that can be held out; None if endless."""

    def held_out(self, count: int) -> Windows:
        """Windows to evaluate on; none of them is ever trained on."""

    def batch(self, seed: int, step: int, size: int) -> Windows:
        """The windows that step ``step`` (from 0) of a training with this seed sees."""
