"""A training put aside, so that it can go on bit for bit: weights, optimizer, random numbers, what it has to tell."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from attnbench.files import replace_file

FORMAT = 1


class Checkpoint:
    """One file, replaced as a whole. It belongs to one cell, one torch, one state of the data."""

    def __init__(self, path: Path, owner: Mapping[str, str]) -> None:
        self.path, self._owner = path, {**owner, "torch": torch.__version__, "format": str(FORMAT)}
        self.trouble = ""
        """Why it could not be written or read, for the row."""

    def save(self, state: Mapping[str, Any]) -> None:
        """A full disk costs the checkpoint, and not the training."""
        try:
            content = io.BytesIO()
            torch.save({"owner": self._owner, **state}, content)
            self.path.parent.mkdir(exist_ok=True)
            replace_file(self.path, content.getvalue())
        except OSError as error:
            self.trouble = f"no checkpoint could be written: {error.strerror}"

    def load(self) -> dict[str, Any] | None:
        """None where there is none that fits, which then is as if there were none."""
        if not self.path.is_file():
            return None
        try:
            # Tensors, numbers and text only: a file of somebody else runs no code.
            state: dict[str, Any] = torch.load(self.path, weights_only=True)
            fits = state["owner"] == self._owner
        except (OSError, RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError):
            self.trouble = "its checkpoint was damaged, so it began anew"
            return None
        return state if fits else None

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()
