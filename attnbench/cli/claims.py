"""``attnbench claims``: published claims against measurements on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.cli import options
from attnbench.cli.screen import console
from attnbench.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

    from attnbench.answers.claims.assessment import Judgement, Verdict
    from attnbench.answers.claims.claims import Claim
    from attnbench.answers.claims.published_tables import Number


def claims(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|FILE|RESULTS]...",
            help="Published tables: lra, fla-readme, FILE.yaml, cuDNN's FILE.csv, flashinfer's FILE.json; none for "
            "sentences of papers. Results folders or runs with the rows. Default: results, if it is there.",
            show_default=False,
        ),
    ] = None,
    select: Annotated[
        str | None, typer.Option("-k", metavar="TEXT", help="Only claims with this text in name, claim or source.")
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Measure missing rows first: suites, or the table.")] = False,
    cell_timeout: Annotated[float, options.Limit(help="With --run of a table: time limit for each number.")] = 10.0,
    as_json: options.AsJson = False,
) -> None:
    """Compare published claims, or the numbers of published tables, with what was measured on this machine.

    A claim holds if the whole interval says so at every point, and fails if it says so at no point. Otherwise it
    depends on the setting. It is open if all intervals hold both answers. It is not tested while a row is missing that
    its suite would measure. --json names all rows by run and cell.

    A ratio of a table is reproduced, on any device, if it is within a tenth of the published one, or what the table
    allows, and open if only its interval is. A time or a memory is judged on the published device alone.
    """
    from attnbench.answers.claims.assessment import judge_all_rows
    from attnbench.answers.claims.claims import claims as all_claims
    from attnbench.answers.claims.evidence import MACHINE
    from attnbench.answers.claims.published_tables import SHIPPED, claims_of, is_table, load

    tables = [load(one) for one in dict.fromkeys(given or ()) if is_table(one)]
    results = [Path(one) for one in given or () if not is_table(one)] or None
    for path in (one for one in results or () if not one.exists()):
        if (hint := did_you_mean(str(path), SHIPPED)) or not run:  # a run makes its folder
            there = hint or f"; there are {', '.join(SHIPPED)}"
            raise UsageError(f"{path}: no results, and no published table{there}")
    if tables and run:
        _measure([], results, tables=[_mentioning(one, select or "") for one in tables], limit=cell_timeout)
    table = _rows(results) if tables else None
    machines = () if table is None else tuple(table[MACHINE].unique())
    known = [claim for numbers in tables for claim in claims_of(numbers, machines)] if tables else all_claims()
    wanted = [one for one in known if _mentions(one, select or "")]
    if not wanted:
        raise UsageError(f"no claim mentions {select!r}; leave out -k to see all of them")
    if run and not tables:
        _measure(wanted, results, narrow=select is not None)
    table = table if tables else _rows(results)
    judged = [judge_all_rows(one, table) for one in wanted]
    if as_json:
        console.data([_as_data(one, table) for one in judged])
        return
    if tables:
        console.paragraph(
            "2 × NAME: the time or memory of NAME is twice its own. The first is the baseline; the second is "
            "the fastest exact kernel published for the device, by its FLOP/s at the nearest length where n is given."
        )
    for note in dict.fromkeys(one.note for numbers in tables for one in numbers if one.note):
        console.paragraph(note)
    for one in [one for one in judged if one.points]:
        _print(one)
    _print_rest([one for one in judged if not one.points])
    counts = Counter(one.verdict for one in judged)
    words = _COUNTED | (_OF_NUMBERS if tables else {})
    told = ", ".join(f"{counts[verdict]} {said}" for verdict, said in words.items())
    console.line()
    console.paragraph(f"Of {len(judged)} claims: {told}.")


_COUNTED: dict[Verdict, str] = {
    "holds": "hold",
    "fails": "fail",
    "depends on": "depend on the setting",
    "open": "open",
    "not tested here": "not tested here",
}


def _mentions(claim: Claim, text: str) -> bool:
    return text.casefold() in f"{claim.id} {claim.says} {claim.source}".casefold()


def _mentioning(numbers: Sequence[Number], text: str) -> list[Number]:
    """The numbers whose claims mention it, by the numbers' own words, and the baselines of these."""
    words = [f"line-{one.line} {one} × {one.baseline} {one.source}, {one.place}".casefold() for one in numbers]
    held = [one for one, said in zip(numbers, words, strict=True) if text.casefold() in said]
    return [one for one in numbers if one in held or any(one.row == h.baseline and one.where == h.where for h in held)]


def _rows(results: list[Path] | None) -> pd.DataFrame | None:
    from attnbench.answers.claims.evidence import read_rows

    folders = results or [Path("results")]
    return read_rows(folders, warn=console.warning) if all(one.exists() for one in folders) else None


