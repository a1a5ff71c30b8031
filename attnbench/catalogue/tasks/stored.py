"""Tasks with stored examples, and the order in which a training sees them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnbench.catalogue.tasks.streams import refuse_cross
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import Examples, Form, Split, stream_seed
from attnbench.errors import Unsupported, UsageError
from attnbench.files import expanded


class SplitExamples(Protocol):
    """The examples of one split."""

    def __len__(self) -> int: ...

    def take(self, rows: Tensor) -> Examples:
        """The examples at ``rows``, int64 ``(B,)``."""
        ...


class Images:
    """Sequences of one length: ``tokens`` uint8 ``(S, N)``, ``labels`` any whole numbers ``(S,)``."""

    def __init__(self, tokens: NDArray[np.uint8], labels: NDArray[np.integer]) -> None:
        self._tokens, self._labels = tokens, labels

    def __len__(self) -> int:
        return len(self._labels)

    def take(self, rows: Tensor) -> Examples:
        at = rows.numpy()
        tokens = torch.from_numpy(self._tokens[at].astype(np.int64))
        return Examples(tokens, torch.from_numpy(self._labels[at].astype(np.int64)))

    def at(self, rows: NDArray[np.integer]) -> Images:
        return Images(self._tokens[rows], self._labels[rows])


class Ragged:
    """Sequences of different lengths, padded at the end: a token is one byte here, and eight once it is in a batch."""

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


class Stored:
    """A task that reads its examples when they are first needed; a subclass says how in :meth:`read`.

    UsageError is raised then if they are so few that a split has none.

    Each epoch of a training is a permutation of all examples, drawn from the training's seed and the epoch's number, so
    that a step's number alone decides its examples.
    """

    def __init__(self, name: str, shape: Shape, form: Form, *, masked_share: float, pixels: int | None = None) -> None:
        """Refuse cross-attention and, if all sequences have ``pixels`` tokens, any other length."""
        refuse_cross(name, shape)
        if pixels is not None and shape.seq_len != pixels:
            raise Unsupported(f"{name}: an image has {pixels} pixels; set seq_len to {pixels}, not {shape.seq_len}")
        self.form = form
        self.masked_share = masked_share
        self._name = name

    def read(self) -> Sequence[SplitExamples]:
        """Read all examples to train on, for validation, and to test on. Raises UsageError if a file is damaged."""
        raise NotImplementedError

    def files(self) -> Iterable[Path]:
        """All files that :meth:`read` reads; none if the data is shipped. Other files make another run."""
        return ()

    def digest_read(self) -> str:
        """Sixteen hex digits of the bytes that :meth:`read` reads: here of all files, one after the other."""
        return digest_of(chain.from_iterable(map(blocks, self.files())))

    @cached_property
    def _parts(self) -> dict[str, SplitExamples]:
        parts = dict(zip(("train", "validation", "test"), self.read(), strict=True))
        for split, part in parts.items():
            if not len(part):
                raise UsageError(f"{self._name}: too few examples, of which none is left for {split}; take all files")
        return parts

    @cached_property
    def train_examples(self) -> int | None:
        """Number of examples to train on, which must be read to be counted."""
        return len(self._parts["train"])

    @cached_property
    def test_examples(self) -> int:
        """Number of test examples, which must be read to be counted."""
        return len(self._parts["test"])

    @cached_property
    def digest(self) -> str:
        return self.digest_read()

    def batch(self, seed: int, step: int, size: int) -> Examples:
        """Examples for one step; a batch at the end of an epoch continues with the beginning of the next."""
        train = self._parts["train"]
        epoch, start = divmod(step * size, len(train))
        rows = torch.empty(0, dtype=torch.int64)
        while len(rows) < size:
            rows = torch.cat([rows, _epoch(self._name, len(train), seed, epoch)[start : start + size - len(rows)]])
            epoch, start = epoch + 1, 0
        return train.take(rows)

    def held_out(self, split: Split, size: int) -> Iterator[Examples]:
        part = self._parts[split]
        for rows in torch.split(torch.arange(len(part)), size):
            yield part.take(rows)

    def fresh(self, seed: int, size: int) -> Iterator[Examples] | None:
        return None


@lru_cache(maxsize=4)
def _epoch(name: str, count: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(stream_seed(name, "train", seed, epoch))
    return torch.randperm(count, generator=generator)


def fixed_order(name: str, count: int) -> NDArray[np.int64]:
    """A permutation that never changes, which divides examples into splits."""
    generator = torch.Generator().manual_seed(stream_seed(name, "splits"))
    order: NDArray[np.int64] = torch.randperm(count, generator=generator).numpy()
    return order


def present(folder: str, needed: Iterable[str], get: str) -> Path:
    """The folder, relative to the working directory, if each of ``needed`` is in it.

    Raises Unsupported if one is missing, with ``get``, advice such as ``get X from URL``.
    """
    root = expanded(folder)
    for name in needed:
        if not ((root / name).is_file() or (root / name).is_dir()):  # reading a pipe may take for ever
            raise Unsupported(f"no {root / name if root.is_dir() else root} here; {get}")
    return root


def digest_of(pieces: Iterable[bytes | memoryview]) -> str:
    """Digest of all pieces in order, as sixteen hex digits."""
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(piece)
    return whole.hexdigest()[:16]


def blocks(path: Path) -> Iterator[bytes]:
    """The contents of a file, one mebibyte at a time."""
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block
