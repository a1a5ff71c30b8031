"""The whole report: rows and findings put into the page's template."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from attnbench.answers.history import history
from attnbench.answers.report.against import Against, Change
from attnbench.answers.report.answer import answer
from attnbench.answers.report.check_findings import CheckedVariant, unchecked
from attnbench.answers.report.figures import draw_views, draw_whole, drawn
from attnbench.answers.report.provenance import (
    MachineClass,
    by_machine,
    environment_of,
    folders_of,
    heading,
    name_of,
    title_of,
    warnings,
)
from attnbench.answers.report.table_rows import marked, table, tokens
from attnbench.answers.report.views import found_in, task_rows, views
from attnbench.errors import AttnbenchError
from attnbench.figures import FIGURES
from attnbench.figures.history import draw_history
from attnbench.figures.kit.inline import SharedStyles
from attnbench.figures.kit.palette import DARK, LIGHT, variables
from attnbench.measure.status import Status
from attnbench.results.frame.marks import notes
from attnbench.results.frame.relative import relative
from attnbench.results.frame.scored import family_of
from attnbench.results.frame.settings import RUN
from attnbench.results.frame.words import in_words
from attnbench.results.intervals import joint
from attnbench.suite.cell import UNTOUCHED
from attnbench.text import one_line
from attnbench.version import __version__

_HERE = Path(__file__).parent / "parts"
_OWN = ("tradeoff", "scaling", "error", "scores")
"""Figures of every report."""


def make_page(
    frame: pd.DataFrame,
    *,
    title: str | None = None,
    laws: Sequence[CheckedVariant] = (),
    figures: bool = False,
    against: Against | None = None,
    doubts: Sequence[str] = (),
) -> str:
    """The report as one HTML document; the same runs give the same text.

    ``title``: by default the suites and the machine. ``figures``: also include the other ones of ``attnbench plot``.
    ``doubts``: warnings from reading the runs. Raises ResultsError if this is not a results table.
    """
    machines, folders = by_machine(frame), folders_of(frame)
    changes = against.changes if against else {}
    shared = SharedStyles()
    others = [kind for kind in FIGURES if kind not in _OWN and (figures or kind == "swap")]
    sections = [
        section(number, machine, shared, changes=changes, figures=[*_OWN[2:], *others])
        for number, machine in enumerate(machines, start=1)
    ]
    titles = [title_of(machine) for machine in machines]
    for shown, machine, name in zip(sections, machines, titles, strict=True):
        shown["trends"] = list(_trends(machine, folders, shared))
        if titles.count(name) > 1:
            shown["title"] = one_line(f"{name}: {', '.join(machine.environments)}", 160)
    return rendered(
        "report.html",
        shared,
        title=title or _title(machines),
        sections=sections,
        against=against,
        laws=laws,
        unchecked=unchecked(laws, frame.loc[frame["variant"] != UNTOUCHED, "variant"]) if laws else [],
        doubts=[one_line(said, 400) for said in doubts],
        home="",
    )


def rendered(template: str, shared: SharedStyles, title: str, **content: Any) -> str:
    """A page from one of the templates in ``parts``, with its colours, style and script."""
    content |= {"title": one_line(title, 160), "version": __version__, "shared": shared}
    content |= {"light": variables(LIGHT), "dark": variables(DARK)}
    for name, file in (("style", "report.css"), ("script", "report.js")):
        content[name] = (_HERE / file).read_text(encoding="utf-8")
    return str(_templates().get_template(template).render(content))


@cache
def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _title(machines: Sequence[MachineClass]) -> str:
    suites = list(dict.fromkeys(suite for machine in machines for suite in machine.rows["suite"]))
    names = ", ".join(suites[:4]) + (f" and {len(suites) - 4} more" if len(suites) > 4 else "")
    where = title_of(machines[0]) if len(machines) == 1 else f"{len(machines)} machines"
    return f"{names} on {where}"


def section(
    number: int,
    machine: MachineClass,
    shared: SharedStyles,
    *,
    changes: Mapping[str, Change] | None = None,
    figures: Sequence[str] = (),
    bases: Collection[str] = (),
) -> dict[str, Any]:
    """The content of a machine's section.

    Args:
        figures: those besides speed against error and time over length.
        bases: labels to which other rows are relative; none: softmax, with an answer in words.
    """
    rows = marked(machine.rows)
    every = views(rows)
    scored = found_in(rows)
    floors = [known.get("noise_floor") or 0.0 for known in machine.environments.values()]
    beside = relative([view.setting for view in every], max(floors, default=0.0), bases)
    family = max((one.family for one in beside.values()), default=0)
    lines = table(rows, beside, changes or {})
    shown, left_out = draw_views(rows, every, shared)
    shown += draw_whole(figures, rows, shared)
    return {
        "id": str(number),
        "title": title_of(machine),
        "facts": heading(machine),
        "answer": answer(rows, every, scored, beside) if not bases else (),
        "bases": bases,
        "views": every,
        "beside": beside,
        "trends": (),
        "table": lines,
        "figures": {kind: [one for one in shown if one.kind == kind] for kind in _OWN},
        "others": [one for one in shown if one.kind not in _OWN],
        "opens": (0, every[0].n) if every else (),
        "left_out": left_out,
        "tasks": [(one.heading, one.reference is not None, task_rows(one, family_of(scored))) for one in scored],
        "marks": [*([f"Ratios: {joint(family)}"] if family else []), *notes(lines.marked)],
        "failed": failed(rows),
        "warnings": warnings(rows),
        "runs": [(name_of(run, known, rows), environment_of(known)) for run, known in machine.environments.items()],
        "rows": len(rows),
        "ids": sorted({str(one) for one in rows["machine_id"] if one}),
    }


def _trends(machine: MachineClass, folders: Mapping[str, Path], shared: SharedStyles) -> Iterator[Mapping[str, Any]]:
    """The history of each suite of which a machine has several runs; ``folders``: name of a run -> its folder."""
    for suite, rows in machine.rows.groupby("suite", sort=False) if RUN in machine.rows else ():
        runs = [folders[run] for run in dict.fromkeys(rows[RUN]) if run in folders]
        if len(runs) < 2:
            continue
        try:
            found = history(runs, {"metric": "time"})
        except AttnbenchError as error:
            yield {"suite": suite, "said": [f"No history: {one_line(str(error), 400)}"], "figure": None, "rows": []}
            continue
        draw = partial(draw_history, pd.DataFrame(found.to_rows()), found.metric, about=found.how)
        said = [found.head, *found.foot, *(f"left out: {run}: {one_line(why)}" for run, why in found.left_out.items())]
        yield {"suite": suite, "said": said, "figure": drawn("history", draw, shared), "rows": found.table()}


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
