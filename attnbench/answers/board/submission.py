"""The folder of a run that is handed in to a board: rows, environment and suite, without samples and private text."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path
from typing import Any

from attnbench.answers.board.runs import LeftOut, take
from attnbench.answers.report.sources import title_of
from attnbench.errors import CannotCreate, UsageError
from attnbench.files import PACKED, make_folder, replace_file
from attnbench.results.manifest import ENDS, OPENING, RUN_ID, THINNED
from attnbench.results.runs import newest_run
from attnbench.results.store import RECORDS, SUITE, TABLE, RunFolder
from attnbench.text import without_secrets

_HOMES = r"(?<![\w.~-])(?:(?:/home|/Users|[A-Za-z]:\\+Users)[/\\]+[^/\\\s\"',;:]+|/root)(?![\w.-])"
"""Home folders of any user, in JSON."""


def submit(run: str | Path, to: str | Path = "runs") -> tuple[Path, list[LeftOut]]:
    """Write the folder that hands a run in to a board, as ``attnbench submit`` does; give it, and rows no board shows.

    Args:
        run: the folder of a run, or of a suite for its newest.
        to: the folder that holds the runs of a board; the new one in it is named by date and machine.

    Raises:
        ResultsError: there is no run, runs of several suites, or one that a board does not take.
        UsageError: a board would show none of its rows.
        CannotCreate: it was handed in before, or the folder cannot be made.
    """
    folder = newest_run(Path(run))
    machine, out = take(folder.path, folder.path.name)
    if not len(machine.rows):
        why = "; ".join(f"{one.what}: {one.why}" for one in out)
        raise UsageError(f"{folder.path}: {why}; so no board shows it; measure it again")
    facts = folder.environment
    date = re.sub("[-:]", "", str(facts.get("started_at", "")))[:15] or folder.path.name
    place = Path(to) / "-".join([date, re.sub("[^a-z0-9]+", "-", title_of(machine).lower()).strip("-")])
    if place.exists():
        raise CannotCreate(f"{place} exists: this run was handed in before; choose another folder with --to")
    make_folder(Path(to), "--to")
    kept = {name: value for name, value in facts.items() if name not in (ENDS, OPENING)}
    suite = (folder.path / SUITE).read_text(encoding="utf-8")
    records = [record.to_json() for record in folder.in_order()]
    about, suite, records = _for_all([{**kept, THINNED: facts.get(ENDS, {})}, suite, records])
    thin = RunFolder.create(place, environment=about, suite_text=suite)
    with thin.lock():
        thin.correct({name: facts[name] for name in (RUN_ID,) if name in facts})
        thin.append(RECORDS, records)
        thin.write_csv(thin.in_order())
        thin.conclude()
    for file in (place / RECORDS, place / TABLE):
        replace_file(file.with_name(file.name + PACKED), lzma.compress(file.read_bytes(), preset=9))
        file.unlink()
    (place / ".lock").unlink(missing_ok=True)
    return place, out


def _for_all(data: Any) -> Any:
    """The same data without homes of people, passwords and tokens."""
    return json.loads(re.sub(_HOMES, "~", without_secrets(json.dumps(data, ensure_ascii=False))))
