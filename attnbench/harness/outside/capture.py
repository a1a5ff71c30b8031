"""Capture q, k and v of a trained model in the isolated process, since its files are somebody else's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from attnbench.errors import CannotCreate, StoreError, Unsupported, UsageError
from attnbench.harness.outside.isolation import CellFailed, Settings, Worker
from attnbench.harness.wire.process import memory_limit
from attnbench.harness.wire.protocol import Request
from attnbench.measure.memory import out_of_memory
from attnbench.measure.status import Status
from attnbench.models.pretrained.capture import Captured, Wish, capture
from attnbench.models.pretrained.models import open_model


@dataclass(frozen=True, slots=True)
class TakeCapture(Request[Captured]):
    """Capture of a model's layers (:func:`attnbench.models.pretrained.capture.capture`) in a file."""

    refusals: ClassVar = (UsageError, Unsupported, CannotCreate, StoreError)
    model: str
    text: Path | None
    length: int | None
    """Tokens of a window; None for the model's default."""
    wish: Wish
    out: Path
    device: str

    def found(self, tell: object = None) -> Captured:
        """The worker's side. Raises as :func:`open_model` and :func:`capture`."""
        try:
            subject, windows = open_model(self.model, self.length, self.text, gates=self.wish.gates)
            return capture(subject, windows, self.wish, self.out, self.device)
        except Exception as error:
            if short := out_of_memory(error):
                raise UsageError(f"{self.model}: {short}; close other programs, or take a shorter --length") from error
            raise


def take_capture(request: TakeCapture, threads: int) -> Captured:
    """Carry a capture out in a process of its own.

    Raises as :func:`open_model` and :func:`capture`; Unsupported if the model ends the process, and CellFailed with the
    traceback for an unforeseen error.
    """
    settings = Settings(request.device, threads, "as-shipped", memory_limit(request.device), dtypes=(), rates=False)
    with Worker(settings) as worker:
        try:
            return request.ask(worker, math.inf)
        except CellFailed as failed:
            if failed.status is Status.ERROR:
                raise
            raise Unsupported(f"{request.model}: {failed.reason}") from None
