"""The whole report: rows and findings put into the page's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from attnbench.answers.report.against import Against, Change
from attnbench.answers.report.answer import answer
from attnbench.answers.report.figures import draw_views, draw_whole
from attnbench.answers.report.laws import Checked, unchecked
from attnbench.answers.report.rows import marked, relative, table, tokens
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
from attnbench.answers.report.views import found_in, task_rows, views
from attnbench.figures import FIGURES
from attnbench.figures.kit.inline import Shared
from attnbench.figures.kit.palette import DARK, LIGHT, variables
from attnbench.measure.status import Status
from attnbench.results.frame.marks import notes
from attnbench.results.frame.scored import family_of
from attnbench.results.frame.words import in_words
from attnbench.results.scores import joint
from attnbench.text import one_line
from attnbench.version import __version__

_HERE = Path(__file__).parent / "parts"
_OWN = ("tradeoff", "scaling", "error", "scores")
"""Figures of every report."""


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

    ``title``: by default the suites and the machine. ``figures``: also include the other ones of ``attnbench plot``.
    ``doubts``: warnings from reading the runs. Raises ResultsError if this is not a results table.
    """
    machines = by_machine(sources)
    changes = against.changes if against else {}
    shared = Shared()
    sections = [
        _section(number, machine, changes, shared, figures=figures) for number, machine in enumerate(machines, start=1)
    ]
    titles = [title_of(machine) for machine in machines]
    for shown, machine, name in zip(sections, machines, titles, strict=True):
        if titles.count(name) > 1:
            shown["title"] = one_line(f"{name}: {', '.join(machine.environments)}", 160)
    frame = sources.frame
    page: str = _template().render(
        title=one_line(title or _title(machines), 160),
        version=__version__,
        sections=sections,
        against=against,
        laws=laws,
        unchecked=unchecked(laws, frame["variant"]) if laws else [],
        doubts=[one_line(said, 400) for said in doubts],
        light=variables(LIGHT),
        dark=variables(DARK),
        shared=shared,
        style=(_HERE / "report.css").read_text(encoding="utf-8"),
        script=(_HERE / "report.js").read_text(encoding="utf-8"),
    )
    return page


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
    number: int, machine: Machine, changes: Mapping[str, Change], shared: Shared, *, figures: bool
) -> dict[str, Any]:
    rows = marked(machine.rows)
    every = views(rows)
    scored = found_in(rows)
    floors = [known.get("noise_floor") or 0.0 for known in machine.environments.values()]
    beside = relative([view.setting for view in every], max(floors, default=0.0))
    compared = sum(one.low is not None for one in beside.values())
    lines = table(rows, beside, changes)
    drawn, left_out = draw_views(rows, every, shared)
    others = [kind for kind in FIGURES if kind not in _OWN and (figures or kind == "swap")]
    drawn += draw_whole([*_OWN[2:], *others], rows, shared)
    return {
        "id": str(number),
        "title": title_of(machine),
        "facts": heading(machine),
        "answer": answer(rows, every, scored, beside),
        "table": lines,
        "figures": {kind: [one for one in drawn if one.kind == kind] for kind in _OWN},
        "others": [one for one in drawn if one.kind not in _OWN],
        "opens": (0, every[0].n) if every else (),
        "left_out": left_out,
        "tasks": [(one.heading, one.reference is not None, task_rows(one, family_of(scored))) for one in scored],
        "marks": [*([f"Ratios: {joint(compared)}"] if compared else []), *notes(lines.marked)],
        "failed": failed(rows),
        "warnings": warnings(rows),
        "runs": [(name_of(run, known, rows), environment_of(known)) for run, known in machine.environments.items()],
        "rows": len(rows),
        "ids": sorted({str(one) for one in rows["machine_id"] if one}),
    }


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
