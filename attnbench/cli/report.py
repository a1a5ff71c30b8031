"""``attnbench report RUN``: one HTML file with the answer, the figures and every row."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnbench.cli.options import File
from attnbench.cli.screen import console
from attnbench.cli.screen.outputs import refuse_files
from attnbench.errors import CannotCreate, UsageError
from attnbench.text import quantity

FILE = "report.html"


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="A results folder, one run in it, or a results.csv; several stand in one report. Default: results.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, File(help="The file; default: RUN/report.html, or ./report.html for several runs.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="An older run: each row gets its ratio and a verdict.")
    ] = None,
    check: Annotated[Path | None, File(help="Also show what attnbench check --json wrote to this file.")] = None,
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Title; default: the suites and the machine.")
    ] = None,
    figures: Annotated[
        bool, typer.Option("--figures", help="Also include the other figures of attnbench plot.")
    ] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Write one HTML file with the answer, the figures and every row of a run; it opens without a network.

    Rows of different kinds of machines stand in sections of their own.
    """
    if out is not None and out.is_dir():
        raise CannotCreate(f"--out {out} is a folder; name a file: {out / FILE}")
    refuse_files(out)
    if title is not None and not title.strip():
        raise UsageError("--title is empty; give some words, or leave it out")

    from attnbench.answers.report.against import read_against
    from attnbench.answers.report.check_findings import read_laws
    from attnbench.answers.report.html_page import make_page
    from attnbench.answers.report.provenance import folders_of, read_sources
    from attnbench.files import write_output
    from attnbench.units import format_bytes

    console.only_repeats()
    doubts: list[str] = []

    def doubt(said: str) -> None:
        doubts.append(said)
        console.warning(said)

    laws = read_laws(check) if check else []
    rows = read_sources(runs or [Path("results")], warn=doubt)
    folders = folders_of(rows)
    older = read_against(folders, against, doubt) if against else None
    page = make_page(rows, title=title, laws=laws, figures=figures, against=older, doubts=doubts).encode()
    file = out or (next(iter(folders.values())) if len(folders) == 1 else Path()) / FILE
    write_output(file, page)
    console.line(f"{file}")
    console.note(f"{quantity(len(rows), 'row')} of {quantity(len(folders), 'run')}, {format_bytes(len(page))}")
    if open_:
        import webbrowser

        if not webbrowser.open(file.resolve().as_uri()):
            console.warning(f"no browser could be started; open {file} yourself")
