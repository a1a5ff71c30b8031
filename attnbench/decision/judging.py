"""The verdict on a claim, computed from rows.

A point is one place at which a claim can be seen to hold or to fail: a pair of rows that were measured alike, say. It
answers only if its whole interval lies on one side of the claim's limit. A claim holds if every point says so, fails if
none does, and depends where points disagree. It has no verdict while a row is missing that its suite would measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd

from attnbench.decision.claim_cells import Needed, missing_of, needed_by, rows_of
from attnbench.decision.claim_points import Point, points_of
from attnbench.decision.claims import Claim
from attnbench.units import format_number

Verdict = Literal["holds", "fails", "depends on", "open", "not tested here"]
"""``open``: it was tested, and every interval holds both answers."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A claim with its verdict."""

    claim: Claim
    verdict: Verdict
    points: tuple[Point, ...] = ()
    why: str = ""
    """Why the claim is not tested, or is open."""
    missing: tuple[Needed, ...] = ()
    """Rows that it needs and that are not there; its points are those of the others."""

    @property
    def evidence(self) -> str:
        """The points in few words: all of them if they are few or disagree little, else where it holds and fails."""
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
"""Most points that are listed one by one."""


def _most(points: Sequence[Point]) -> str:
    shown = ", ".join(point.at.replace(", ", " ") for point in points[:_FEW])
    rest = f" and {len(points) - _FEW} more" if len(points) > _FEW else ""
    values = [point.value for point in points]
    return f"{shown}{rest} ({format_number(min(values))} to {format_number(max(values))})"


def judge_all_rows(claim: Claim, frame: pd.DataFrame | None) -> Judgement:
    """Hold a claim to those rows of a table that its suite measures, and to all of them.

    Args:
        frame: as for :func:`judge`.
    """
    needed = needed_by(claim, frame)
    if frame is None or not needed:
        return replace(judge(claim, frame), missing=needed)
    found, missing = judge(claim, rows_of(frame, needed)), missing_of(frame, needed)
    if not missing or len(missing) == len(needed):
        return replace(found, missing=missing)
    verb, object_ = ("is", "it") if len(missing) == 1 else ("are", "them")
    why = f"{len(missing)} of {len(needed)} rows {verb} missing; measure {object_} with: {claim.command}"
    return replace(found, verdict="not tested here", why=why, missing=missing)


def judge(claim: Claim, frame: pd.DataFrame | None) -> Judgement:
    """Hold a claim to the rows of a table, whether or not these are all that it needs.

    Args:
        frame: a table as :func:`attnbench.plots.load.read_results` gives it; None where there is none.
    """
    if claim.test is None:
        return Judgement(claim, "not tested here", why=claim.missing)
    points = list(points_of(claim, frame))
    if not points:
        return Judgement(claim, "not tested here", why=f"no such rows; measure them with: {claim.command}")
    answers = {point.holds for point in points}
    if answers == {None}:
        ends = "; ".join(map(str, points[:_FEW]))
        return Judgement(claim, "open", tuple(points), f"the intervals hold both answers: {ends}")
    verdict: Verdict = "holds" if answers == {True} else "fails" if True not in answers else "depends on"
    return Judgement(claim, verdict, tuple(points))
