"""The fastest form at each of many shapes: ``attnbench.best``."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from attnbench.api.arguments import check_importable
from attnbench.api.shown import Chosen
from attnbench.cli import options
from attnbench.cli.screen import console
from attnbench.cli.signature import in_python


@in_python(options.BestOptions)
def best(shapes: str | Path | None = None, *, progress: bool = True, **given: Unpack[options.BestOptions]) -> Chosen:
    """Find the fastest form that keeps an error, shape by shape, as ``attnbench best`` does.

    Args:
        shapes: a CSV file with a row for each shape: ``n``, ``heads``, ``kv_heads``, ``head_dim`` and other axes,
            ``pass``, ``shape`` for a published one, ``name``.
        progress: show a progress bar.
        **given: see below.

    Raises:
        UsageError: there is no shape, or a shape, a variant or an option is wrong.
    """
    from attnbench.cli.best import prepare, watching

    prepared = prepare(None if shapes is None else Path(shapes), given)
    check_importable(cell.variant for contest in prepared.contests for cell in contest.cells)
    with console.progress(prepared.count, wanted=progress) as bar:
        found = prepared.answer(watching(bar))
    if found.stopped:
        raise found.stopped
    return Chosen(found)
