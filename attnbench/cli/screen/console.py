"""The only place that prints: data to stdout, progress, warnings and errors to stderr.

rich is imported with the first printed line, json with the first data: help and the shell's completion need neither.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from attnbench.results.frame import marks
from attnbench.text import printable, without_empty
from attnbench.units import format_number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from attnbench.contract.spec import Spec
    from attnbench.results.record import Record

NARROWEST = 20
"""Columns below which a screen's width is not believed; 0 means unknown."""

for _stream in (sys.stdout, sys.stderr):
    # On a terminal without µ or √ print a substitute instead of ending the program.
    if hasattr(_stream, "reconfigure"):
        _stream.reconfigure(errors="replace")


@functools.cache
def _out() -> Console:
    return _console(stderr=False)


@functools.cache
def _err() -> Console:
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    to = Console(stderr=stderr, highlight=False)
    if to.width < NARROWEST:
        to.width = NARROWEST if to.width else 80
    return to


def width() -> int:
    """Columns of stdout; 80 if it is no terminal and ``COLUMNS`` is not set."""
    return _out().width


def line(text: str = "") -> None:
    """Print one line of data."""
    _print(_out(), (text, ""))


def paragraph(text: str) -> None:
    """Print text in lines no longer than the screen, broken between words; all but the first are indented."""
    for part in wrapped(text, width(), "  ") or [""]:
        line(part)


