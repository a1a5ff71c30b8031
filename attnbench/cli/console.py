"""The only place that prints: data to stdout, progress, warnings and errors to stderr.

rich is imported with the first printed line, json with the first data: help and the shell's completion need neither.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from attnbench import marks
from attnbench.cli.streams import Lasting
from attnbench.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from attnbench.record import Record
    from attnbench.spec import Spec

for _stream in (sys.stdout, sys.stderr):
    # On a terminal without µ or √ print a substitute instead of ending the program.
    if hasattr(_stream, "reconfigure"):
        _stream.reconfigure(errors="replace")


@functools.cache
def _out() -> Console:
    from rich.console import Console

    return Console(highlight=False)


@functools.cache
def _err() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def width() -> int:
    """Columns of stdout; 80 if it is no terminal and ``COLUMNS`` is not set."""
    return _out().width


def line(text: str = "") -> None:
    """Print one line of data."""
    _print(_out(), (text, ""))


def heading(text: str) -> None:
    """Print a line that names what follows."""
    _print(_out(), (text, "bold"))


def note(text: str) -> None:
    """Print something worth knowing that is not data."""
    _print(_err(), (text, "dim"))


def warning(text: str) -> None:
    """Print something that weakens the numbers, with the remedy."""
    _print(_err(), ("warning: ", "yellow"), (text, ""))


def error(text: str) -> None:
    """Print the one line that a failed command leaves."""
    _print(_err(), ("error: ", "bold red"), (" ".join(text.splitlines()), ""))


def _print(to: Console, *parts: tuple[str, str]) -> None:
    """Print parts, each a text and its style, on one line, however long it is."""
    from rich.text import Text

    to.print(Text.assemble(*((_shown(text), style) for text, style in parts)), soft_wrap=True)


def _shown(text: str) -> str:
    return printable(text, keep="\n")


def only_repeats() -> None:
    """Declare that what follows on stdout is in files as well, so that losing it is a warning, not an error."""
    if isinstance(sys.stdout, Lasting):
        sys.stdout.only_repeats = True


def data(value: Any) -> None:
    """Print JSON on stdout, unstyled; characters that the encoding lacks (√) or a terminal would obey are escaped."""
    _write(_json(value) + "\n")


@contextmanager
def items(*, wanted: bool = True) -> Iterator[Callable[[Any], None]]:
    """Print a JSON list as :func:`data` does, each item as soon as it is given; after an error it is closed as well."""
    before = "["

    def add(value: Any) -> None:
        nonlocal before
        if wanted:
            _write(before + _json([value])[1:-2])
            before = ","

    try:
        yield add
    finally:
        if before == ",":
            _write("\n]\n")


def _json(value: Any) -> str:
    import json

    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    text = json.dumps(value, indent=2, ensure_ascii=not unicode, allow_nan=False).replace("\x7f", r"\u007f")
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), title: str | None = None
) -> None:
    """Print a table on stdout under its title; columns named in ``right`` hold numbers.

    If it is too wide, columns of text take several lines; if possible no word is broken, or none of at most 10
    characters.
    """
    from rich.table import Table
    from rich.text import Text

    from attnbench.cli.console import GAPS, fit

    if title is not None:
        heading(title)
    lines = [[_shown(cell) for cell in line] for line in (columns, *rows)]
    numbers = [name in right for name in columns]
    fitting = fit(list(zip(*lines, strict=True)), numbers, width())
    gap = fitting[1] if fitting else GAPS[0]
    drawn = Table(box=None, pad_edge=False, header_style="dim", padding=(0, gap - 1, 0, 1))
    for place, (name, number) in enumerate(zip(lines[0], numbers, strict=True)):
        wide = fitting[0][place] if fitting else None
        side: Literal["left", "right"] = "right" if number else "left"
        drawn.add_column(Text(name), justify=side, no_wrap=number, overflow="fold", width=wide)
    for row in lines[1:]:
        drawn.add_row(*map(Text, row))
    _out().print(drawn)


@contextmanager
def progress(total: int, *, wanted: bool = True) -> Iterator[Progress]:
    """A bar on a terminal's stderr or in a notebook: cells done, the current cell, time left. Silent elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
    from rich.text import Text

    class Description(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(_shown(task.description))

    kind = Progress
    if wanted and _err().is_jupyter:
        from attnbench.cli.notebook import NotebookProgress

        kind = NotebookProgress
    with kind(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        Description(),
        TimeRemainingColumn(compact=True),
        console=_err(),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # else what is printed for a file would go to the terminal of the bar
        disable=not wanted or not _err().is_terminal,
    ) as bar:
        bar.add_task("starting", total=total)
        yield bar


DAGGER = marks.OWN_FORM


def mark_notes(cells: Iterable[str]) -> None:
    """Print what the marks in these cells mean, where the cells went: a file with the one has the other."""
    for said in marks.notes(cells):
        line(said)


def unchecked_note(laws: Iterable[str]) -> None:
    """Print that rows were measured unchecked, if some were."""
    from attnbench.record import UNCHECKED

    if UNCHECKED in laws:
        note("no variant was held to its laws first: --unchecked")


def fused_note(records: Iterable[Record]) -> None:
    """Print which rows of a GPU are made of many small kernels, and what is the same in fused ones, if that is so."""
    from attnbench.spec import parse_spec
    from attnbench.variant import VARIANTS

    on_gpu = [record for record in records if record.device.startswith("cuda") and record.time_median_s]
    labels = {record.label for record in on_gpu}
    names: dict[str, None] = {}
    for record in on_gpu:
        if record.kernel is None and record.variant in VARIANTS:
            fused = VARIANTS.get(record.variant).fused_as(parse_spec(record.label))
            if fused and fused.label not in labels and _takes(fused, record):
                names[f"{fused.label} is {record.label}"] = None
    if names:
        note(f"the same in fused kernels, made for a GPU: {'; '.join(names)}")


def replaced_note(records: Iterable[Record]) -> None:
    """Print which labels stand for another algorithm where ``torch.compile`` made it so, and whether it always did."""
    from attnbench.record import REPLACED

    compiled = [record for record in records if record.compiled]
    labels = dict.fromkeys(record.label for record in compiled if REPLACED in record.warnings)
    if labels:
        some = any(record.label in labels and REPLACED not in record.warnings for record in compiled)
        rows = "some of their rows, which the column kernel names," if some else "their rows"
        note(f"{REPLACED} in the place of the softmax of {', '.join(labels)}: {rows} are sdpa's algorithm")


def _takes(spec: Spec, record: Record) -> bool:
    """Whether a variant takes what a row of another one was measured with."""
    from attnbench.axes import names_of
    from attnbench.cell import STEPS
    from attnbench.errors import Unsupported
    from attnbench.shape import Shape
    from attnbench.variant import VARIANTS, build

    claims = VARIANTS.get(spec.name).claims(spec, causal=record.causal)
    if record.pass_ in STEPS or record.dtype not in claims.dtypes or (record.padding and not claims.key_padding):
        return False
    of_the_layer = ("added_tokens", "query_stride")
    try:
        build(spec, Shape(**{axis: getattr(record, axis) for axis in names_of("shape") if axis not in of_the_layer}))
    except Unsupported:
        return False
    return True


LONGEST_WORD = 10
"""Words up to this many characters stay whole: ``bfloat16`` does, a label with its options may be broken."""
GAPS = (2, 1)
"""Spaces between two columns: the second number is used if the first leaves too little room."""


def fit(columns: Sequence[Sequence[str]], numbers: Sequence[bool], space: int) -> tuple[list[int], int] | None:
    """Widths of the columns, and the gap between them, so that words stay whole.

    The widest column of text is narrowed again and again; columns of numbers keep their width. If there is too little
    room for all words, those of more than :data:`LONGEST_WORD` characters are broken, and at last the longest.

    Args:
        columns: the cells of each column, including its head.
        numbers: which columns hold numbers.
        space: characters in a line.

    Returns:
        The widths and the gap; None if there is no room for the numbers.
    """
    from rich.cells import cell_len

    widths = [max(1, *(cell_len(line) for cell in cells for line in cell.split("\n"))) for cells in columns]
    words = [[cell_len(word) for cell in cells for word in cell.split()] for cells in columns]
    whole = max(LONGEST_WORD, *(n for of in words for n in of), 0)
    tries = [(longest, gap) for longest in (whole, LONGEST_WORD) for gap in GAPS]
    for longest, gap in tries + [(n, GAPS[-1]) for n in range(LONGEST_WORD - 1, 0, -1)]:
        least = [
            width if fixed else max((n for n in of if n <= longest), default=1)
            for of, width, fixed in zip(words, widths, numbers, strict=True)
        ]
        room = space - gap * (len(widths) - 1)
        if sum(least) <= room:
            while sum(widths) > room:
                widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i])
                widths[widest] -= 1
            return widths, gap
    return None
