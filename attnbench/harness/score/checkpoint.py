"""The checkpoint of a training, to go on bit for bit: weights, optimizer, random numbers, and its progress."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from attnbench.files import remove_unfinished, replace_file

FORMAT = 2


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Tensors by name, and the rest as plain data."""

    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]


class Checkpoint:
    """One file, replaced as a whole: a digest of the rest, a line of JSON, and tensors as in safetensors.

    It belongs to one cell, one torch, one state of the data.
    """

    def __init__(self, path: Path, owner: Mapping[str, str], *, keep: bool = False) -> None:
        """``keep``: also of the last step, and for other tests of this training."""
        self.path, self._owner = path, {**owner, "torch": torch.__version__, "format": str(FORMAT)}
        self.keep = keep
        self.trouble = ""
        """Why it could not be written or read, for the row."""

    def save(self, state: TrainingState) -> None:
        """Write the file. A full disk costs the checkpoint, not the training."""
        about = json.dumps({"owner": self._owner, **state.about}).encode()
        content = about + b"\n" + save({n: t.contiguous() for n, t in state.tensors.items()})
        try:
            self.path.parent.mkdir(exist_ok=True)
            replace_file(self.path, _digest(content) + content)
        except OSError as error:
            self.trouble = f"no checkpoint could be written: {error.strerror}"

    def load(self) -> TrainingState | None:
        """The saved state; None without a file that fits."""
        if not self.path.is_file():
            return None
        try:
            content = self.path.read_bytes()
            digest, content = content[: len(_digest(b""))], content[len(_digest(b"")) :]
            if digest != _digest(content):
                raise ValueError("not as it was written")
            line, _, tensors = content.partition(b"\n")
            about = json.loads(line)
            return TrainingState(load(tensors), about) if about.pop("owner") == self._owner else None
        except (OSError, SafetensorError, ValueError):
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
