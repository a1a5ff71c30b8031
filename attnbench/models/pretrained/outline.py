"""A trained model by its configuration, without weights and text, for counting sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported
from attnbench.measure.reuse import Recent
from attnbench.models.pretrained.cell import Swapped, operators_of
from attnbench.models.pretrained.language_model import LanguageModel
from attnbench.models.pretrained.listops.captured import LAYERS
from attnbench.models.pretrained.listops.small_encoder import untrained_encoder
from attnbench.models.pretrained.loading import bare_model
from attnbench.models.pretrained.own_encoder import NAME, OwnEncoder
from attnbench.models.pretrained.subject import Subject
from attnbench.models.pretrained.windows import Windows
from attnbench.suite.cell import UNTOUCHED, Cell


@dataclass(frozen=True, slots=True)
class Described:
    """A trained model that can be made with fake tensors."""

    layers: int
    make: Callable[[Shape], tuple[Subject, bool]]
    """Gives the model for windows of this length and causality, and True if it predicts anything."""

    def swapped(self, cell: Cell) -> tuple[Swapped, Windows]:
        """As :func:`~attnbench.models.pretrained.cell.swapped`, with empty weights and windows. Raises UsageError,
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
