"""The only place that prints: data to stdout, progress, warnings and errors to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from attnbench.record import Record

for _stream in (sys.stdout, sys.stderr):
    # A terminal that knows no µ or √ shows a substitute instead of ending the program.
    if hasattr(_stream, "reconfigure"):
        _stream.reconfigure(errors="replace")


class _Console(Console):
    """Goes on in silence when whoever read it has seen enough: a run measures on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


_out = _Console(highlight=False)
_err = _Console(stderr=True, highlight=False)


def width() -> int:
    """Columns of stdout, 80 where it is no terminal and ``COLUMNS`` is not set."""
    return _out.width


def line(text: str = "") -> None:
    """One line of data."""
    _out.print(Text(text), soft_wrap=True)


def heading(text: str) -> None:
    """A line that names what follows."""
    _out.print(Text(text, style="bold"), soft_wrap=True)


def note(text: str) -> None:
    """Something worth knowing that is not data."""
    _err.print(Text(text, style="dim"), soft_wrap=True)


def warning(text: str) -> None:
    """Something that weakens the numbers, with the remedy."""
    _err.print(Text("warning: ", style="yellow") + Text(text), soft_wrap=True)


def error(text: str) -> None:
    """The one line that a failed command leaves."""
    _err.print(Text("error: ", style="bold red") + Text(text), soft_wrap=True)


def data(value: Any) -> None:
    """JSON on stdout, never styled."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), title: str | None = None
) -> None:
    """A table on stdout under its title; columns named in ``right`` hold numbers."""
    if title is not None:
        heading(title)
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        number = name in right
        drawn.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        drawn.add_row(*(escape(cell) for cell in row))
    _out.print(drawn)


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """A bar on stderr: cells done, the current cell, time left. Silent where stderr is no terminal."""
    with Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
        TimeRemainingColumn(compact=True),
        console=_err,
        transient=True,
        disable=not _err.is_terminal,
    ) as bar:
        bar.add_task("starting", total=total)
        yield bar


def error_text(record: Record) -> str:
    """The error of one row, marked where the number is none."""
    if record.error_kind == "learned":
        return "learned"
    if record.rel_error is None:
        return "-"
    return f"{record.rel_error:.2g}" + (" *" if record.error_kind == "distance" else "")


def error_notes(kinds: set[str | None]) -> None:
    """What the marks of :func:`error_text` mean, where they were used."""
    if "distance" in kinds:
        note("* another operator: its distance from softmax attention is not an error")
    if "learned" in kinds:
        note("learned: an error means nothing before the projections are fitted")
