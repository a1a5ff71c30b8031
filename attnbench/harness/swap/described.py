"""A trained model as the process that measures finds it: its layers, its text and its weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from attnbench.errors import Unsupported, UsageError
from attnbench.harness.outside.isolation import CellFailed, Worker, WorkerFailed
from attnbench.harness.wire.protocol import Request
from attnbench.measure.status import Status
from attnbench.models.pretrained.pretrained_cell import cached
from attnbench.models.pretrained.subject import Layer

_PATIENCE = 600.0
"""Seconds for opening a model, or for one window."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model and its text."""

    layers: tuple[Layer, ...]
    most: int | None
    """Number of windows that can be held out; None if endless."""
    weights: int
    """Number of the model's parameters, and of those in its attention layers."""
    of_attention: int
    window_s: float
    """Seconds for one window, read by the untouched model; 0 if none was read."""

    @property
    def free(self) -> list[int]:
        """The layers that a variant can replace."""
        return [place for place, layer in enumerate(self.layers) if not layer.kept]


@dataclass(frozen=True, slots=True)
class DescribeModel(Request[ModelFacts]):
    """Open a model, and read one window if ``timed``."""

    refusals: ClassVar = (UsageError, Unsupported)
    name: str
    length: int
    text: str
    device: str
    timed: bool = False

    def found(self, tell: Callable[..., None]) -> ModelFacts:
        """The worker's side. Raises UsageError and Unsupported as opening a model does."""
        one = cached(self.name, self.length, self.text)
        module = one.subject.module
        found = ModelFacts(
            layers=one.subject.layers,
            most=one.text.most,
            weights=sum(parameter.numel() for parameter in module.parameters()),
            of_attention=sum(parameter.numel() for parameter in one.subject.of_attention()),
            window_s=0.0,
        )
        if not self.timed:
            return found
        tell(0, 0, "one window")
        subject = one.subject if self.device == "cpu" else one.subject.copy()
        subject.module.to(self.device)
        tokens = one.text.held_out(1).tokens.to(self.device)
        seconds = 0.0
        with torch.inference_mode():
            for _ in range(2):  # the first loads code and weights for the second
                start = time.perf_counter()
                float(subject.read(tokens).hidden.sum())  # a number on the host: a GPU has then finished
                seconds = time.perf_counter() - start
        return replace(found, window_s=seconds)


def describe(worker: Worker, request: DescribeModel) -> ModelFacts:
    """Ask a worker about a model. Raises UsageError, Unsupported and WorkerFailed."""
    try:
        return request.ask(worker, _PATIENCE, told=lambda progress: None)
    except CellFailed as failed:
        if failed.status is not Status.ERROR:
            raise WorkerFailed(f"{request.name}: {failed.reason}") from None
        failed.add_note("\n".join(failed.stderr))  # unforeseen: the command writes its traceback to a file
        raise
