"""The interfaces of a trained model with attention that can be observed and replaced, and of the text that it reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from attnbench.contract.problem.shape import Shape

Exact = Callable[[], Tensor]
Intercept = Callable[[int, Tensor, Tensor, Tensor, Exact], Tensor]
"""Replaces each layer's attention. Its arguments: the layer, from 0; q, k, v ``(B, H, N, D)``, with q scaled so that
softmax(q·k/√D) is the layer's attention, and k, v repeated if query heads share them; and a call for the layer's own
answer. It returns an answer ``(B, H, N, D)``.
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """The attention of one layer, for one window."""

    shape: Shape
    kind: str = "full"
    """The keys that a query may see: ``full``, ``causal``, or ``window of 512``."""
    kept: str = ""
    """The reason why no variant can take its place; empty if one can."""
    sharing: int = 1
    """Heads of queries that share one of keys and values in the model."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """A model's result for some tokens."""

    hidden: Tensor
    """``(B, N, C)``: the last features, from which logits are made."""
    logits: Tensor | None
    """``(B, N, V)``; None if the model predicts nothing."""


class Subject(Protocol):
    """A trained model with attention that can be intercepted."""

    name: str
    """As the user wrote it."""
    digest: str
    """Sixteen hex digits of all weights."""
    module: nn.Module
    layers: tuple[Layer, ...]

    @property
    def facts(self) -> dict[str, str]:
        """Name -> version of the libraries, apart from torch, that decide its numbers."""

    def read(self, tokens: Tensor, intercept: Intercept | None = None) -> ModelOutput:
        """Run the model on tokens ``(B, N)``. Raises Unsupported: not every layer's attention passed through
        ``intercept``, so that its numbers would be those of the untouched model."""

    def answer(self, tokens: Tensor, intercept: Intercept | None = None) -> Tensor:
        """The logits alone, or the last features if the model predicts nothing, as in a prefill. Raises Unsupported."""

    def restore(self) -> None:
        """Let ``module`` compute its attention by itself again, if an equivalent took its place."""

    def of_attention(self) -> list[nn.Parameter]:
        """The parameters of all attention layers with their projections."""

    def copy(self) -> Subject:
        """The same model with weights of its own, which training may change."""


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


def count_calls(seen: int, layers: int) -> str:
    """The reason to reject results after ``seen`` calls of attention in a model of ``layers`` layers; else empty."""
    if seen == layers:
        return ""
    return f"{seen} of its {layers} attention layers were reached, so that the others would stay as they are unseen"


def digest_of_weights(module: nn.Module) -> str:
    """Sixteen hex digits of the SHA-256 of all parameters and buffers: their names, dtypes, shapes and bytes."""
    whole = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return whole.hexdigest()[:16]
