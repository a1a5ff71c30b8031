"""Real images, small enough to be shipped.

``data/digits.csv.gz`` is the unchanged file from scikit-learn 1.9.1 (``sklearn/datasets/data``), a copy of the test set
of "Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak 1998, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, licence CC BY 4.0. Each line is an image: 64 grey levels from 0 to 16, row by row, then
the digit.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attnbench.catalogue.tasks.stored import Images, SplitExamples, Stored, blocks, digest_of, fixed_order
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import Form, register_task

DIGITS = Path(__file__).parent / "data" / "digits.csv.gz"

_LEVELS = 17
_PIXELS = 64
_TRAIN, _VALIDATION = 1100, 200


@register_task(
    "digits",
    source="Optical Recognition of Handwritten Digits, Alpaydin & Kaynak 1998, UCI, doi.org/10.24432/C50P49",
    licence="CC BY 4.0",
)
class Digits(Stored):
    """Which digit is this? 1,797 scanned 8 x 8 images; shipped.

    Each pixel is one token with 17 grey levels, row by row. 1,100 images are to train on, 200 for validation, 497 to
    test on; this random division never changes. The task tells a model that mixes tokens from one that does not, but
    hardly one mixing from another: the standard error over 497 images is 1.5 points at 0.88. Guessing gives 0.1.

    Raises:
        Unsupported: the length is not 64, or it is cross-attention.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__("digits", shape, Form(vocab=(_LEVELS,), classes=10), masked_share=0.5, pixels=_PIXELS)

    def read(self) -> Sequence[SplitExamples]:
        with gzip.open(DIGITS, "rt", encoding="ascii") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
        every = Images(table[:, :_PIXELS], table[:, _PIXELS])
        order = fixed_order("digits", len(every))
        return [every.at(rows) for rows in np.split(order, [_TRAIN, _TRAIN + _VALIDATION])]

    def digest_read(self) -> str:
        return digest_of(blocks(DIGITS))
