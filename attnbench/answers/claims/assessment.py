"""The verdict on a claim, computed from rows.

A point is one place at which a claim holds or fails, such as a pair of rows that were measured alike. It decides only
if its whole interval lies on one side of the claim's limit. A claim holds if all points say so, fails if none does,
and depends if they disagree. It has no verdict while a row is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import pandas as pd

from attnbench.answers.claims.claim_points import Point, having, is_spec, of_variant, points_of
from attnbench.answers.claims.claims import Ability, Claim, CrossoverTest, RatioTest, ScoreTest, Value
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.measure.status import UNFINISHED, Status
from attnbench.results.frame.settings import RUN
from attnbench.results.record import Record
from attnbench.suite.expand import expand
from attnbench.suite.load import load_suite
from attnbench.units import format_number

_MEASURE = {"time_median_s": "time", "peak_bytes": "memory", "rel_error": "error"}
"""Columns that only some sweeps measure -> the measure's name in the sweep."""


class Needed(NamedTuple):
    """A row that a claim needs."""

    cell_id: str
    threads: int | None = None


def needed_by(claim: Claim, frame: pd.DataFrame | None) -> tuple[Needed, ...]:
    """The rows, failed or not, without which a claim has no verdict, on each device with rows of its suite."""
    test = claim.test
    if test is None or claim.suite is None or isinstance(test, Ability):
        return ()
    own = [] if frame is None else list(dict.fromkeys(frame.loc[frame["suite"] == claim.suite, "device"]))
    sides: list[tuple[str, Mapping[str, Value]]] = [(test.top, test.where)]
    if (bottom := getattr(test, "bottom", None)) is not None:
        instead = test.bottom_where if isinstance(test, RatioTest | ScoreTest) else {}
        sides.append((bottom, {**test.where, **instead}))
    found = (
        Needed(cell_id, None if where.get("threads") is None else int(str(where["threads"])))
        for device in own or ["cpu"]
        for label, where in sides
        for cell_id in _about(_cells(claim.suite, str(device)), claim, label, where)
    )
    return tuple(dict.fromkeys(found))


def rows_of(frame: pd.DataFrame, needed: Sequence[Needed]) -> pd.DataFrame:
    """Those rows of a table, without interrupted ones."""
    chosen = pd.Series(False, index=frame.index)
    for threads in {one.threads for one in needed}:
        cells = frame["cell_id"].isin([one.cell_id for one in needed if one.threads == threads])
        chosen |= cells if threads is None else cells & (frame["threads"] == threads)
    return frame[chosen & ~frame["status"].isin(UNFINISHED)]


def missing_of(frame: pd.DataFrame, needed: Sequence[Needed]) -> tuple[Needed, ...]:
    """The needed rows that a table lacks."""
    rows = rows_of(frame, needed)
    there = {*zip(rows["cell_id"], rows["threads"], strict=True), *((cell, None) for cell in rows["cell_id"])}
    return tuple(one for one in needed if one not in there)


def rows_by_run(rows: pd.DataFrame) -> dict[str, tuple[str, ...]]:
    """Run -> ids of the cells of these rows; a table of one run has a run without a name."""
    runs = rows[RUN] if RUN in rows else [""] * len(rows)
    found: dict[str, list[str]] = {}
    for run, cell in zip(runs, rows["cell_id"], strict=True):
        found.setdefault(str(run), []).append(str(cell))
    return {run: tuple(dict.fromkeys(cells)) for run, cells in found.items()}


@cache
def _cells(suite: str, device: str) -> pd.DataFrame:
    cells = expand(load_suite(suite), device=device)
    rows = [Record.of(cell, Status.OK).to_json() | {"measure": cell.measure} for cell in cells]
    return pd.DataFrame(rows)


def _about(cells: pd.DataFrame, claim: Claim, label: str, where: Mapping[str, Value]) -> list[str]:
    test = claim.test
    rows = of_variant(having(cells, {name: value for name, value in where.items() if name != "threads"}), label)
    if isinstance(test, ScoreTest):
        wanted = [parse_spec(task) for task in test.tasks]
        trained = [parse_spec(task) if task else None for task in rows["task"]]
        about = [one is not None and any(is_spec(one, task) for task in wanted) for one in trained]
    else:
        measure = _MEASURE.get(str(getattr(test, "of", "")))
        about = [measure is None or measure in measures for measures in rows["measure"]]
    return [str(cell) for cell in rows["cell_id"][about]]


