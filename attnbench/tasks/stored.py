"""Tasks with as many examples as are stored, and in which order a training sees them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnbench.errors import Unsupported
from attnbench.task import Examples, Form, Split, stream_seed


class Part(Protocol):
    """The examples of one split."""

    def __len__(self) -> int: ...

    def take(self, rows: Tensor) -> Examples:
        """Those at ``rows``, int64 ``(B,)``."""
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
        """Some of them."""
        return Images(self._tokens[rows], self._labels[rows])


class Stored:
    """A task that reads its examples, at the first question about them; a subclass says how by :meth:`read`.

    Each epoch of a training is a permutation of all examples, drawn from its seed and the epoch's number, so that the
    number of a step alone says what it sees.
    """

    def __init__(self, name: str, form: Form, *, masked_share: float) -> None:
        self.form = form
        self.masked_share = masked_share
        self._name = name

    def read(self) -> dict[Literal["train", "validation", "test"], Part]:
        """All examples.

        Raises:
            UsageError: a damaged file.
        """
        raise NotImplementedError

    def files(self) -> Iterable[Path]:
        """All that :meth:`read` reads; none where the data is shipped. A run that has others is another run."""
        return ()

    def digest_read(self) -> str:
        """Sixteen hex digits of the bytes that :meth:`read` reads."""
        raise NotImplementedError

    @cached_property
    def _parts(self) -> dict[Literal["train", "validation", "test"], Part]:
        return self.read()

    @cached_property
    def train_examples(self) -> int | None:
        """Read to be counted."""
        return len(self._parts["train"])

    @cached_property
    def test_examples(self) -> int:
        """Read to be counted."""
        return len(self._parts["test"])

    @cached_property
    def digest(self) -> str:
        """Of the files as they are when it is first asked."""
        return self.digest_read()

    def batch(self, seed: int, step: int, size: int) -> Examples:
        """A batch at the end of an epoch goes on with the beginning of the next."""
        train = self._parts["train"]
        epoch, start = divmod(step * size, len(train))
        rows = torch.empty(0, dtype=torch.int64)
        while len(rows) < size:
            rows = torch.cat([rows, _epoch(self._name, len(train), seed, epoch)[start : start + size - len(rows)]])
            epoch, start = epoch + 1, 0
        return train.take(rows)

    def held_out(self, split: Split, size: int) -> Iterator[Examples]:
        """In the order in which they are stored."""
        part = self._parts[split]
        for rows in torch.split(torch.arange(len(part)), size):
            yield part.take(rows)

    def fresh(self, seed: int, size: int) -> Iterator[Examples] | None:
        """None: there are no others."""
        return None


@lru_cache(maxsize=4)
def _epoch(name: str, count: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(stream_seed(name, "train", seed, epoch))
    return torch.randperm(count, generator=generator)


def fixed_order(name: str, count: int) -> NDArray[np.int64]:
    """A permutation that is the same for ever: by it examples are divided into splits."""
    generator = torch.Generator().manual_seed(stream_seed(name, "splits"))
    order: NDArray[np.int64] = torch.randperm(count, generator=generator).numpy()
    return order


def present(folder: str, needed: Iterable[str], get: str) -> Path:
    """The folder, relative to the working directory, in which each of ``needed`` is there.

    Args:
        get: where to get it, as advice: ``get X from URL``.

    Raises:
        Unsupported: it is not there.
    """
    root = Path(folder).expanduser()
    for name in needed:
        if not (root / name).exists():
            raise Unsupported(f"no {root / name if root.is_dir() else root} here; {get}")
    return root


def digest_of(pieces: Iterable[bytes | memoryview]) -> str:
    """Sixteen hex digits."""
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(piece)
    return whole.hexdigest()[:16]


def blocks(path: Path) -> Iterator[bytes]:
    """What a file holds, a mebibyte at a time."""
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block