def wrapped(text: str, room: int, indent: str = "") -> list[str]:
    """Lines of at most ``room`` characters, broken between words; all but the first begin with ``indent``."""
    from textwrap import wrap

    return wrap(text, room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def in_parts(text: str, longest: int) -> str:
    """Text whose words of more than ``longest`` characters, such as labels, are broken after commas and colons."""
    return re.sub(rf"(?=\S{{{longest + 1}}})(\S{{,{longest - 1}}}[,:])(?=\S)", r"\1\n", text)


def heading(text: str) -> None:
    """Print the title of the following lines."""
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
    from rich.text import Text

    whole = Text.assemble(*((_shown(text), style) for text, style in parts))
    to.print(whole, soft_wrap=not to.is_terminal)  # a terminal would break lines within words


def _shown(text: str) -> str:
    return printable(text, keep="\n")


def only_repeats() -> None:
    """Declare that the following output is in files as well: losing it is a warning, not an error."""
    if isinstance(sys.stdout, Lasting):
        sys.stdout.only_repeats = True


def data(value: Any) -> None:
    """Print JSON on stdout, unstyled, with null for a number that is not finite; escape characters that the encoding
    lacks (√) or a terminal would obey."""
    _write(_json(value) + "\n")


@contextmanager
def items(*, wanted: bool = True) -> Iterator[Callable[[Any], None]]:
    """Print a JSON list as :func:`data` does, each item at once; after an error it is closed as well."""
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
    how: dict[str, Any] = {"indent": 2, "ensure_ascii": not unicode, "allow_nan": False}
    try:
        text = json.dumps(value, **how)
    except ValueError:  # JSON has no number that is not finite
        text = json.dumps(_finite(value), **how)
    text = text.replace("\x7f", r"\u007f")
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def _finite(value: Any) -> Any:
    """Plain data with None for each number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), title: str | None = None
) -> None:
    """Print a table on stdout under its title; columns named in ``right`` hold numbers.

    Empty columns are left out. Text that is too wide takes several lines, then a row does: no number and no name is
    cut. A long note stands once below, under a number.
    """
    from collections import Counter

    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    if title is not None:
        heading(title)
    columns, rows = without_empty(columns, rows) if rows else (columns, rows)
    notes = Counter(row[-1] for row in rows) if columns[-1] == "note" else Counter[str]()
    below = [text for text, count in notes.items() if len(text) > (_LONG_NOTE if count > 1 else 2 * _LONG_NOTE)]
    rows = [[*row[:-1], f"({below.index(row[-1]) + 1})" if row[-1] in below else row[-1]] for row in rows]
    lines = [[_shown(cell) for cell in line] for line in (columns, *rows)]
    numbers = [name in right for name in columns]
    groups = in_lines(list(zip(*lines, strict=True)), numbers, width())
    for block in [lines] if len(groups) == 1 else [[line] for line in lines]:
        for first, widths, gap in groups:
            part = slice(first, first + len(widths))
            drawn = Table(box=None, pad_edge=False, show_header=False, padding=(0, gap - 1, 0, 1))
            for wide, number in zip(widths, numbers[part], strict=True):
                drawn.add_column(justify="right" if number else "left", overflow="fold", width=wide)
            for line in block if not first or any(block[0][part]) else ():
                cells = map(in_parts, line[part], widths)
                drawn.add_row(*(Text(cell, style="dim" * (line is lines[0])) for cell in cells))
            _out().print(Padding(drawn, (0, 0, 0, INDENT * bool(first)), expand=False))
    for place, text in enumerate(below, start=1):
        paragraph(f"({place}) {_shown(text)}")


_LONG_NOTE = 20
"""A note of more characters is not repeated in each row; one of twice as many never stands in a row."""
A_LINE_EACH = 60.0
"""Seconds between the lines of a progress without a terminal."""


@contextmanager
def progress(total: int, *, wanted: bool = True) -> Iterator[Progress]:
    """A bar on a terminal's stderr or in a notebook: cells done, the current one, time left. Else a line a minute."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
    from rich.text import Text

    class Description(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(_shown(task.description))

    kind = Progress
    if wanted and _err().is_jupyter:
        from attnbench.cli.screen.notebook import NotebookProgress

        kind = NotebookProgress
    with kind(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        Description(),
        TimeRemainingColumn(compact=True),
        console=_err(),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # else output for a file would go to the terminal of the bar
        disable=not wanted or not _err().is_terminal,
    ) as bar:
        bar.add_task("starting", total=total)
        over = threading.Event()

        def tell() -> None:
            while not over.wait(A_LINE_EACH):
                task = bar.tasks[0]
                note(f"{(task.elapsed or 0) / 60:.0f} min: {task.completed:g} of {task.total:g}: {task.description}")

        teller = threading.Thread(target=tell, daemon=True)
        if wanted and kind is Progress and not _err().is_terminal:
            teller.start()
        try:
            yield bar
        finally:
            over.set()


def mark_notes(cells: Iterable[str]) -> None:
    """Print the meaning of the marks in these cells to the cells' own stream."""
    for said in marks.notes(cells):
        line(said)


def laws_note(records: Iterable[Record]) -> None:
    """Print a note on rows measured without checking the laws, or although one is broken by what none of them holds."""
    from attnbench.results.record import HELD, NOT_TRIED, UNCHECKED

    laws = {record.laws: record.variant for record in records if record.status == "ok"}
    if UNCHECKED in laws:
        note("no variant was held to its laws first: --unchecked")
    for law in laws.keys() - {"", HELD, NOT_TRIED, UNCHECKED}:
        name = laws[law]
        note(f"{name} would let NaN in padded tokens through, as torch's own attention does: attnbench check {name}")


def fused_note(records: Iterable[Record]) -> None:
    """Print the rows of a GPU that consist of many small kernels, and equal fused variants if there are some."""
    from attnbench.contract.spec import parse_spec
    from attnbench.contract.variant import VARIANTS

    on_gpu = [record for record in records if record.device.startswith("cuda") and record.time_median_s]
    labels = {record.label for record in on_gpu}
    names: dict[str, None] = {}
    for record in on_gpu:
        if record.kernel is None and record.variant in VARIANTS:
            fused = VARIANTS.get(record.variant).fused_as(parse_spec(record.label.partition("@")[0]))
            if fused and fused.label not in labels and _takes(fused, record):
                names[f"{fused.label} is {record.label}"] = None
    if names:
        note(f"the same in fused kernels, made for a GPU: {'; '.join(names)}")


OWN_ERRORS = ("output", "its last half", "gradients")


def own_error(value: float | None) -> str:
    """``2.1e-07``; ``-`` for none."""
    return "-" if value is None else f"{value:.2g}"


REACHED = ("TFLOP/s", "GB/s", "of limits")


def reached(record: Record) -> list[str]:
    """The rates of a row and its share of the machine's limits, in the columns :data:`REACHED`."""
    flops, moved, share = record.flops_per_s, record.bytes_per_s, record.peak_fraction
    return [
        "-" if flops is None else format_number(flops / 1e12),
        "-" if moved is None else format_number(moved / 1e9),
        "-" if share is None else f"{share:.0%}",
    ]


def replaced_note(records: Iterable[Record]) -> None:
    """Print the labels that ``torch.compile`` changed into another algorithm, and if it always did."""
    from attnbench.results.record import REPLACED

    compiled = [record for record in records if record.compiled]
    labels = dict.fromkeys(record.label for record in compiled if REPLACED in record.warnings)
    if labels:
        some = any(record.label in labels and REPLACED not in record.warnings for record in compiled)
        rows = "some of their rows, which the column kernel names," if some else "their rows"
        note(f"{REPLACED} in the place of the softmax of {', '.join(labels)}: {rows} are sdpa's algorithm")


def _takes(spec: Spec, record: Record) -> bool:
    from attnbench.catalogue.build import build
    from attnbench.contract.problem.shape import Shape
    from attnbench.contract.variant import VARIANTS
    from attnbench.errors import Unsupported
    from attnbench.suite.axes import names_of
    from attnbench.suite.cell import STEPS

    claims = VARIANTS.get(spec.name).claims(spec, causal=record.causal)
    if record.pass_ in STEPS or record.dtype not in claims.dtypes or (record.padding and not claims.key_padding):
        return False
    of_the_layer = ("added_tokens", "query_stride")
    try:
        build(spec, Shape(**{axis: getattr(record, axis) for axis in names_of("shape") if axis not in of_the_layer}))
    except Unsupported:
        return False
    return True


GAPS = (2, 1)
"""Spaces between two columns: the second if the first leaves too little room."""
INDENT = 2
"""Spaces before the further lines of a row that takes several."""
_NARROW = 16
"""Text gets at least so many characters to a line, if it has them."""


def in_lines(columns: Sequence[Sequence[str]], numbers: Sequence[bool], space: int) -> list[tuple[int, list[int], int]]:
    """The lines of a row: the first column of each, the widths of its columns, and the gap between them.

    Only a cell that is wider than the screen is broken within a word. ``columns`` are the cells of each column, head
    first, ``numbers`` is True for those with numbers, and ``space`` is in characters.
    """
    lines, start = list[tuple[int, list[int], int]](), 0
    while start < len(columns):
        room, stop = space - INDENT * bool(start), len(columns)
        while (found := fit(columns[start:stop], numbers[start:stop], room)) is None and stop - start > 1:
            stop -= 1
        widths, gap = found or ([room], GAPS[0])
        lines.append((start, widths, gap))
        start = stop
    return lines


def fit(columns: Sequence[Sequence[str]], numbers: Sequence[bool], space: int) -> tuple[list[int], int] | None:
    """Widths of the columns, and the gap between them, so that numbers and words stay whole; None without room."""
    from rich.cells import cell_len

    widths = [max(1, *(cell_len(line) for cell in cells for line in cell.split("\n"))) for cells in columns]
    least = []
    for cells, width, fixed in zip(columns, widths, numbers, strict=True):
        words = max((cell_len(word) for cell in cells for word in cell.split()), default=1)
        body = max((cell_len(cell) for cell in cells[1:]), default=0)
        least.append(max(words, body if fixed else min(width, _NARROW)))
    for gap in GAPS:
        room = space - gap * (len(widths) - 1)
        if sum(least) <= room:
            while sum(widths) > room:
                widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i])
                widths[widest] -= 1
            return widths, gap
    return None


class Lasting:
    """A text stream that goes on in silence once nothing more can be written to it."""

    def __init__(self, stream: TextIO, lost: str = "") -> None:
        self._stream = stream
        self.lost = lost
        """Reason of lost output; empty if all was written, or if a reader has seen enough (``| head``)."""
        self.only_repeats = False

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if not isinstance(error, BrokenPipeError):
            self.lost = self.lost or error.strerror or str(error)
        # The rest of the stream's buffer goes there as well; otherwise it would raise again when Python ends.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_streams() -> Iterator[Lasting]:
    """Make stdout and stderr lasting inside this context; yield stdout."""
    _open_missing()
    before = sys.stdout, sys.stderr
    out, err = (_lasting(stream, number) for number, stream in enumerate(before, start=1))
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


def _lasting(stream: TextIO | None, number: int) -> Lasting:
    if stream is not None:
        return Lasting(stream)
    return Lasting(open(number, "w", encoding="utf-8", closefd=False), "it is closed")


def _open_missing() -> None:
    """Open closed streams on the null device: otherwise the next opened file would take their number and prints."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest free number