Verdict = Literal["holds", "fails", "depends on", "open", "not tested here"]
"""``open``: it was tested, and every interval holds both answers."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A claim with its verdict."""

    claim: Claim
    verdict: Verdict
    points: tuple[Point, ...] = ()
    why: str = ""
    missing: tuple[Needed, ...] = ()
    """Rows that it lacks; its points are those of the others."""

    @property
    def evidence(self) -> str:
        """The points in few words: all of them if they are few, else the ranges where it holds and fails."""
        if self.why:
            return self.why + (f"; so far {self._seen}" if self.missing and self.points else "")
        return self._seen

    @property
    def _seen(self) -> str:
        if len(self.points) <= _FEW:
            return "; ".join(map(str, self.points))
        places = {
            word: [point for point in self.points if point.holds is answer]
            for word, answer in (("holds", True), ("fails", False), ("open", None))
        }
        return "; ".join(f"{word} at {_most(found)}" for word, found in places.items() if found)


_FEW = 4


def _most(points: Sequence[Point]) -> str:
    if len(points) == 1:
        return str(points[0])
    shown = ", ".join(point.at.replace(", ", " ") for point in points[:_FEW])
    rest = f" and {len(points) - _FEW} more" if len(points) > _FEW else ""
    values = [point.value for point in points]
    what = f"{points[0].what}: " if points[0].what else ""
    return f"{shown}{rest} ({what}least {format_number(min(values))}, largest {format_number(max(values))})"


def judge_all_rows(claim: Claim, frame: pd.DataFrame | None) -> Judgement:
    """Judge a claim by the rows that its suite measures, and only if all of them are there."""
    needed = needed_by(claim, frame)
    if frame is None or not needed:
        return replace(judge(claim, frame), missing=needed)
    found, missing = judge(claim, rows_of(frame, needed)), missing_of(frame, needed)
    broken = frame[frame["status"].isin(UNFINISHED) & frame["cell_id"].isin([one.cell_id for one in missing])]
    if len(broken):
        why = f"{_failure(claim, broken)}; {claim.command} measures it anew"
    elif not missing or len(missing) == len(needed):
        return replace(found, missing=missing)
    else:
        verb, object_ = ("is", "it") if len(missing) == 1 else ("are", "them")
        why = f"{len(missing)} of {len(needed)} rows {verb} missing; measure {object_} with: {claim.command}"
    return replace(found, verdict="not tested here", why=why, missing=missing)


def judge(claim: Claim, frame: pd.DataFrame | None) -> Judgement:
    """Judge a claim by the rows of a table, even if some are missing."""
    if claim.test is None:
        return Judgement(claim, "not tested here", why=claim.missing)
    points = list(points_of(claim, frame))
    if not points and frame is not None and (why := _failure(claim, frame)):
        return Judgement(claim, "not tested here", why=why)
    if claim.table and frame is not None and isinstance(claim.test, RatioTest):
        points = [replace(one, said=one.said + _best_exact(claim, claim.test, frame)) for one in points]
    if not points:
        return Judgement(claim, "not tested here", why=f"no such rows; measure them with: {claim.command}")
    answers = {point.holds for point in points}
    if answers == {None}:
        ends = "; ".join(map(str, points[:_FEW]))
        return Judgement(claim, "open", tuple(points), f"the intervals hold both answers: {ends}")
    verdict: Verdict = "holds" if answers == {True} else "fails" if True not in answers else "depends on"
    return Judgement(claim, verdict, tuple(points))


def _best_exact(claim: Claim, test: RatioTest, frame: pd.DataFrame) -> str:
    rows = having(frame[(frame["status"] == Status.OK) & frame[test.of].notna()], test.where)
    is_exact = {name: name in VARIANTS and VARIANTS.get(name).traits.exact for name in set(rows["variant"])}
    rows = rows[[is_exact[name] for name in rows["variant"]]].sort_values(test.of)
    for best in rows["label"].head(1):
        beside = RatioTest(
            kind="ratio", of=test.of, where=test.where, top=best, bottom=test.bottom or test.top, above=1
        )
        alone = frame[(frame["label"] == best) | (frame["variant"] != rows["variant"].iloc[0])]
        for one in points_of(claim.model_copy(update={"test": beside}), alone):
            return f"; best exact here: {format_number(one.value)} × {best}"
    return ""


def _failure(claim: Claim, rows: pd.DataFrame) -> str:
    """The reason why rows of a claim decide nothing; empty if it is another than a failure or too few rounds."""
    test = claim.test
    if claim.table and isinstance(test, RatioTest | CrossoverTest):
        rows = having(rows, test.where)
        rows = pd.concat([of_variant(rows, label) for label in (test.bottom, test.top) if label])
    for row in rows[rows["status"] != Status.OK].head(1).to_dict("records"):
        return f"{row['label']}: {row['status']}: {row['reason']}"
    timed = rows["time_median_s"].notna() & (getattr(test, "of", "") == "time_median_s")
    for row in rows[timed & rows["time_ci_low_s"].isna()].head(1).to_dict("records"):
        more = f"; {claim.command} --rounds 5 gives one" * bool(claim.suite)
        return f"{row['label']}: without an interval: too few rounds, {row['time_rounds']:.0f}{more}"
    return ""
