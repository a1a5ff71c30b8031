"""ListOps as a task: from the generator in :mod:`attnbench.catalogue.tasks.listops`, or the files of the Long Range
Arena."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Generator, Tensor

from attnbench.catalogue.tasks.listops import TOKENS, ListOps, evaluate, labelled
from attnbench.catalogue.tasks.stored import Ragged, SplitExamples, Stored, present
from attnbench.catalogue.tasks.streams import Stream, refuse_cross
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import Examples, Form, Task, register_task
from attnbench.errors import Unsupported, UsageError

_MASKED_SHARE = 0.1
_ID = {word: position for position, word in enumerate(TOKENS)}
_FILES = ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv")
_GET = "get lra_release.gz from https://github.com/google-research/long-range-arena and write listops:folder=PATH"


@register_task("listops", source="Nangia & Bowman 2018, arXiv:1804.06028; rules of Tay et al. 2020, arXiv:2011.04006")
def listops(
    shape: Shape,
    *,
    min_length: Annotated[int, Field(ge=4, le=1_000_000, description="fewest tokens of a tree")] = 501,
    max_length: Annotated[int, Field(ge=4, le=1_000_000, description="most tokens of a tree")] = 1999,
    labels: Annotated[
        Literal["root", "brackets"], Field(description="the value of the whole tree, or of each part at its ]")
    ] = "root",
    folder: Annotated[
        str, Field(description="folder of basic_{train,val,test}.tsv as released; empty: the generator")
    ] = "",
    test: Annotated[int, Field(ge=1, le=100_000, description="trees to test on; for the generator only")] = 512,
) -> Task:
    """What is the value of [MAX 2 9 [MIN 4 7 ] 0 ]? Nested lists of digits.

    Values are 0 to 9; by the rules of the Long Range Arena the most frequent one has about 17.5 % of all trees. Trees
    are padded at the end to n, which must be at least the longest tree's length. The generator draws without end; it
    replaces a tree that is in the validation or the test set, as short ones may be. ``folder`` takes the released files
    instead: their lengths stay as they are, round brackets are left out, and a tree longer than n is refused, since its
    beginning has no value.

    Raises:
        UsageError: no tree has such a length, or a file is damaged.
        Unsupported: n is below the longest tree, the files are missing, or it is cross-attention.
    """
    refuse_cross("listops", shape)
    if folder:
        return _Released(shape, folder, brackets=labels == "brackets")
    if max_length > shape.seq_len:
        raise Unsupported(
            f"listops: trees of up to {max_length} tokens do not fit into {shape.seq_len}; "
            f"write listops:min_length=...,max_length={shape.seq_len}"
        )
    try:
        trees = ListOps(min_length=min_length, max_length=max_length)
    except ValueError:
        raise UsageError(f"listops: no tree has {min_length} to {max_length} tokens; widen the lengths") from None
    return _ListOpsStream(shape, trees, brackets=labels == "brackets", test=test)


def _form(brackets: bool) -> Form:
    return Form(vocab=(len(TOKENS),), classes=10, per_token=brackets)


class _ListOpsStream(Stream):
    def __init__(self, shape: Shape, trees: ListOps, *, brackets: bool, test: int) -> None:
        super().__init__(
            "listops",
            shape,
            _form(brackets),
            settings={
                "min_length": trees.min_length,
                "max_length": trees.max_length,
                "labels": "brackets" if brackets else "root",
            },
            test=test,
            masked_share=_MASKED_SHARE,
        )
        self._trees, self._kind = trees, _AtBrackets if brackets else Ragged

    def draw(self, count: int, generator: Generator) -> Examples:
        rng = random.Random(int(torch.randint(2**62, (), generator=generator)))
        sequences = [bytes(self._trees.sample(rng)) for _ in range(count)]
        values = [evaluate(list(one)) for one in sequences]
        return self._kind(sequences, values, self.n, first_id=0).take(torch.arange(count))


class _Released(Stored):
    def __init__(self, shape: Shape, folder: str, *, brackets: bool) -> None:
        super().__init__("listops", shape, _form(brackets), masked_share=_MASKED_SHARE)
        self._folder = present(folder, _FILES, _GET)
        self._n, self._kind = shape.seq_len, _AtBrackets if brackets else Ragged

    def read(self) -> Sequence[SplitExamples]:
        return [self._part(file) for file in self.files()]

    def files(self) -> list[Path]:
        return [self._folder / name for name in _FILES]

    def _part(self, file: Path) -> SplitExamples:
        sequences, labels = zip(*_lines(file, self._n), strict=True)
        return self._kind(sequences, labels, self._n, first_id=0)


class _AtBrackets(Ragged):
    """Trees with the value of each part at its closing bracket."""

    def take(self, rows: Tensor) -> Examples:
        return labelled([self[row].tolist() for row in rows.tolist()], self._n)


def _lines(file: Path, n: int) -> Iterator[tuple[bytes, int]]:
    """Ids and value of each tree in a released file. Raises UsageError: a line is not a tree and its value. Raises
    Unsupported: a tree is longer than ``n``."""
    empty = True
    with file.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        if next(lines, "").split() != ["Source", "Target"]:
            raise UsageError(f"{file}:1: not the header Source, Target; unpack the file again")
        for number, line in enumerate(lines, start=2):
            text, tab, target = line.rstrip("\r\n").partition("\t")
            try:
                tokens = bytes([_ID[word] for word in text.split() if word not in ("(", ")")])
                value = evaluate(list(tokens))
            except KeyError as error:
                raise UsageError(f"{file}:{number}: {error} is no word of ListOps; unpack the file again") from None
            except ValueError:
                raise UsageError(f"{file}:{number}: not one whole tree; unpack the file again") from None
            if not tab or target.strip() != str(value):
                raise UsageError(
                    f"{file}:{number}: the tree has the value {value}, not {target.strip()!r}; unpack the file again"
                )
            if len(tokens) > n:
                raise Unsupported(f"{file}:{number}: a tree of {len(tokens)} tokens; set seq_len to 2000, not {n}")
            empty = False
            yield tokens, value
    if empty:
        raise UsageError(f"{file}:2: no tree; unpack the file again")
