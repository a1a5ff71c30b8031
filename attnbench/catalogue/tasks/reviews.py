"""Sentiment of reviews, read byte by byte: the text task of the Long Range Arena.

Source: Maas et al. 2011, "Learning Word Vectors for Sentiment Analysis" (IMDb). Tay et al. 2020, arXiv:2011.04006,
section 2.2.2, made it a task of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from attnbench.catalogue.tasks.stored import Ragged, SplitExamples, Stored, digest_of, fixed_order, present
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import Form, register_task
from attnbench.errors import UsageError

_GET = "get aclImdb_v1.tar.gz from https://ai.stanford.edu/~amaas/data/sentiment/, unpack it and write text:folder=PATH"
_FOLDERS = tuple(f"{split}/{side}" for split in ("train", "test") for side in ("neg", "pos"))
_NAME = re.compile(r"(\d+)_(\d+)\.txt")


@register_task(
    "text",
    source="Maas et al. 2011, IMDb; Tay et al. 2020, arXiv:2011.04006, section 2.2.2",
    licence="none stated; cite the paper",
)
class Reviews(Stored):
    """Is this film review good or bad? Bytes of IMDb; needs the files.

    The bytes are taken as they are, markup too: at most the first n, padded at the end; the id is the byte + 1. A tenth
    of the 25,000 reviews to train on is held out for validation, chosen at random once and for ever; the Long Range
    Arena validated on the test set. Guessing gives 0.5.

    Raises:
        UsageError: a file has no text, is not in UTF-8, or has a name that does not fit its folder.
        Unsupported: the folder is missing, or it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        folder: Annotated[str, Field(min_length=1, description="{train,test}/{pos,neg}/<id>_<stars>.txt")] = (
            "data/aclImdb"
        ),
    ) -> None:
        super().__init__("text", shape, Form(vocab=(257,), classes=2), masked_share=0.15)
        self._folder = present(folder, _FOLDERS, _GET)
        self._n = shape.seq_len

    def read(self) -> Sequence[SplitExamples]:
        given, test = self._reviews("train"), self._reviews("test")
        order = fixed_order("text", len(given))
        held = len(given) // 10
        train, validation = ([given[at] for at in rows] for rows in (order[held:], order[:held]))
        return [self._part(reviews) for reviews in (train, validation, test)]

    def files(self) -> Iterator[Path]:
        return (self._folder / file for file, _ in self._files())

    def digest_read(self) -> str:
        return digest_of(piece for file, _ in self._files() for piece in (str(file).encode(), self._bytes(file)))

    def _part(self, reviews: list[tuple[bytes, int]]) -> SplitExamples:
        return Ragged([text for text, _ in reviews], [label for _, label in reviews], self._n, first_id=1)

    def _reviews(self, split: str) -> list[tuple[bytes, int]]:
        found = []
        for file, label in self._files():
            if file.parts[0] == split:
                found.append((_checked(self._folder / file, self._bytes(file), label)[: self._n], label))
        if len({label for _, label in found}) < 2:
            raise UsageError(f"{self._folder / split}: not both pos/*.txt and neg/*.txt; unpack the archive again")
        return found

    def _files(self) -> Iterator[tuple[Path, int]]:
        for folder in _FOLDERS:
            names = sorted(file.name for file in (self._folder / folder).iterdir() if file.suffix == ".txt")
            yield from ((Path(folder, name), int(folder.endswith("pos"))) for name in names)

    def _bytes(self, file: Path) -> bytes:
        return (self._folder / file).read_bytes()


def _checked(file: Path, text: bytes, label: int) -> bytes:
    name = _NAME.fullmatch(file.name)
    if name is None:
        raise UsageError(f"{file}: the name is not <id>_<stars>.txt; remove the file")
    stars = int(name[2])
    if not (7 <= stars <= 10 if label else 1 <= stars <= 4):
        raise UsageError(f"{file}: {stars} stars do not belong in {file.parent.name}; unpack the archive again")
    if not text:
        raise UsageError(f"{file}: no text; unpack the archive again")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{file}:{line}: byte {error.start} is not UTF-8; unpack the archive again") from None
    return text
