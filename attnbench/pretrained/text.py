"""A file of text as windows of tokens for a language model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from attnbench.errors import UsageError
from attnbench.pretrained.windows import Windows
from attnbench.task import NO_LABEL, stream_seed
from attnbench.tasks.next_byte import help_of_python

Aim = Literal["next", "masked", "none"]
_HELD_OUT = 10
"""The last tenth of the text is never trained on. Random windows would overlap with those of the training."""
_MASKED = 0.15


@dataclass(frozen=True, slots=True)
class Around:
    """What a model wants around and inside its windows."""

    aim: Aim
    """What is asked for: the ``next`` token, the ``masked`` ones, or nothing."""
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    """Tokens that begin and end each window."""
    mask: int | None = None
    """The token that stands for a masked one."""


class TokenText:
    """Consecutive windows of one text: the last tenth is held out, the rest is trained on.

    Raises:
        UsageError: the text has too few tokens for one window of each part.
    """

    def __init__(self, name: str, tokens: Sequence[int], length: int, around: Around) -> None:
        self.name, self.length = name, length
        self._around = around
        self._inside = length - len(around.first) - len(around.last)
        if self._inside < 1:
            raise UsageError(f"--length {length}: no room beside the model's special tokens")
        ids = torch.tensor(tokens, dtype=torch.int64)
        cut = len(ids) - len(ids) // _HELD_OUT
        self._train, self._held = (self._cut(part) for part in (ids[:cut], ids[cut:]))
        if not len(self._train) or not len(self._held):
            raise UsageError(
                f"{name}: {len(ids)} tokens are too few for windows of {length}, of which the last tenth is held out"
            )
        self.most: int | None = len(self._held)
        said = f"{around} {length} ".encode()
        self.digest = hashlib.sha256(said + ids.numpy().tobytes()).hexdigest()[:16]

    def _cut(self, ids: Tensor) -> Tensor:
        return ids[: len(ids) // self._inside * self._inside].view(-1, self._inside)

    def held_out(self, count: int) -> Windows:
        if count > len(self._held):
            raise UsageError(f"{self.name}: {len(self._held)} windows are held out, fewer than {count}; take fewer")
        # Spread over the whole part, so that a few windows are not all of one page.
        rows = torch.arange(count) * len(self._held) // count
        return self._windows(self._held[rows], [stream_seed("masked", "held out", int(row)) for row in rows])

    def batch(self, seed: int, step: int, size: int) -> Windows:
        first = step * size
        rows = [self._row(seed, place) for place in range(first, first + size)]
        seeds = [stream_seed("masked", "train", seed, place) for place in range(first, first + size)]
        return self._windows(self._train[rows], seeds)

    def _row(self, seed: int, place: int) -> int:
        epoch, within = divmod(place, len(self._train))
        return int(_epoch(len(self._train), seed, epoch)[within])

    def _windows(self, inside: Tensor, seeds: Sequence[int]) -> Windows:
        W, around = len(inside), self._around
        ends = [torch.tensor(part, dtype=torch.int64).expand(W, -1) for part in (around.first, around.last)]
        whole = torch.cat([ends[0], inside, ends[1]], 1)
        targets = torch.full_like(whole, NO_LABEL)
        if around.aim == "next":
            targets[:, :-1] = whole[:, 1:]
        elif around.aim == "masked":
            assert around.mask is not None
            start = len(around.first)
            hidden = torch.zeros_like(whole, dtype=torch.bool)
            for row, seed in enumerate(seeds):
                drawn = torch.rand(self._inside, generator=torch.Generator().manual_seed(seed))
                hidden[row, start + drawn.topk(max(1, round(_MASKED * self._inside))).indices] = True
            targets = torch.where(hidden, whole, targets)
            whole = whole.masked_fill(hidden, around.mask)
        return Windows(whole, targets)


@lru_cache(maxsize=4)
def _epoch(count: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(stream_seed("pretrained text", seed, epoch))
    return torch.randperm(count, generator=generator)


def words_of(file: Path | None) -> tuple[str, str]:
    """Name and content of a file of text; without one, of the help on Python's keywords, which Python brings.

    Raises:
        UsageError: the file cannot be read as text.
    """
    if file is None:
        return "pydoc_data.topics", help_of_python()
    if file.exists() and not file.is_file():  # a pipe or a device may never end
        raise UsageError(f"--text {file}: not a file; give a file of text")
    try:
        return str(file), file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {file}: cannot be read as UTF-8 text ({error}); give another file") from None
