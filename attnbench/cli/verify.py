"""``attnbench verify RUN...``: the rows of a run that are not as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.cli.screen import console
from attnbench.errors import CorruptResults
from attnbench.text import quantity

if TYPE_CHECKING:
    from attnbench.results.audit import Audit


def verify(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold runs.")],
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON on stdout.")] = False,
) -> None:
    """Say which rows were changed, added or lost since attnbench wrote them.

    The exit code is 65 if anything differs from the stored rows. It finds accidents: an edit with new checksums
    leaves no trace.
    """
    from attnbench.results.audit import audit

    folders = [folder for run in runs for folder in _folders(run)]
    audits = [audit(folder) for folder in dict.fromkeys(folders)]
    if as_json:
        console.data([_as_data(one) for one in audits])
    else:
        for one in audits:
            _print(one)
    wrong = [one for one in audits if one.findings]
    if wrong:
        count = sum(len(one.findings) for one in wrong)
        lines = f"{count} thing{'s are' if count > 1 else ' is'}"
        names = str(wrong[0].path) + f" and {len(wrong) - 1} more" * (len(wrong) > 1)
        raise CorruptResults(f"{names}: {lines} not as attnbench wrote {'them' if count > 1 else 'it'}")


def _folders(run: Path) -> list[Path]:
    from attnbench.results.runs import find_runs, no_run

    found = find_runs(run) if run.is_dir() else []
    if not found:
        raise no_run(run)
    return [folder.path for folder in found]


def _print(found: Audit) -> None:
    for line in found.findings:
        console.line(line)
    for line in found.notes:
        console.note(line)
    if not found.findings and found.is_sealed:
        by, on = found.environment.get("attnbench", "unknown"), str(found.environment.get("started_at", ""))[:10]
        rows = quantity(found.rows, "row")
        console.line(f"{found.path}: {rows} as written by attnbench {by} on {on or 'an unknown day'}")


def _as_data(found: Audit) -> dict[str, object]:
    return {
        "run": str(found.path),
        "rows": found.rows,
        "attnbench": found.environment.get("attnbench"),
        "findings": list(found.findings),
        "notes": list(found.notes),
    }
