"""Images like those of Pathfinder, drawn here: two dots and dashed curves.

The task shares its question with Pathfinder (Linsley et al. 2018, arXiv:1805.08315). Curves, sizes and grey levels are
our own, so that no score on it may be called one of the Long Range Arena.

All lengths are whole numbers, 64 to a pixel, so that a seed gives the same images on every machine.
"""

from __future__ import annotations

from math import cos, isqrt, pi, sin
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Generator, Tensor

from attnbench.catalogue.tasks.streams import Stream
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import Examples, Form, register_task
from attnbench.errors import Unsupported

_PIXEL = 64
_STEP = 3
"""Pixels from the start of one dash to the start of the next."""
_PAINTED = range(3, 10)
"""Places on a dash where paint falls, in quarters of a pixel from its start."""
_CLEAR = (7 * _PIXEL // 2) ** 2
"""Least squared distance between two curves, and between a curve and a later part of itself."""
_MARGIN = 2 * _PIXEL
_DOT = (13 * _PIXEL // 8) ** 2
_LEVELS = 16
_FULL = 3 * _PIXEL * _PIXEL
"""Amount of paint that makes a pixel white."""
_BEND = 6
"""Most that a dash turns from the one before it, in 64ths of a circle."""
_CIRCLE = 64
_TRIES = 6
"""Number of directions, or starting points, to try; the first that is clear is taken."""
_AGAIN = 8
"""Tries of a curve without room before the whole image is given up."""
_AT_ONCE = 128
_LEAST = 32
_IN_VAIN = 5
"""Number of rounds without a whole image after which the task is given up."""
_ALIKE = _PIXEL
"""Most that the distance between two dots may differ between a joined pair and one that is not."""
_TOWARDS = torch.tensor(
    [[round(_PIXEL * part(2 * pi * turn / _CIRCLE)) for part in (cos, sin)] for turn in range(_CIRCLE)]
)


@register_task("contours", source="own; after Pathfinder, Linsley et al. 2018, arXiv:1805.08315")
class Contours(Stream):
    """Does a dashed curve join the two dots? Drawn here; not Pathfinder.

    Each image has two long curves and some short ones, at least 3.5 pixels apart. The dots are at both ends of one long
    curve or, in half of the images, at one end of each. Every image has a pair of each kind with the same distance, up
    to a pixel, before one of the two gets the dots, so that the distance tells little. Each pixel is one token with 16
    grey levels, row by row. Guessing gives 0.5.

    Raises:
        Unsupported: the length is not the square of at least 24, no room for the curves, or it is cross-attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        dashes: Annotated[
            int | None, Field(ge=2, le=1000, description="dashes of a long curve; none: a quarter of the side")
        ] = None,
        distractors: Annotated[
            int | None, Field(ge=0, le=1000, description="short curves, a third as long; none: an eighth of the side")
        ] = None,
        test: Annotated[int, Field(ge=1, le=100_000, description="images to test on")] = 512,
    ) -> None:
        self._side = isqrt(shape.seq_len)
        if self._side**2 != shape.seq_len or self._side < 24:
            raise Unsupported(f"contours: {shape.seq_len} is not the square of 24 or more; set seq_len to 1024")
        dashes = self._side // 4 if dashes is None else dashes
        distractors = self._side // 8 if distractors is None else distractors
        super().__init__(
            "contours",
            shape,
            Form(vocab=(_LEVELS,), classes=2),
            settings={"dashes": dashes, "distractors": distractors},
            test=test,
            masked_share=0.5,
        )
        self._room = (2 * dashes + distractors * max(2, dashes // 3)) * _STEP < self._side**2 // 6
        self._curves = [dashes, dashes, *[max(2, dashes // 3)] * distractors]

    def draw(self, count: int, generator: Generator) -> Examples:
        """Random images; on average half of the labels are 1, which means joined."""
        curves = self._drawn_curves(count, generator)
        joined = torch.randint(2, (count,), generator=generator)
        pictures = _painted(curves, self._side)
        _add_dots(pictures, _dots(curves, self._curves[0], joined), self._side)
        return Examples(pictures, joined)

    def _drawn_curves(self, count: int, generator: Generator) -> _Curves:
        found: list[_Curves] = []
        missing, in_vain = count, 0
        while in_vain < _IN_VAIN and self._room:
            drawn, whole = self._try_curves(max(missing, _LEAST), generator)
            found.append(_Curves(*(part[whole] for part in drawn)))
            missing -= int(whole.sum())
            in_vain = 0 if whole.any() else in_vain + 1
            if missing <= 0:
                return _Curves(*(torch.cat(parts)[:count] for parts in zip(*found, strict=True)))
        raise Unsupported(f"{self._label}: there is no room for the curves; lower dashes or distractors")

    def _try_curves(self, count: int, generator: Generator) -> tuple[_Curves, Tensor]:
        """All curves of ``count`` images, and bool ``(count,)``: True if all curves of an image found room."""
        whole = torch.ones(count, dtype=torch.bool)
        taken = torch.empty(count, 0, 2, dtype=torch.int64)
        every: list[_Curves] = []
        for place, length in enumerate(self._curves):
            points = torch.zeros(count, 1 + _STEP * length, 2, dtype=torch.int64)
            turns = torch.zeros(count, length, dtype=torch.int64)
            missing = torch.arange(count)
            for _ in range(_AGAIN):
                # The fewer are missing, the more are tried for each, since small steps cost as much as large ones.
                copies = max(1, _AT_ONCE // len(missing))
                before = taken[missing].repeat_interleave(copies, dim=0)
                grown, turned, clear = _grown(before, length, self._side, generator)
                if place == 1:
                    clear &= _distances(before[:, [0, -1]], grown[:, [0, -1]])[0].amin(1) <= _ALIKE
                chosen, found = _first(clear.view(-1, copies))
                chosen += torch.arange(len(missing)) * copies
                points[missing], turns[missing] = grown[chosen], turned[chosen]
                missing = missing[~found]
                if not len(missing):
                    break
            whole[missing] = False
            if not whole.any():
                break
            every.append(_Curves(points[:, :-1:_STEP], turns, points[:, _STEP::_STEP]))
            taken = torch.cat([taken, points], dim=1)
        return _Curves(*(torch.cat(parts, dim=1) for parts in zip(*every, strict=True))), whole


class _Curves(NamedTuple):
    starts: Tensor
    """int64 ``(B, dashes, 2)``."""
    turns: Tensor
    """int64 ``(B, dashes)``, in 64ths of a circle."""
    ends: Tensor
    """int64 ``(B, dashes, 2)``."""


def _grown(taken: Tensor, length: int, side: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """One more curve in each image: a point at each pixel, the direction of each dash, and if it found room."""
    count = len(taken)
    images = torch.arange(count)
    at = _MARGIN + torch.randint(side * _PIXEL - 2 * _MARGIN, (count, _TRIES, 2), generator=generator)
    chosen, clear = _first_clear(at[:, :, None], taken, side)
    points = at[images, chosen][:, None]
    turn = torch.randint(_CIRCLE, (count,), generator=generator)
    turns = []
    for dash in range(length):
        most = 2 * _BEND + 1 if dash else _CIRCLE
        tried = (turn[:, None] + torch.randint(most, (count, _TRIES), generator=generator) - most // 2) % _CIRCLE
        steps = torch.arange(1, _STEP + 1)[:, None] * _TOWARDS[tried][:, :, None]
        at = points[:, -1, None, None] + steps
        others = torch.cat([taken, points[:, : -2 * _STEP]], dim=1)
        chosen, going_on = _first_clear(at, others, side)
        clear &= going_on
        turn = tried[images, chosen]
        turns.append(turn)
        points = torch.cat([points, at[images, chosen]], dim=1)
    return points, torch.stack(turns, dim=1), clear


def _first_clear(at: Tensor, taken: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The first of ``at`` ``(B, tries, points, 2)`` that is clear of ``taken`` ``(B, P, 2)``, and if one is."""
    inside = ((at >= _MARGIN) & (at < side * _PIXEL - _MARGIN)).all(3).all(2)
    across, down = (at[..., None, axis] - taken[:, None, None, :, axis] for axis in (0, 1))
    clear = inside & (across.square_().add_(down.square_()) >= _CLEAR).all(3).all(2)
    return _first(clear)


def _first(true: Tensor) -> tuple[Tensor, Tensor]:
    """Column of the first True in each row of ``(rows, columns)``, and if there is one."""
    columns = torch.arange(true.shape[1])
    first = torch.where(true, columns, len(columns)).amin(1)
    return first.clamp(max=len(columns) - 1), first < len(columns)


def _dots(curves: _Curves, dashes: int, joined: Tensor) -> Tensor:
    """Places of the two dots, ``(B, 2, 2)``."""
    a, b = (torch.stack([curves.starts[:, first], curves.ends[:, first + dashes - 1]], dim=1) for first in (0, dashes))
    differences, ends = _distances(a, b)
    nearest = (differences + torch.arange(8) * 1e-6).argmin(1)  # the first of equal ones
    images = torch.arange(len(nearest))
    same = torch.stack([a, b], dim=1)[images, nearest // 4]
    return torch.where(joined[:, None, None] == 1, same, ends[images, nearest % 4])


def _distances(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Differences between the distance of the ends of two curves and that of the ends of one, float64 ``(B, 8)``.

    ``a`` and ``b`` are the ends of both curves, ``(B, 2, 2)``. The differences of the four pairs ``(B, 4, 2, 2)``, also
    returned, come from the first curve and then from the second.
    """
    pairs = torch.stack([torch.stack([a[:, i], b[:, j]], dim=1) for i in (0, 1) for j in (0, 1)], dim=1)
    apart, of_a, of_b = ((ends[..., 0, :] - ends[..., 1, :]).square().sum(-1).double().sqrt() for ends in (pairs, a, b))
    return torch.cat([(apart - of_a[:, None]).abs(), (apart - of_b[:, None]).abs()], dim=1), pairs


def _painted(curves: _Curves, side: int) -> Tensor:
    """Grey levels ``(B, side²)``: each point of paint is shared by the four pixels around it, by distance."""
    quarters = torch.tensor(_PAINTED)
    at = (curves.starts[:, :, None] + _TOWARDS[curves.turns][:, :, None] * quarters[:, None] // 4).flatten(1, 2)
    corner = at - _PIXEL // 2  # a pixel's middle is half a pixel from its edge
    pixel, part = corner // _PIXEL, corner % _PIXEL
    paint = torch.zeros(len(at), side * side, dtype=torch.int64)
    for right in (0, 1):
        for down in (0, 1):
            weight = (part if right else _PIXEL - part)[..., 0] * (part if down else _PIXEL - part)[..., 1]
            paint.scatter_add_(1, (pixel[..., 1] + down) * side + pixel[..., 0] + right, weight)
    return (paint * (_LEVELS - 1) // _FULL).clamp(max=_LEVELS - 1)


def _add_dots(pictures: Tensor, dots: Tensor, side: int) -> None:
    middles = torch.arange(side) * _PIXEL + _PIXEL // 2
    for dot in dots.unbind(1):
        far = (middles - dot[:, :1]).square()[:, None, :] + (middles - dot[:, 1:]).square()[:, :, None]
        pictures[far.flatten(1) <= _DOT] = _LEVELS - 1
