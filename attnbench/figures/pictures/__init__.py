"""Pictures that need no run: drawn from the variants themselves, from inputs, or from a formula."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnbench.figures.pictures.picture import Picture

__all__ = ["PICTURES", "draw", "write"]

PICTURES = {
    "pattern": "which keys each query of a variant may see",
    "weights": "the matrix that a variant applies to real inputs, beside softmax's",
    "spectrum": "how few singular values of softmax's matrix hold how much of it, by layer and head",
    "saturation": "what the factor 1/√d is for: entropy and gradient of softmax over the scale of its logits",
    "positions": "sines and cosines as positions, and that a shift rotates them",
    "features": "error of the Performer's random features over their number, in the two panels of its paper",
    "density": "softmax as a Gaussian kernel of the distance of query and key, and four estimates of it",
    "taxonomy": "the families as overlapping sets, with the cost, year and decoding of every variant",
}
"""Name -> its subject. Each is a module here with a function ``draw_NAME``."""


def draw(
    name: str,
    of: Sequence[str] = (),
    *,
    title: str | None = None,
    style: str = "light",
    width: str = "page",
    **options: Any,
) -> Picture:
    """Draw one picture.

    Args:
        name: one of :data:`PICTURES`.
        of: variants to draw, with options as one types them; empty for pictures that take no variants.
        title: replaces the picture's own title.
        style: ``light`` or ``dark``.
        width: ``page``, or ``column`` for one column of a paper, 3.3 inches.
        options: the keyword arguments of its ``draw_NAME``; None means not given.

    Raises:
        UsageError: a picture, variant, style, width or option does not exist.
        Unsupported: a variant or an input cannot give this; the message is the reason.
    """
    from attnbench.errors import UsageError, did_you_mean
    from attnbench.figures.kit.page import laid_out, retitle
    from attnbench.figures.kit.palette import drawn_in
    from attnbench.laws.growth import one_thread

    if name not in PICTURES:
        hint = did_you_mean(name, PICTURES) or f"; there are: {', '.join(PICTURES)}"
        raise UsageError(f"unknown picture {name!r}{hint}")
    make = getattr(import_module(f"{__name__}.{name}"), f"draw_{name}")
    takes = inspect.signature(make).parameters
    if of and "variants" not in takes:
        raise UsageError(f"the picture {name} takes no variants; remove {' '.join(of)}")
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if option not in takes:
            known = ", ".join(f"--{one.replace('_', '-')}" for one in takes if one != "variants")
            raise UsageError(
                f"the picture {name} has no option --{option.replace('_', '-')}; it has {known or 'no options'}"
            )
    with drawn_in(style), laid_out(width), one_thread():
        picture: Picture = make(**given, **({"variants": of} if of else {}))
    if title is not None:
        retitle(picture.figure, title)
    return picture


def write(
    name: str,
    folder: str | Path,
    formats: Sequence[str] = ("svg", "png"),
    of: Sequence[str] = (),
    *,
    dpi: float | None = None,
    **options: Any,
) -> list[Path]:
    """Draw one picture, like :func:`draw` with ``options``, into ``folder``: ``NAME.svg`` and so on, and ``NAME.csv``.

    The CSV has the numbers that are drawn. Raises as :func:`draw`, UsageError for an unknown format, and StoreError if
    a file cannot be written.
    """
    from attnbench.figures.kit.style import save
    from attnbench.figures.pictures.picture import write_numbers

    picture = draw(name, of, **options)
    stem = Path(folder) / name
    return [*save(picture.figure, stem, formats, dpi=dpi), write_numbers(picture, stem.with_suffix(".csv"))]
