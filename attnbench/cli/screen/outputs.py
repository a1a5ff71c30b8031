"""Files of a command besides its printed output: a table of rows, a drawing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.cli.screen import console
from attnbench.errors import CannotCreate, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def refuse_files(
    *files: Path | None, plot: Path | None = None, option: str = "--plot", inputs: Sequence[str | Path | None] = ()
) -> None:
    """Check before measuring that files can be written.

    Raises UsageError if ``plot`` (of ``option``) is of a kind that is not drawn, a file is named twice or is one of the
    ``inputs``, or the notes of a new ``plot`` would replace another file; CannotCreate without a folder to write in, or
    if the file is a run's own, a folder or a link.
    """
    from attnbench.files import refuse_output

    if plot is not None and plot.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"{option} {plot}: the name must end in .svg, .png or .pdf")
    written, read = set[Path](), {Path(one).resolve() for one in inputs if one is not None}
    for path in filter(None, (*files, plot)):
        if not path.parent.is_dir():
            raise CannotCreate(f"cannot write {path}: there is no folder {path.parent}")
        refuse_output(path)
        if path.absolute() in written and (path.is_file() or not path.exists()):  # a pipe or terminal takes several
            raise UsageError(f"{path} is named for two outputs, and the second would replace the first; name another")
        if path.is_file() and path.resolve() in read:
            raise UsageError(f"{path} is read by this command, which would replace it; name another output")
        written.add(path.absolute())
    if plot is not None:
        notes = plot.with_suffix(".txt")
        if notes.absolute() in written or (notes.exists() and not plot.exists()):
            raise UsageError(f"{option} {plot}: notes of the figure may replace {notes}; choose another name")


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path, *, whole: Sequence[str] = ()) -> None:
    """Write rows as CSV, safe to open in a spreadsheet, with whole numbers in the columns ``whole``; or StoreError."""
    import pandas as pd

    from attnbench.files import write_output
    from attnbench.results.table import no_formula
    from attnbench.text import printable

    def plain(cell: object) -> object:
        return no_formula(printable(cell)) if isinstance(cell, str) else cell

    texts = [{column: plain(cell) for column, cell in row.items()} for row in rows]
    table = pd.DataFrame(texts).astype(dict.fromkeys(whole, "Int64"))
    write_output(path, table.to_csv(index=False, lineterminator="\n"))


def draw(figure: Callable[[], Figure], path: Path, *, width: str, style: str = "light") -> None:
    """Draw and write a figure in this width and style, or warn that it is empty; StoreError if it cannot be written."""
    from attnbench.figures.kit.page import NothingToDraw, laid_out
    from attnbench.figures.kit.palette import drawn_in
    from attnbench.figures.kit.style import save

    try:
        with laid_out(width), drawn_in(style):
            save(figure(), path.with_suffix(""), (path.suffix[1:],))
    except NothingToDraw as why:
        console.warning(f"no chart is written: {why}")
