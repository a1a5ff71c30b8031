"""The files that a trained model is read from."""

from __future__ import annotations

from pathlib import Path

from attnbench.pretrained.loading import located
from attnbench.pretrained.own_encoder import NAME
from attnbench.tasks.small_encoder import WEIGHTS

_READ = (".json", ".safetensors", ".txt", ".model")
"""Suffixes of what is read of a folder: configuration, weights, and the words of the tokenizer."""


def files_of(name: str) -> list[Path]:
    """Everything that decides what the model of this name computes.

    Raises:
        UsageError: there is no such model.
    """
    if name == NAME:
        return [WEIGHTS]
    place = located(name)
    return [place] if place.is_file() else sorted(file for file in place.iterdir() if file.suffix in _READ)
