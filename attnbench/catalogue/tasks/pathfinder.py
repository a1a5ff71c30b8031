"""Are two dots joined by a dashed line? The Pathfinder task of the Long Range Arena.

Source: Linsley et al. 2018, arXiv:1805.08315. Tay et al. 2020, arXiv:2011.04006, section 2.2.5, made it a task of
pixels.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from attnbench.catalogue.tasks.stored import Images, SplitExamples, Stored, digest_of, fixed_order, present
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import Form, register_task
from attnbench.errors import UsageError

_GET = (
    "get lra_release.gz from https://github.com/google-research/long-range-arena, unpack it and "
    "write pathfinder:folder=PATH"
)
_SIDE = 32
_PIXELS = _SIDE * _SIDE


@register_task(
    "pathfinder",
    source="Linsley et al. 2018, arXiv:1805.08315; Tay et al. 2020, arXiv:2011.04006, section 2.2.5",
    licence="none stated; cite the papers",
)
class Pathfinder(Stored):
    """Does a dashed line join the two dots? Images; needs the files.

    Each pixel is one token with 256 grey levels, row by row. The default is the hard set of 200,000 images. They are
    sorted by number, shuffled in an order that never changes, and divided into 80, 10 and 10 %: no division was
    released. An image whose file is empty is left out; the easy set has one. Black pixels count as pixels: nothing is
    masked, while the Long Range Arena masked them. Guessing gives 0.5.

    Raises:
        UsageError: an image or a line is damaged.
        Unsupported: the length is not 1024, the folder is missing, or it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        folder: Annotated[str, Field(min_length=1, description="imgs/<k>/sample_<i>.png and metadata/<k>.npy")] = (
            "data/lra_release/pathfinder32/curv_contour_length_14"
        ),
    ) -> None:
        super().__init__("pathfinder", shape, Form(vocab=(256,), classes=2), masked_share=0.5, pixels=_PIXELS)
        self._folder = present(folder, ("imgs", "metadata"), _GET)

    def read(self) -> Sequence[SplitExamples]:
        listed = _listed(self._folder)
        pixels = np.empty((len(listed), _PIXELS), dtype=np.uint8)
        kept = [place for place, image in enumerate(listed) if _decode(image.file, pixels[place])]
        every = Images(pixels, np.array([image.label for image in listed], dtype=np.uint8))
        order = np.array(kept, dtype=np.int64)[fixed_order("pathfinder", len(kept))]
        return [every.at(rows) for rows in np.split(order, [len(kept) * 8 // 10, len(kept) * 9 // 10])]

    def files(self) -> list[Path]:
        return [*sorted((self._folder / "metadata").glob("*.npy")), *(image.file for image in _listed(self._folder))]

    def digest_read(self) -> str:
        return digest_of(
            piece
            for image in _listed(self._folder)
            for piece in (f"{image.number} {image.label} ".encode(), image.file.read_bytes())
        )


class _Listed(NamedTuple):
    number: tuple[int, int]
    """Numbers of the metadata file and of the image in it."""
    file: Path
    label: int


def _listed(folder: Path) -> list[_Listed]:
    """The images that the metadata lists, by number. Its files are text, in spite of their names."""
    files = [file for file in (folder / "metadata").iterdir() if file.suffix == ".npy" and file.stem.isdigit()]
    images = [image for file in files for image in _lines(folder, file)]
    if not images:
        raise UsageError(f"{folder / 'metadata'}: no image is listed in <k>.npy; unpack the archive again")
    return sorted(images)


def _lines(folder: Path, file: Path) -> list[_Listed]:
    images = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        fields = line.split()
        if len(fields) < 4:
            raise UsageError(f"{file}:{number}: {len(fields)} fields, fewer than 4; unpack the archive again")
        at, name, place, label = fields[:4]
        if label not in ("0", "1") or not place.isdecimal():
            raise UsageError(f"{file}:{number}: no number and label 0 or 1 in fields 3 and 4; unpack the archive again")
        images.append(_Listed((int(file.stem), int(place)), folder / at / name, int(label)))
    return images


def _decode(file: Path, pixels: NDArray[np.uint8]) -> bool:
    """Write the image into ``pixels`` ``(1024,)``; False if the file is empty. Raises UsageError if it is damaged."""
    from PIL import Image

    try:
        content = file.read_bytes()
        if not content:
            return False
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if image.size != (_SIDE, _SIDE):
                width, height = image.size
                raise UsageError(f"{file}: {width} x {height} pixels, not {_SIDE} x {_SIDE}; name another folder")
            pixels[:] = np.asarray(image.convert("L")).reshape(-1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # Pillow raises all of these
        raise UsageError(f"{file}: not a readable image ({error}); unpack the archive again") from None
    return True
