"""Stored sequences of different lengths, padded at the end to the one length that a model reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnbench.contract.task import Examples


class Ragged:
    """Sequences kept as bytes: a token takes one byte here, and eight once it is in a batch."""

    def __init__(self, sequences: Sequence[bytes], labels: Sequence[int], n: int, *, first_id: int) -> None:
        """Take sequences of at most ``n`` bytes each; byte 0 gets the id ``first_id``, padding the id 0."""
        self._flat = np.frombuffer(b"".join(sequences), dtype=np.uint8)
        self._starts = np.concatenate([[0], np.cumsum([len(one) for one in sequences], dtype=np.int64)])
        self._labels = np.asarray(labels, dtype=np.int64)
        self._n, self._first_id = n, first_id

    def __len__(self) -> int:
        return len(self._labels)

    def take(self, rows: Tensor) -> Examples:
        at = rows.numpy()
        tokens, mask = padded([self[row] for row in at], self._n, first_id=self._first_id)
        return Examples(tokens, torch.from_numpy(self._labels[at]), mask)

    def __getitem__(self, row: int) -> NDArray[np.uint8]:
        return self._flat[self._starts[row] : self._starts[row + 1]]


def padded(sequences: Sequence[NDArray[np.uint8]], n: int, *, first_id: int) -> tuple[Tensor, Tensor]:
    """Ids as int64 and the bool mask of real tokens, each ``(len(sequences), n)``."""
    tokens = np.zeros((len(sequences), n), dtype=np.int64)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
        row[: len(sequence)] += first_id
    lengths = np.array([len(one) for one in sequences])
    return torch.from_numpy(tokens), torch.from_numpy(np.arange(n) < lengths[:, None])
