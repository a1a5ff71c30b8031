"""Does one paper cite the other? The retrieval task of the Long Range Arena.

Source: Radev et al. 2013, "The ACL Anthology Network Corpus". Tay et al. 2020, arXiv:2011.04006, section 2.2.3, made it
a task of bytes in two towers.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.tasks.stored import SplitExamples, Stored, padded, present
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import Examples, Form, register_task
from attnbench.errors import UsageError

_GET = (
    "get lra_release.gz from https://github.com/google-research/long-range-arena, unpack it and "
    "write retrieval:folder=PATH"
)
_FILES = ("new_aan_pairs.train.tsv", "new_aan_pairs.eval.tsv", "new_aan_pairs.test.tsv")
_MOST_BYTES = 10_000
_COLUMNS = 5


@register_task(
    "retrieval",
    source="Radev et al. 2013, ACL Anthology Network; Tay et al. 2020, arXiv:2011.04006, section 2.2.3",
    licence="of the papers' authors; their texts may not be redistributed",
)
class Retrieval(Stored):
    """Does one of these two papers cite the other? Needs the files.

    The model has two towers: each text is read alone, as bytes whose id is the byte + 1. At most 10,000 bytes and at
    most n are taken, padded at the end. An empty text becomes one token of padding. The files stay where they are and
    are mapped into memory, since they are gigabytes in size. Guessing gives 0.5.

    Raises:
        UsageError: a file is empty, or a line has not five columns or a label other than 0 and 1.
        Unsupported: the files are missing, or it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        folder: Annotated[str, Field(min_length=1, description="new_aan_pairs.{train,eval,test}.tsv as released")] = (
            "data/tsv_data"
        ),
    ) -> None:
        super().__init__("retrieval", shape, Form(vocab=(257,), classes=2, towers=2), masked_share=0.15)
        self._folder = present(folder, _FILES, _GET)
        self._n = shape.seq_len

    def read(self) -> Sequence[SplitExamples]:
        return [_DocumentPairs(file, self._n) for file in self.files()]

    def files(self) -> list[Path]:
        return [self._folder / name for name in _FILES]


class _DocumentPairs:
    """The lines of one file. ``csv`` cannot read them: running text has fields that are longer than it allows."""

    def __init__(self, file: Path, n: int) -> None:
        if not file.stat().st_size:
            raise UsageError(f"{file}:1: no line; unpack the archive again")
        with file.open("rb") as opened:
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._most = min(n, _MOST_BYTES)
        self._n = n
        labels, texts = _lines(file, self._map)
        self._labels = np.frombuffer(labels, dtype=np.int64)
        self._texts = np.frombuffer(texts, dtype=np.int64).reshape(-1, 2, 2)
        """Start and end of the two texts of each line."""

    def __len__(self) -> int:
        return len(self._labels)

    def take(self, rows: Tensor) -> Examples:
        at = rows.numpy()
        texts = [self._text(start, end) for start, end in self._texts[at].reshape(-1, 2).tolist()]
        tokens, mask = padded(texts, self._n, first_id=1)
        mask[:, 0] = True  # in a text without bytes too: a softmax over nothing is NaN
        shape = (len(at), 2, self._n)
        return Examples(tokens.view(shape), torch.from_numpy(self._labels[at].copy()), mask.view(shape))

    def _text(self, start: int, end: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._map[start : min(end, start + self._most)], dtype=np.uint8)


def _lines(file: Path, content: mmap.mmap) -> tuple[array[int], array[int]]:
    """Label of each line, and start and end of its two texts, one after another. Raises UsageError."""
    labels, texts = array("q"), array("q")
    start = number = 0
    while start < len(content):
        number += 1
        found = content.find(b"\n", start)
        following = len(content) if found < 0 else found + 1
        line = content[start:following].rstrip(b"\r\n")
        columns = line.split(b"\t")
        if len(columns) != _COLUMNS:
            raise UsageError(f"{file}:{number}: {len(columns)} columns, not {_COLUMNS}; unpack the archive again")
        if columns[0] not in (b"0.0", b"1.0", b"0", b"1"):
            label = columns[0][:20].decode(errors="replace")
            raise UsageError(f"{file}:{number}: the label {label!r} is neither 0.0 nor 1.0; unpack the archive again")
        end = start + len(line)
        middle = end - len(columns[4])
        labels.append(int(float(columns[0])))
        texts.extend((middle - 1 - len(columns[3]), middle - 1, middle, end))
        start = following
    return labels, texts
