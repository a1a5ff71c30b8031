"""The only place that prints: data to stdout, progress, warnings and errors to stderr.

rich is imported with the first line that is printed, json with the first data: help and the shell's completion need
neither.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from attnbench.record import Record

for _stream in (sys.stdout, sys.stderr):
    # A terminal that knows no µ or √ shows a substitute instead of ending the program.
    if hasattr(_stream, "reconfigure"):
        _stream.reconfigure(errors="replace")


def _console(*, stderr: bool) -> Console:
    """One that goes on in silence when whoever read it has seen enough: a run measures on."""
    from rich.console import Console

    class Patient(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    return Patient(stderr=stderr, highlight=False)


@functools.cache
def _out() -> Console:
    return _console(stderr=False)


@functools.cache
def _err() -> Console:
    return _console(stderr=True)


def width() -> int:
    """Columns of stdout, 80 where it is no terminal and ``COLUMNS`` is not set."""
    return _out().width


def line(text: str = "") -> None:
    """One line of data."""
    _print(_out(), (text, ""))


def heading(text: str) -> None:
    """A line that names what follows."""
    _print(_out(), (text, "bold"))


def note(text: str) -> None:
    """Something worth knowing that is not data."""
    _print(_err(), (text, "dim"))


def warning(text: str) -> None:
    """Something that weakens the numbers, with the remedy."""
    _print(_err(), ("warning: ", "yellow"), (text, ""))


def error(text: str) -> None:
    """The one line that a failed command leaves."""
    _print(_err(), ("error: ", "bold red"), (" ".join(text.splitlines()), ""))


def _print(to: Console, *parts: tuple[str, str]) -> None:
    """Text and style of each part, on one line however long it is."""
    from rich.text import Text

    to.print(Text.assemble(*((_shown(text), style) for text, style in parts)), soft_wrap=True)


def _shown(text: str) -> str:
    """Without what moves the cursor or clears the screen: a name or a reason may come from a file of somebody else."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def data(value: Any) -> None:
    """JSON on stdout, never styled; where the encoding has no √, escaped, since data is not lost for looks."""
    import json

    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    try:
        sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=not unicode, allow_nan=False) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads it, which does not change how the command ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), title: str | None = None
) -> None:
    """A table on stdout under its title; columns named in ``right`` hold numbers."""
    from rich.table import Table
    from rich.text import Text

    if title is not None:
        heading(title)
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        number = name in right
        drawn.add_column(Text(_shown(name)), justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(_shown(cell)) for cell in row))
    _out().print(drawn)


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """A bar on stderr: cells done, the current cell, time left. Silent where stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
        TimeRemainingColumn(compact=True),
        console=_err(),
        transient=True,
        disable=not _err().is_terminal,
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
