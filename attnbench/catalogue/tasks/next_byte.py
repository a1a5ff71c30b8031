"""Real English text, byte by byte: the training data of a language model, as long as it is small.

The text that Python brings repeats itself: a quarter of it stands in two topics or more. A paragraph that is both
trained on and tested on would be remembered, so each is kept once, where it stands first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.tasks.stored import SplitExamples, Stored, digest_of
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import Examples, Form, register_task
from attnbench.errors import Unsupported
from attnbench.files import expanded

_TENTHS = (8, 9)
"""Ends of training and of validation, in tenths of the text."""


@register_task(
    "next-byte",
    source="own; the text is Python's help on its language, pydoc_data.topics",
    licence="PSF-2.0, as Python",
)
class NextByte(Stored):
    """Which byte comes next in English text? Python's help; causal only.

    Windows of n bytes, one after the other. The label at each place is the byte after it, so that test_loss / ln 2 is
    in bits per byte. The last tenth of the text is to test on, the tenth before it for validation. Of paragraphs that
    differ at most in white space only the first is kept, so that none is in two of these parts. Short windows repeat by
    chance: those that are trained on are left out of validation and test.
    The text is another in other versions of Python; data_digest tells them apart. Guessing gives the share of blanks.

    Raises:
        Unsupported: attention is not causal and so sees the answer, the file is missing, the text has no window of its
            own for each part, or it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        file: Annotated[
            str | None, Field(min_length=1, description="a text; none: the help that Python brings")
        ] = None,
    ) -> None:
        super().__init__("next-byte", shape, Form(vocab=(256,), classes=256, per_token=True), masked_share=0.15)
        if not shape.causal:
            raise Unsupported("next-byte predicts the next token; set causal: true")
        self._file = None if file is None else expanded(file)
        if self._file is not None and not self._file.is_file():
            raise Unsupported(f"no {self._file} here; write next-byte:file=PATH with the path of a text, or no file")
        self._n = shape.seq_len

    def read(self) -> Sequence[SplitExamples]:
        parts = [ByteWindows(part, self._n) for part in divided(self._text())]
        for part in parts:
            if not len(part):
                raise Unsupported(f"next-byte: the text is too short for windows of {self._n} bytes; lower seq_len")
        for part in parts[1:]:
            part.leave_out(parts[0])
            if not len(part):
                raise Unsupported(f"next-byte: the text repeats all windows of {self._n} bytes; raise seq_len")
        return parts

    def files(self) -> list[Path]:
        return [] if self._file is None else [self._file]

    def digest_read(self) -> str:
        """Digest of the whole text, before anything is left out."""
        return digest_of([self._text()])

    def _text(self) -> bytes:
        return help_of_python().encode() if self._file is None else self._file.read_bytes()


class ByteWindows:
    """A text in windows of n bytes, each with the byte after each; the rest at the end is dropped."""

    def __init__(self, text: bytes, n: int) -> None:
        self._text, self._n, self._starts = text, n, np.arange(0, len(text) - n, n)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[bytes]:
        return (self._text[at : at + self._n] for at in self._starts)

    def leave_out(self, others: ByteWindows) -> None:
        repeated = set(self).intersection(others)
        self._starts = self._starts[[one not in repeated for one in self]]

    def take(self, rows: Tensor) -> Examples:
        at = self._starts[rows.numpy()][:, None] + np.arange(self._n)
        whole = np.frombuffer(self._text, dtype=np.uint8)
        tokens, labels = (torch.from_numpy(whole[places].astype(np.int64)) for places in (at, at + 1))
        return Examples(tokens, labels)


def divided(text: bytes) -> list[bytes]:
    """The parts for training, validation and test: whole paragraphs in order, only the first of equal ones."""
    first: dict[bytes, bytes] = {}
    for paragraph in text.split(b"\n\n"):
        first.setdefault(b" ".join(paragraph.split()), paragraph)
    first.pop(b"", None)
    paragraphs = [paragraph + b"\n\n" for paragraph in first.values()]
    ends = np.cumsum([len(paragraph) for paragraph in paragraphs])
    cuts = [int((10 * ends <= tenths * ends[-1:].sum()).sum()) for tenths in _TENTHS]
    return [b"".join(paragraphs[start:stop]) for start, stop in pairwise([0, *cuts, len(paragraphs)])]


def help_of_python() -> str:
    """The help on Python's keywords and types, some 450 kB of English. Raises Unsupported if Python lacks it."""
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError:
        raise Unsupported("this Python comes without pydoc_data, the text; write next-byte:file=PATH") from None
    return "\n\n".join(topics[name] for name in sorted(topics))
