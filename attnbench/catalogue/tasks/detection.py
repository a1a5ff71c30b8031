"""Where in an image is the closed frame? Its box is asked for, side by side of the box.

The drawings are our own: a detector of photographs learns the looks of things, and this task asks only for a place.
All coordinates are whole numbers, so that a seed gives the same images on every machine.
"""

from __future__ import annotations

from math import isqrt
from typing import Annotated

import torch
from pydantic import Field
from torch import Generator, Tensor

from attnbench.catalogue.tasks.streams import Stream, choices
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL, Examples, Form, register_task
from attnbench.errors import Unsupported

_PATCH = 2
_IDS = 2 ** (_PATCH * _PATCH)
"""Different patches of black and white pixels."""
_LEAST, _MOST = 5, 8
_CELL = _MOST + 2
"""Least pixels along a side of the cell that a shape has for itself."""
_SIDES = 4
_FILLED, _CROSS, _OPEN, _FRAME = range(4)
"""Kinds of shapes, of which the frame alone has a hole."""
_AT_ONCE = 256


@register_task("detection", source="own; boxes are asked for as in detection of objects, whose images are photographs")
class Detection(Stream):
    """Where is the closed frame among other shapes? Its box is asked for.

    Black and white images of 2·side pixels a row and 2·(side - 1) rows, where n = side². Each has one closed frame and
    some distractors: filled boxes, crosses, and with ``open_frames`` also frames open on one side, which look like it
    piece by piece. All are 5 to 8 pixels wide and high and do not
    touch. A token is a patch of 2 x 2 pixels, row by row. The last row of tokens holds four questions: the column of
    patches in which the frame's left and right sides are, and the row in which its top and bottom are. The labels are
    there; the places after them are blank. A question sees nothing by itself, so that a model that does not mix tokens
    gives each the same answer always. Guessing gives about 1.5/side.

    Raises:
        Unsupported: the length is not the square of at least 10, no room for the shapes, or it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        distractors: Annotated[int, Field(ge=0, le=1000, description="other shapes beside the frame")] = 3,
        open_frames: Annotated[bool, Field(description="frames open on one side among the distractors")] = False,
        test: Annotated[int, Field(ge=1, le=100_000, description="images to test on")] = 512,
    ) -> None:
        side = isqrt(shape.seq_len)
        if side**2 != shape.seq_len or side < 10:
            raise Unsupported(f"detection: {shape.seq_len} is not the square of 10 or more; set seq_len to 144")
        super().__init__(
            "detection",
            shape,
            Form(vocab=(_IDS + _SIDES + 1,), classes=side, per_token=True),
            settings={"distractors": distractors, "open_frames": open_frames},
            test=test,
            masked_share=0.5,
        )
        self._side, self._shapes = side, 1 + distractors
        self._others = _FRAME if open_frames else _OPEN
        self._across, self._down = (_edges(pixels) for pixels in (_PATCH * side, _PATCH * (side - 1)))
        if self._shapes > (len(self._across) - 1) * (len(self._down) - 1):
            raise Unsupported(f"detection: no room for {self._shapes} shapes in n = {self.n}; lower distractors")

    def draw(self, count: int, generator: Generator) -> Examples:
        """Random images; the first shape of each is the frame."""
        columns = len(self._across) - 1
        cells = choices(count, columns * (len(self._down) - 1), self._shapes, generator)
        x, width = _placed(self._across, cells % columns, generator)
        y, height = _placed(self._down, cells // columns, generator)
        kinds = torch.randint(self._others, (count, self._shapes), generator=generator)
        kinds[:, 0] = _FRAME
        opened = torch.randint(_SIDES, (count, self._shapes), generator=generator)
        box = torch.stack([x, y, width, height, kinds, opened], dim=2)
        images = torch.cat([painted(part, self._side) for part in torch.split(box, _AT_ONCE)])
        tokens = torch.full((count, self.n), _IDS + _SIDES)
        labels = torch.full_like(tokens, NO_LABEL)
        tokens[:, : self.n - self._side] = _patches(images)
        asked = slice(self.n - self._side, self.n - self._side + _SIDES)
        tokens[:, asked] = _IDS + torch.arange(_SIDES)
        ends = torch.stack([x, y, x + width - 1, y + height - 1], dim=2)[:, 0]
        labels[:, asked] = ends // _PATCH
        return Examples(tokens, labels)


def _edges(pixels: int) -> Tensor:
    """Starts of the cells and the end of the last one: as many as fit, about equally wide."""
    cells = pixels // _CELL
    return torch.arange(cells + 1) * pixels // cells


def _placed(edges: Tensor, cell: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """The first pixel and the length of each shape in its cell, whose last pixel stays free; both like ``cell``."""
    length = torch.randint(_LEAST, _MOST + 1, cell.shape, generator=generator)
    room = edges[cell + 1] - edges[cell] - length  # at least 1
    part = torch.rand(cell.shape, dtype=torch.float64, generator=generator)
    return edges[cell] + (part * room).long(), length


def painted(box: Tensor, side: int) -> Tensor:
    """Bool images ``(B, 2·(side - 1), 2·side)`` of shapes ``(B, S, 6)``: x, y, width, height, kind, open side."""
    x, y, width, height, kind, opened = (one[:, :, None, None] for one in box.unbind(2))
    across = torch.arange(_PATCH * side) - x
    down = torch.arange(_PATCH * (side - 1))[:, None] - y
    inside = (across >= 0) & (across < width) & (down >= 0) & (down < height)
    sides = across == 0, down == 0, across == width - 1, down == height - 1
    ends = torch.stack([one.expand_as(inside) for one in sides])
    frame = inside & ends.any(0)
    corner = frame & (ends.sum(0) > 1)
    gap = ends.gather(0, opened.expand_as(frame)[None])[0] & ~corner
    cross = inside & ((across == width // 2) | (down == height // 2))
    outline = torch.where(kind == _OPEN, frame & ~gap, frame)
    return torch.where(kind == _FILLED, inside, torch.where(kind == _CROSS, cross, outline)).any(1)


def _patches(images: Tensor) -> Tensor:
    """Ids ``(B, patches)`` of the patches of bool images, whose pixels are bits, the first the highest."""
    count, height, width = images.shape
    parts = images.view(count, height // _PATCH, _PATCH, width // _PATCH, _PATCH).transpose(2, 3)
    bits = 2 ** torch.arange(_PATCH * _PATCH - 1, -1, -1)
    return (parts.flatten(3).long() * bits).sum(-1).flatten(1)
