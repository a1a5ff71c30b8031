"""A trained model with a variant in every layer that it can replace, as a cell at level pretrained measures it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL
from attnbench.errors import Unsupported, UsageError
from attnbench.measure.reuse import Recent
from attnbench.models.pretrained.bridge import library
from attnbench.models.pretrained.language_model import LanguageModel
from attnbench.models.pretrained.listops.captured import LAYERS
from attnbench.models.pretrained.listops.small_encoder import untrained_encoder
from attnbench.models.pretrained.loading import bare_model
from attnbench.models.pretrained.models import open_model
from attnbench.models.pretrained.operators import Operators, build_operators, replaced
from attnbench.models.pretrained.own_encoder import NAME, OwnEncoder
from attnbench.models.pretrained.subject import Layer, Subject, Text, Windows
from attnbench.suite.cell import UNTOUCHED, Cell
from attnbench.text import quantity


@dataclass(frozen=True, slots=True)
class Opened:
    """A trained model, copied for each cell, and its text."""

    subject: Subject
    text: Text
    weights: nn.Module

    @property
    def left(self) -> str:
        kept = {
            layer.kept: [i for i, one in enumerate(self.subject.layers) if one.kept == layer.kept]
            for layer in self.subject.layers
        }
        said = [f"{', '.join(map(str, places))}: {why}" for why, places in kept.items() if why]
        return f"layers left as they are: {' and '.join(said)}" if said else ""


class Swapped(nn.Module):
    """Tokens ``(B, N)`` to logits ``(B, N, V)``, or to features ``(B, N, C)`` if the model predicts nothing.

    ``operators`` have the attention of each layer; None for the model as it is. It never drops anything out.
    """

    def __init__(self, subject: Subject, operators: Operators | None) -> None:
        super().__init__()
        self.model = subject.module
        self.operators = nn.ModuleList(() if operators is None else operators.values())
        self._answer, self._intercept = subject.answer, None if operators is None else replaced(operators)
        self.eval()

    def train(self, mode: bool = True) -> Swapped:
        super().train(False)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        return self._answer(tokens, self._intercept)


def _open(name: str, length: int, text: str) -> Opened:
    subject, words = open_model(name, length, Path(text) if text else None)
    return Opened(subject, words, subject.module)


cached = Recent(_open, 1)
"""The model of this name, for windows of a length, out of this file of text; the last one is kept."""


def opened(cell: Cell) -> Opened:
    """The cell's model and its text; the last one is cached, since the next cell mostly has the same model.

    Raises UsageError, also for windows of this length, and Unsupported if none of its layers can be replaced.
    """
    assert cell.pretrained is not None
    found = cached(cell.pretrained.name, cell.shape.N, cell.pretrained.text)
    free = [layer for layer in found.subject.layers if not layer.kept]
    if not free:
        raise Unsupported(found.subject.layers[0].kept)
    shape = cell.shape
    if _sizes(free[0]) != (shape.H, shape.K, shape.D, shape.causal):
        heads, kv_heads, width, causal = _sizes(free[0])
        said = f"{heads} heads of width {width} over {kv_heads} of keys and values, {'' if causal else 'not '}causal"
        raise UsageError(
            f"the model {cell.pretrained.name} has {said}, which the cell does not say; take another model"
        )
    return found


def _sizes(layer: Layer) -> tuple[int, int, int, bool]:
    return layer.shape.H, layer.shape.H // layer.sharing, layer.shape.D, layer.shape.causal


def swapped(cell: Cell) -> tuple[Swapped, Windows]:
    """The model with the cell's variant in it, in float32 on the CPU, and the windows of a first step of training.

    Raises UsageError and Unsupported as :func:`opened`, and for the variant.
    """
    one = opened(cell)
    windows = one.text.batch(cell.seed, 0, cell.shape.B)
    predicts = bool((windows.targets != NO_LABEL).any())
    return _with_variant(cell, one.subject.copy(), predicts=predicts), windows


def _with_variant(cell: Cell, subject: Subject, *, predicts: bool) -> Swapped:
    if cell.pass_ != "forward" and not predicts:
        raise Unsupported("this model predicts nothing, so that it has no loss to train; write pass: forward")
    if cell.variant.name == UNTOUCHED:
        subject.restore()
        return Swapped(subject, None)
    return Swapped(subject, operators_of(cell, subject))


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A trained model by its configuration alone, which can be made with fake tensors to count sizes."""

    layers: int
    make: Callable[[Shape], tuple[Subject, bool]]
    """Gives the model for windows of this length and causality, and True if it predicts anything."""

    def swapped(self, cell: Cell) -> tuple[Swapped, Windows]:
        """As :func:`swapped`, with empty weights and windows. Raises UsageError, Unsupported."""
        subject, predicts = self.make(cell.shape)
        tokens, targets = (torch.zeros(cell.shape.B, cell.shape.N, dtype=torch.int64) for _ in range(2))
        return _with_variant(cell, subject, predicts=predicts), Windows(tokens, targets)


def described(cell: Cell) -> ModelOutline:
    """The cell's model, with its configuration read here, where tensors are real. Raises UsageError."""
    assert cell.pretrained is not None
    return _described(cell.pretrained.name)


def _described_anew(name: str) -> ModelOutline:
    if name == NAME:
        return ModelOutline(LAYERS, lambda shape: (OwnEncoder(shape.N, untrained_encoder(), digest=""), True))
    layers, make = bare_model(name)

    def model(shape: Shape) -> tuple[Subject, bool]:
        subject = LanguageModel.unread(name, make(), shape.N, causal=shape.causal)
        return subject, subject.predicts

    return ModelOutline(layers, model)


_described = Recent(_described_anew, 1)


def operators_of(cell: Cell, subject: Subject) -> Operators:
    """The variant in each layer that the cell replaces; nothing for the untouched model.

    Raises UsageError if there is no such layer, and Unsupported if it has to stay as it is, or for the variant.
    """
    if cell.variant.name == UNTOUCHED:
        return {}
    layers = subject.layers
    chosen = [place for place, layer in enumerate(layers) if not layer.kept]
    if cell.replaced != "all":
        chosen = [int(place) for place in cell.replaced.split("+")]
        if chosen[-1] >= len(layers):
            raise UsageError(f"replaced: {chosen[-1]}: the model has {quantity(len(layers), 'layer')}, counted from 0")
        if kept := [f"layer {place}: {layers[place].kept}" for place in chosen if layers[place].kept]:
            raise Unsupported(kept[0])
    return build_operators(cell.variant, layers, chosen, seed=cell.seed)


def make_ready(names: Iterable[str]) -> None:
    """Import the libraries of these models, before a cell's changes to the process are recorded."""
    if any(name != NAME for name in names):
        os.environ["HF_HUB_OFFLINE"] = "1"  # before the library is imported
        small = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8}
        transformers = library()
        transformers.BertModel(transformers.BertConfig(vocab_size=8, **small))  # the first adds a method to all modules
