"""A match on a terminal: its progress, then a line for each variant and the sentences that answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.cli.screen import console
from attnbench.harness.runner import Watcher
from attnbench.results.frame.marks import error_text, name_text
from attnbench.text import quantity
from attnbench.units import format_bytes, format_seconds, with_interval

if TYPE_CHECKING:
    from rich.progress import Progress

    from attnbench.answers.match.budget import MeasuredSetting
    from attnbench.answers.match.match import ReadyMatch
    from attnbench.answers.match.result import Match
    from attnbench.answers.match.search import FoundSetting
    from attnbench.results.record import Record
    from attnbench.suite.cell import Cell


class MatchScreen(Watcher):
    """A bar of settings; the final rounds count as one more."""

    folder: Path | None = None

    def __init__(self, prepared: ReadyMatch, bar: Progress) -> None:
        self.tried: dict[str, list[MeasuredSetting]] = {}
        self._bar = bar
        self._most = [prepared.most_tries(one) for one in prepared.entrants]
        self._each = prepared.trainings.of_one_setting if prepared.trainings else 1
        self._searched = 0
        self._parts: dict[str, float] = {}

    @property
    def most(self) -> int:
        return sum(self._most)

    def searching(self, label: str) -> None:
        """Name the variant in turn; an empty label means the final rounds."""
        ahead = sum(self._most[self._searched :]) if label else 0
        self._searched += 1
        self._show(label or "in turns", total=self._done + ahead + 1)

    def found(self, label: str, point: MeasuredSetting) -> None:
        self.tried.setdefault(label, []).append(point)
        self._parts.clear()
        self._show(f"{point.label}, {len(self.tried[label])} tried")

    @property
    def _done(self) -> int:
        return sum(map(len, self.tried.values()))

    def _show(self, description: str, **more: Any) -> None:
        done = self._done + min(1.0, sum(self._parts.values()) / self._each)
        self._bar.update(self._bar.task_ids[0], completed=done, description=description, **more)

    def begun(self, folder: Path, *, cells: int, visits: int, resumed: int) -> None:
        self.folder = folder
        if resumed:
            console.note(f"resuming {folder}: {quantity(resumed, 'training')} found (--fresh starts anew)")

    def visiting(self, cell: Cell) -> None:
        self._parts.setdefault(cell.cell_id, 0.0)

    def trained(self, cell: Cell, step: int, steps: int) -> None:
        self._parts[cell.cell_id] = step / steps
        self._show(f"{cell.variant.label}, seed {cell.seed}: step {step} of {steps}")

    def visited(self, record: Record) -> None:
        self._parts[record.cell_id] = 1.0
        if record.status not in ("ok", "unsupported"):
            console.note(f"{record.label}, seed {record.seed}: {record.status}: {record.reason}")

    def warned(self, message: str) -> None:
        console.warning(message)


_COLUMNS = ("variant", "knob", "value", "error", "score", "95 % interval", "time", "peak", "tries", "budget")


def print_match(answer: Match, how: str) -> None:
    """Print the results and their comparison; ``how`` describes the process, for the second line."""
    console.line(answer.about)
    console.line(how)
    rows = [_row(answer, one) for one in answer.found]
    console.table(
        _COLUMNS,
        rows,
        right=_COLUMNS[2:-1],
        title=f"\n{answer.budget}",
    )
    console.line()
    for sentence in answer.sentences():
        console.paragraph(sentence)
    if answer.kept is not None:
        console.line(f"trainings: {answer.kept / 'results.csv'}")
    points = [point for one in answer.found for point in one.tries]
    console.mark_notes(
        [*(cell for row in rows for cell in row), *(error_text(one.error, one.error_kind) for one in points)]
    )


def _row(answer: Match, one: FoundSetting) -> list[str]:
    point = one.chosen or one.best(answer.budget) or (one.tries[-1] if one.tries else None)
    label = console.in_parts(one.variant, 24)
    if point is None:
        return [label, one.knob, "-", "-", "-", "-", "-", "-", "0", "not measured"]
    return [
        name_text(label, point.own_form),
        one.knob,
        "-" if point.value is None else str(point.value),
        error_text(point.error, point.error_kind),
        "-" if point.score is None else f"{point.score:.3g}",
        _between(point),
        with_interval(point.time, point.time_low, point.time_high),
        format_bytes(point.memory),
        str(len(one.tries)),
        "met" if one.met(answer.budget) else "not measured" if point.lacks(answer.budget) else "not met",
    ]


def print_tries(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows from before the user stopped the command."""
    columns = ["setting", "", "error", "score", "time", "peak memory"]
    shown = [
        [
            row["label"],
            row["status"],
            *("-" if row[name] is None else f"{row[name]:.3g}" for name in ("error", "score")),
            format_seconds(row["time_median_s"]),
            format_bytes(row["peak_bytes"]),
        ]
        for row in rows
    ]
    console.table(columns, shown, right=columns[2:], title="measured before the stop")


def _between(point: MeasuredSetting) -> str:
    if point.score_low is not None and point.score_high is not None:
        return f"{point.score_low:.2g} to {point.score_high:.2g}"
    return f"{point.spread[0]:.2g} to {point.spread[1]:.2g}" if point.spread else "-"
