"""Grey photographs read pixel by pixel: the image task of the Long Range Arena.

Source: Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images" (CIFAR-10), binary version. Tay et al.
2020, arXiv:2011.04006, section 2.2.4, made it a task of grey pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from attnbench.catalogue.tasks.stored import Images, SplitExamples, Stored, present
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import Form, register_task
from attnbench.errors import UsageError

_GET = (
    "get cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html, unpack it and write image:folder=PATH"
)
_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = "test_batch.bin"
_PIXELS = 1024
_RECORD = 1 + 3 * _PIXELS


@register_task(
    "image",
    source="Krizhevsky 2009, CIFAR-10; Tay et al. 2020, arXiv:2011.04006, section 2.2.4",
    licence="none stated; cite the report",
)
class Image(Stored):
    """What does this 32 x 32 photograph show? Grey CIFAR-10; needs the files.

    Each pixel is one token, row by row: 0.299 red + 0.587 green + 0.114 blue, rounded down. The last tenth of the
    50,000 images to train on is for validation. Black pixels count as pixels: nothing is masked. Guessing gives 0.1.

    Raises:
        UsageError: a file does not consist of whole records, or a label is above 9.
        Unsupported: the length is not 1024, the files are missing, or it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        folder: Annotated[str, Field(min_length=1, description="data_batch_{1..5}.bin and test_batch.bin")] = (
            "data/cifar-10-batches-bin"
        ),
    ) -> None:
        super().__init__("image", shape, Form(vocab=(256,), classes=10), masked_share=0.5, pixels=_PIXELS)
        self._folder = present(folder, (*_TRAIN, _TEST), _GET)

    def read(self) -> Sequence[SplitExamples]:
        batches = [_grey(self._folder / name) for name in _TRAIN]
        given = Images(np.concatenate([grey for grey, _ in batches]), np.concatenate([labels for _, labels in batches]))
        last = np.arange(len(given)) >= len(given) * 9 // 10
        test = Images(*_grey(self._folder / _TEST))
        return given.at(np.flatnonzero(~last)), given.at(np.flatnonzero(last)), test

    def files(self) -> list[Path]:
        return [self._folder / name for name in (*_TRAIN, _TEST)]


def _grey(file: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pixels ``(S, 1024)`` and labels ``(S,)`` from a file of the binary version."""
    whole = np.fromfile(file, dtype=np.uint8)
    count, rest = divmod(len(whole), _RECORD)
    if rest or not count:
        raise UsageError(f"{file}: record {count} has {rest} of {_RECORD} bytes; unpack the archive again")
    records = whole.reshape(count, _RECORD)
    labels = records[:, 0].copy()
    for wrong in np.flatnonzero(labels > 9)[:1]:
        raise UsageError(f"{file}: record {wrong} has the label {labels[wrong]}, above 9; unpack the archive again")
    grey = np.zeros((count, _PIXELS), dtype=np.uint32)  # in whole numbers, so that three times 255 gives 255
    for weight, plane in zip((299, 587, 114), np.split(records[:, 1:], 3, axis=1), strict=True):
        grey += weight * plane.astype(np.uint32)
    return (grey // 1000).astype(np.uint8), labels
