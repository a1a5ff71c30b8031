"""``attnbench claims``: published claims against measurements on this machine."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.cli.options import AsJson
from attnbench.cli.screen import console
from attnbench.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from attnbench.answers.claims.claims import Claim
    from attnbench.answers.claims.verdict import Judgement, Verdict


def claims(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Results folders or runs with the rows. Default: results, if it is there.", show_default=False
        ),
    ] = None,
    select: Annotated[
        str | None, typer.Option("-k", metavar="TEXT", help="Only claims with this text in name, claim or source.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="First measure what is missing: the suites that the claims name.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare published claims with what was measured on this machine.

    A claim holds if the whole interval says so at every point, and fails if it says so at no point. Otherwise it
    depends on the setting. It is open if all intervals hold both answers. It is not tested while a row is missing that
    its suite would measure. --json names all rows by run and cell.
    """
    from attnbench.answers.claims.claims import claims as all_claims
    from attnbench.answers.claims.verdict import judge_all_rows

    wanted = [one for one in all_claims() if _mentions(one, select or "")]
    if not wanted:
        raise UsageError(f"no claim mentions {select!r}; attnbench claims lists all of them")
    if run:
        _measure(wanted, results, narrow=select is not None)
    table = _rows(results)
    judged = [judge_all_rows(one, table) for one in wanted]
    if as_json:
        console.data([_as_data(one, table) for one in judged])
        return
    seen = [one for one in judged if one.points]
    for one in seen:
        _print(one)
    _print_rest([one for one in judged if not one.points])
    counts = Counter(one.verdict for one in judged)
    told = ", ".join(f"{counts[verdict]} {words}" for verdict, words in _COUNTED.items())
    console.line()
    for line in textwrap.wrap(f"Of {len(judged)} claims: {told}.", console.width()):
        console.line(line)


_COUNTED: dict[Verdict, str] = {
    "holds": "hold",
    "fails": "fail",
    "depends on": "depend on the setting",
    "open": "open",
    "not tested here": "not tested here",
}
"""Each verdict in a sentence that counts them."""


def _mentions(claim: Claim, text: str) -> bool:
    return text.casefold() in f"{claim.id} {claim.says} {claim.source}".casefold()


def _rows(results: list[Path] | None) -> pd.DataFrame | None:
    from attnbench.answers.claims.runs import read_rows

    if results is None and not Path("results").is_dir():
        return None
    return read_rows(results or [Path("results")], warn=console.warning)


def _measure(wanted: list[Claim], results: list[Path] | None, *, narrow: bool) -> None:
    """Make the runs of claims without rows, one for each number of threads; if ``narrow``, only their sweeps."""
    from attnbench.answers.claims.verdict import judge_all_rows
    from attnbench.cli.screen.run import measured
    from attnbench.harness.plan import Options, make_plan
    from attnbench.measure.machine import available_cores

    if results and len(results) > 1:
        raise UsageError("--run measures into one results folder; give one")
    folder = results[0] if results else Path("results")
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
        sweeps = _sweeps([one for one in lacking if run in one.runs]) if narrow else set[str]()
        if sweeps:
            plan = replace(plan, only=frozenset(cell.cell_id for cell in plan.cells if cell.sweep in sweeps))
        console.note(f"measuring: {run.command}" + (f", only {', '.join(sorted(sweeps))}" if sweeps else ""))
        measured(plan)


def _sweeps(wanted: list[Claim]) -> set[str]:
    """The sweeps that these claims read; empty if one of them names none."""
    return {name for one in wanted for name in one.sweeps} if all(one.sweeps for one in wanted) else set()


_MARGIN = " " * 12


def _print(judged: Judgement) -> None:
    width = max(console.width() - len(_MARGIN), 30)
    verdict = "not tested" if judged.verdict == "not tested here" else judged.verdict
    first, *rest = textwrap.wrap(judged.claim.says, width)
    console.line(f"{verdict:<{len(_MARGIN)}}{first}")
    below = [*rest, *(f"  {line}" for line in textwrap.wrap(judged.evidence, width - 2))]
    below += [f"  {line}" for line in textwrap.wrap(judged.claim.note, width - 2)] if judged.claim.note else []
    for line in below:
        console.line(f"{_MARGIN}{line}")


def _print_rest(judged: list[Judgement]) -> None:
    by_command: dict[str, list[Judgement]] = {}
    for one in judged:
        by_command.setdefault(one.claim.command, []).append(one)
    for command, members in sorted(by_command.items(), key=lambda item: not item[0]):
        console.line()
        heading = f"Not measured yet; measure with: {command}" if command else "Without a test"
        for line in textwrap.wrap(heading, console.width(), subsequent_indent="  "):
            console.heading(line)
        for one in members:
            said = one.claim.says if command else f"{one.claim.says} ({one.why})"
            for number, line in enumerate(textwrap.wrap(said, max(console.width() - 4, 30))):
                console.line(f"  {line}" if number else f"- {line}")


def _as_data(judged: Judgement, table: pd.DataFrame | None) -> dict[str, object]:
    from attnbench.answers.claims.verdict import needed_by, rows_by_run, rows_of

    claim = judged.claim
    read = None if table is None else rows_of(table, needed_by(claim, table))
    rows = {} if read is None else rows_by_run(read)
    return {
        "claim": claim.id,
        "says": claim.says,
        "source": claim.source,
        "verdict": judged.verdict,
        "evidence": judged.evidence,
        "command": claim.command,
        "suite": claim.suite,
        "sweeps": [] if read is None else list(dict.fromkeys(map(str, read["sweep"]))),
        "rows": {run: list(cells) for run, cells in rows.items()},
        "missing": [one._asdict() for one in judged.missing],
        "points": [
            {"at": one.at, "value": _number(one.value), "low": _number(one.low), "high": _number(one.high)}
            | {"holds": one.holds}
            for one in judged.points
        ],
        "note": claim.note,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
