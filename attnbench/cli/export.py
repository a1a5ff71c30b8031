"""``attnbench export RUN``: a run for other programs: Parquet, or tables for a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from attnbench.cli.options import File
from attnbench.cli.screen import console
from attnbench.cli.screen.outputs import refuse_files
from attnbench.errors import UsageError
from attnbench.text import quantity


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or of a suite for its newest run.")],
    parquet: Annotated[Path | None, File(help="Write the rows, with types and units, to this Parquet file.")] = None,
    samples: Annotated[Path | None, File(help="Write every raw sample to this Parquet file.")] = None,
    format_: Annotated[
        Literal["markdown", "latex"] | None, typer.Option("--format", help="Print a table for each sweep.")
    ] = None,
    out: Annotated[Path | None, File(help="Write the tables to this file instead.")] = None,
) -> None:
    """Hand the rows of a run to other programs.

    results.csv needs no export: DuckDB, pandas and spreadsheets read it as it is.
    """
    if out is not None and format_ is None:
        raise UsageError("--out is for tables; add --format markdown or --format latex")
    if not (parquet or samples or format_):
        raise UsageError(
            "export needs --parquet FILE, --samples FILE or --format; "
            "for example: attnbench export results/quick --parquet quick.parquet"
        )
    refuse_files(parquet, samples, out)

    from attnbench.files import write_output
    from attnbench.results.export.parquet import write_rows, write_samples
    from attnbench.results.export.tables import as_text, tables_of
    from attnbench.results.runs import newest_run

    folder = newest_run(run)
    records = folder.in_order()
    if not records:
        raise UsageError(f"{folder.path}: no row yet; measure first with: attnbench run SUITE")
    for doubt in [*folder.repairs, *folder.doubts()]:
        console.warning(doubt)
    if parquet is not None:
        console.note(f"{quantity(write_rows(folder, parquet), 'row')}: {parquet}")
    if samples is not None:
        console.note(f"{quantity(write_samples(folder, samples), 'sample')}: {samples}")
    if format_ is not None:
        text = "\n".join(as_text(table, format_) for table in tables_of(records))
        if out is None:
            console.line(text.rstrip("\n"))
        else:
            write_output(out, text)
            console.note(f"{quantity(len(records), 'row')}: {out}")
