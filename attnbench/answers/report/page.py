"""The whole report: rows and findings put into the page's template."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from attnbench.answers.report.against import Against, Change
from attnbench.answers.report.answer import answer
from attnbench.answers.report.laws import Checked, unchecked
from attnbench.answers.report.rows import marked, of_all, table, tokens
from attnbench.answers.report.sources import (
    Machine,
    Sources,
    by_machine,
    environment_of,
    heading,
    name_of,
    title_of,
    warnings,
)
from attnbench.answers.report.views import as_data, found_in, how_trained, task_data, task_notes, views
from attnbench.errors import UsageError
from attnbench.figures.kit.page import NothingToDraw
from attnbench.figures.kit.palette import DARK, LIGHT
from attnbench.measure.status import Status
from attnbench.results.frame.marks import notes
from attnbench.results.frame.scored import family_of
from attnbench.results.frame.settings import RUN
from attnbench.results.frame.words import in_words, short_names
from attnbench.text import one_line
from attnbench.version import __version__

_HERE = Path(__file__).parent / "parts"
_SCRIPTS = ("format", "plane", "tip", "points", "tradeoff", "growth", "tasks", "table", "start")
"""Files in the order of their definitions."""


def make_page(
    sources: Sources,
    *,
    title: str | None = None,
    laws: Sequence[Checked] = (),
    figures: bool = False,
    against: Against | None = None,
    doubts: Sequence[str] = (),
) -> str:
    """The report as one HTML document; the same runs give the same text.

    ``title``: by default the suites and the machine. ``figures``: also include those of ``attnbench plot``, as SVG.
    ``doubts``: warnings from reading the runs. Raises ResultsError if this is not a results table.
    """
    families = [*LIGHT.families]
    machines = by_machine(sources)
    changes = against.changes if against else {}
    made = [
        _section(number, machine, families, changes, figures=figures)
        for number, machine in enumerate(machines, start=1)
    ]
    titles = [title_of(machine) for machine in machines]
    for (shown, _), machine, name in zip(made, machines, titles, strict=True):
        if titles.count(name) > 1:
            shown["title"] = one_line(f"{name}: {', '.join(machine.environments)}", 160)
    frame = sources.frame
    colours = [(LIGHT.family(name), DARK.family(name)) for name in families]
    data = {"families": families, "against": against.name if against else None, "sections": [data for _, data in made]}
    page: str = _template().render(
        title=one_line(title or _title(machines), 160),
        version=__version__,
        sections=[shown for shown, _ in made],
        against=against,
        laws=laws,
        unchecked=unchecked(laws, frame["variant"]) if laws else [],
        doubts=[one_line(said, 400) for said in doubts],
        colours=colours,
        light=LIGHT,
        dark=DARK,
        data=as_json(data),
        style=(_HERE / "report.css").read_text(encoding="utf-8"),
        script="\n".join((_HERE / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS),
    )
    return page


def as_json(value: Any) -> str:
    """JSON for a ``script`` element: without ``<`` no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


@cache
def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html")


def _title(machines: Sequence[Machine]) -> str:
    suites = list(dict.fromkeys(suite for machine in machines for suite in machine.rows["suite"]))
    names = ", ".join(suites[:4]) + (f" and {len(suites) - 4} more" if len(suites) > 4 else "")
    where = title_of(machines[0]) if len(machines) == 1 else f"{len(machines)} machines"
    return f"{names} on {where}"


def _section(
    number: int, machine: Machine, families: list[str], changes: Mapping[str, Change], *, figures: bool
) -> tuple[dict[str, Any], Any]:
    rows = marked(machine.rows)
    every = views(rows)
    scored = found_in(rows)
    names, _ = short_names(rows)
    data = {
        "id": str(number),
        **table(rows, families, of_all([view.setting for view in every]), changes),
        "views": [as_data(view) for view in every],
        "tasks": [task_data(one, families, family_of(scored)) for one in scored],
        "names": {label: name for label, name in names.items() if label != name},
    }
    shown = {
        "id": str(number),
        "title": title_of(machine),
        "facts": heading(machine),
        "answer": answer(rows, every, scored),
        "views": len(every),
        "grows": any(view.lines for view in every),
        "tasks": len(scored),
        "how": how_trained(rows, scored) if scored else "",
        "notes": [line for line in task_notes(rows, scored) if line] if scored else [],
        "marks": notes(text for row in data["rows"] for text in row if isinstance(text, str)),
        "failed": failed(rows),
        "warnings": warnings(rows),
        "runs": [(name_of(run, known, rows), environment_of(known)) for run, known in machine.environments.items()],
        "figures": _figures(machine) if figures else [],
        "rows": len(rows),
        "ids": sorted({str(one) for one in rows["machine_id"] if one}),
    }
    return shown, data


def _figures(machine: Machine) -> list[tuple[str, str, list[str]]]:
    from tempfile import TemporaryDirectory

    from attnbench.figures import draw_all

    rows = machine.rows.drop(columns=RUN, errors="ignore") if len(machine.environments) == 1 else machine.rows
    with TemporaryDirectory() as folder:
        try:
            files = draw_all(rows, Path(folder), ("svg",))
        except (NothingToDraw, UsageError):
            return []
        notes = {file.stem: file.read_text("utf-8").splitlines() for file in files if file.suffix == ".txt"}
        return [
            (file.stem, f"data:image/svg+xml;base64,{b64encode(file.read_bytes()).decode()}", notes.get(file.stem, []))
            for file in files
            if file.suffix == ".svg"
        ]


@dataclass(frozen=True)
class Failure:
    """Cells that ended alike for the same reason."""

    status: str
    meaning: str
    reason: str
    labels: tuple[str, ...]
    where: str
    """Lengths and the measured pass: ``n = 4096, 8192 · forward pass``."""
    cells: int


def failed(rows: pd.DataFrame) -> list[Failure]:
    """Failures first, then settings that the mathematics of a variant does not allow."""
    bad = rows[rows["status"] != Status.OK]
    found = [
        Failure(
            str(status),
            Status(str(status)).meaning,
            str(reason),
            tuple(dict.fromkeys(part["label"])),
            f"n = {', '.join(tokens(n) for n in sorted(set(part['seq_len'])))}; {level}, {in_words('pass', pass_)}",
            len(part),
        )
        for (status, reason, level, pass_), part in bad.groupby(["status", "reason", "level", "pass"], sort=False)
    ]
    return sorted(found, key=lambda one: one.status == Status.UNSUPPORTED)
