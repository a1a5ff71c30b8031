"""The checkpoint of a training, to go on bit for bit: weights, optimizer, random numbers, and its progress."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from attnbench.files import remove_unfinished, replace_file

FORMAT = 3


class Checkpoint:
    """One file, replaced as a whole: a digest of the rest, and tensors and plain data as torch saves them.

    It belongs to one cell, one torch, one state of the data.
    """

    def __init__(self, path: Path, owner: Mapping[str, str], *, keep: bool = False) -> None:
        """``keep``: also of the last step, and for other tests of this training."""
        self.path, self._owner = path, {**owner, "torch": str(torch.__version__), "format": str(FORMAT)}
        self.keep = keep
        self.trouble = ""
        """Why it could not be written or read, for the row."""

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the file. A full disk costs the checkpoint, not the training."""
        file = BytesIO()
        torch.save({"owner": self._owner, **state}, file)
        content = file.getvalue()
        try:
            self.path.parent.mkdir(exist_ok=True)
            replace_file(self.path, _digest(content) + content)
        except OSError as error:
            self.trouble = f"no checkpoint could be written: {error.strerror}"

    def load(self) -> dict[str, Any] | None:
        """The saved state; None without a file that fits."""
        if not self.path.is_file():
            return None
        try:
            content = self.path.read_bytes()
            digest, content = content[: len(_digest(b""))], content[len(_digest(b"")) :]
            if digest != _digest(content):
                raise ValueError("not as it was written")
            state: dict[str, Any] = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
            return state if state.pop("owner") == self._owner else None
        except (OSError, UnpicklingError, ValueError):
            self.trouble = "its checkpoint was damaged, so it began anew"
            return None

    def remove(self) -> None:
        """Remove the file and the remains of a killed training, once the row is there; unless it is to be kept."""
        if self.keep:
            return
        with suppress(OSError):
            self.path.unlink()
        remove_unfinished(self.path)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
