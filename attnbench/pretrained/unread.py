"""A trained model by its configuration, without weights and text, for counting sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnbench.cell import UNTOUCHED, Cell
from attnbench.errors import Unsupported
from attnbench.measure.recent import Recent
from attnbench.pretrained.language_model import LanguageModel
from attnbench.pretrained.loading import bare_model
from attnbench.pretrained.measured import Swapped, operators_of
from attnbench.pretrained.own_encoder import NAME, OwnEncoder
from attnbench.pretrained.subject import Subject
from attnbench.pretrained.windows import Windows
from attnbench.shape import Shape
from attnbench.tasks.capture import LAYERS
from attnbench.tasks.small_encoder import untrained_encoder


@dataclass(frozen=True, slots=True)
class Described:
    """A trained model that can be made with fake tensors."""

    layers: int
    make: Callable[[Shape], tuple[Subject, bool]]
    """Gives the model for windows of this length and causality, and True if it predicts anything."""

    def swapped(self, cell: Cell) -> tuple[Swapped, Windows]:
        """As :func:`~attnbench.pretrained.measured.swapped`, with empty weights and windows. Raises UsageError,
        Unsupported."""
        subject, predicts = self.make(cell.shape)
        if cell.pass_ != "forward" and not predicts:
            raise Unsupported("this model predicts nothing, so that it has no loss to train; write pass: forward")
        tokens, targets = (torch.zeros(cell.shape.B, cell.shape.N, dtype=torch.int64) for _ in range(2))
        if cell.variant.name == UNTOUCHED:
            subject.restore()
            return Swapped(subject, None), Windows(tokens, targets)
        return Swapped(subject, operators_of(cell, subject)), Windows(tokens, targets)


def described(cell: Cell) -> Described:
    """The cell's model, with its configuration read here, where tensors are real. Raises UsageError."""
    assert cell.pretrained is not None
    return _described(cell.pretrained.name)


def _described_anew(name: str) -> Described:
    if name == NAME:
        return Described(LAYERS, lambda shape: (OwnEncoder(shape.N, untrained_encoder(), digest=""), True))
    layers, make = bare_model(name)

    def model(shape: Shape) -> tuple[Subject, bool]:
        subject = LanguageModel.unread(name, make(), shape.N, causal=shape.causal)
        return subject, subject.predicts

    return Described(layers, model)


_described = Recent(_described_anew, 1)