def _measure(
    wanted: list[Claim],
    results: list[Path] | None,
    *,
    narrow: bool = False,
    tables: Sequence[Sequence[Number]] = (),
    limit: float = 0.0,
) -> None:
    """Measure tables, and make the runs of claims without rows, by number of threads; if ``narrow``, their sweeps."""
    from attnbench.answers.claims.assessment import judge_all_rows
    from attnbench.answers.claims.published_tables import suite_of
    from attnbench.cli.screen.run import measured
    from attnbench.harness.plan import Options, make_plan
    from attnbench.measure.machine import available_cores, resolve_device

    if results and len(results) > 1:
        raise UsageError("--run measures into one results folder; give one")
    folder = results[0] if results else Path("results")
    for here in filter(None, ([one for one in numbers if one.label] for numbers in tables)):
        backends = ("flash", "efficient", "cudnn") if resolve_device("auto") != "cpu" else ()
        suite = suite_of(here, ["sdpa", *(f"sdpa:backend={one}" for one in backends)])
        measured(make_plan(suite, Options(out=folder, cell_timeout=limit)))
    table = _rows(results) if folder.is_dir() and any(folder.iterdir()) else None
    known = {one.id: judge_all_rows(one, table) for one in wanted if one.runs}
    lacking = [one for one in wanted if one.runs and (known[one.id].missing or not known[one.id].points)]
    most = available_cores()
    for run in dict.fromkeys(run for one in lacking for run in one.runs):
        if run.threads is not None and run.threads > most:
            # More threads than cores would test the machine instead of the claim.
            console.warning(f"this process may use {most} of the cores, too few for: {run.command}")
            continue
        plan = make_plan(run.suite, Options(out=folder, select=run.select, threads=run.threads))
        readers = [one for one in lacking if run in one.runs]
        known_sweeps = narrow and all(one.sweeps for one in readers)
        sweeps = {name for one in readers for name in one.sweeps} if known_sweeps else set[str]()
        if sweeps:
            plan = replace(plan, only=frozenset(cell.cell_id for cell in plan.cells if cell.sweep in sweeps))
        console.note(f"measuring: {run.command}" + (f", only {', '.join(sorted(sweeps))}" if sweeps else ""))
        measured(plan)


_OF_NUMBERS: dict[Verdict, str] = {"holds": "reproduced", "fails": "not reproduced"}


def _print(judged: Judgement) -> None:
    margin, said = 16 if judged.claim.table else 12, _said(judged).removesuffix(" here")
    if console.width() < margin + _LEAST:
        console.line(said)
        margin, said = 2, ""
    width = console.width() - margin
    lines = console.wrapped(judged.claim.says, width)
    for below in (judged.evidence, judged.claim.note):
        lines += [f"  {line}" for line in console.wrapped(below, width - 2)]
    for place, line in enumerate(lines):
        console.line(f"{'' if place else said:<{margin}}{line}")


_LEAST = 30
"""Fewest columns for a claim beside its verdict; with less room it stands below."""


def _said(judged: Judgement) -> str:
    return _OF_NUMBERS.get(judged.verdict, judged.verdict) if judged.claim.table else judged.verdict


def _print_rest(judged: list[Judgement]) -> None:
    lines: dict[str, list[str]] = {}
    for one in judged:
        heading = f"{'Cannot be here' if one.claim.table else 'No verdict'}: {one.why}"
        said, command = one.claim.says, one.claim.command
        if command and one.why.endswith(command):
            heading = f"Not measured yet; measure with: {command}"
        elif not one.claim.table and one.claim.test is None:
            heading, said = "Without a test", f"{said} ({one.why})"
        lines.setdefault(heading, []).append(said)
    for heading, members in sorted(lines.items(), key=lambda item: not item[0].startswith("Not")):
        console.line()
        for line in console.wrapped(heading, console.width(), "  "):
            console.heading(line)
        for said in members:
            console.paragraph(f"- {said}")


def _as_data(judged: Judgement, table: pd.DataFrame | None) -> dict[str, object]:
    from attnbench.answers.claims.assessment import needed_by, rows_by_run, rows_of

    claim = judged.claim
    read = None if table is None else rows_of(table, needed_by(claim, table))
    rows = {} if read is None else rows_by_run(read)
    return {
        "claim": claim.id,
        "says": claim.says,
        "source": claim.source,
        "verdict": _said(judged),
        "evidence": judged.evidence,
        "command": claim.command,
        "suite": claim.suite,
        "sweeps": [] if read is None else list(dict.fromkeys(map(str, read["sweep"]))),
        "rows": {run: list(cells) for run, cells in rows.items()},
        "missing": [one._asdict() for one in judged.missing],
        "points": [
            {"at": one.at, "value": one.value, "low": one.low, "high": one.high, "holds": one.holds}
            for one in judged.points
        ],
        "note": claim.note,
    }
