"""The rows that a claim needs: the cells of its suite that it is about, with a number of threads if that matters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import pandas as pd

from attnbench.decision.claim_rows import having, is_spec, of_variant
from attnbench.decision.claims import Ability, Claim, Ratio, Score, Value
from attnbench.plots.setting import RUN
from attnbench.record import Record
from attnbench.spec import parse_spec
from attnbench.status import UNFINISHED, Status
from attnbench.suite.expand import expand
from attnbench.suite.load import load_suite

_MEASURE = {"time_median_s": "time", "peak_bytes": "memory", "rel_error": "error"}
"""Columns that a cell has only if its sweep measures them -> what the sweep says."""


class Needed(NamedTuple):
    """One row."""

    cell_id: str
    threads: int | None = None
    """None where rows of any number of threads will do."""


def needed_by(claim: Claim, frame: pd.DataFrame | None) -> tuple[Needed, ...]:
    """The rows without which a claim has no verdict, on each device of which the table has rows of its suite.

    A failed row is a row as well. A claim that is decided without rows, or not at all, needs none.
    """
    test = claim.test
    if test is None or claim.suite is None or isinstance(test, Ability):
        return ()
    own = [] if frame is None else list(dict.fromkeys(frame.loc[frame["suite"] == claim.suite, "device"]))
    sides: list[tuple[str, Mapping[str, Value]]] = [(test.top, test.where)]
    if (bottom := getattr(test, "bottom", None)) is not None:
        instead = test.bottom_where if isinstance(test, Ratio | Score) else {}
        sides.append((bottom, {**test.where, **instead}))
    found = (
        Needed(cell_id, None if where.get("threads") is None else int(str(where["threads"])))
        for device in own or ["cpu"]
        for label, where in sides
        for cell_id in _about(_cells(claim.suite, str(device)), claim, label, where)
    )
    return tuple(dict.fromkeys(found))


def rows_of(frame: pd.DataFrame, needed: Sequence[Needed]) -> pd.DataFrame:
    """Those rows of a table; one that was interrupted is none."""
    chosen = pd.Series(False, index=frame.index)
    for threads in {one.threads for one in needed}:
        cells = frame["cell_id"].isin([one.cell_id for one in needed if one.threads == threads])
        chosen |= cells if threads is None else cells & (frame["threads"] == threads)
    return frame[chosen & ~frame["status"].isin(UNFINISHED)]


def missing_of(frame: pd.DataFrame, needed: Sequence[Needed]) -> tuple[Needed, ...]:
    """Those that a table has no row of."""
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
    """The cells of a shipped suite, with the columns that their rows would have."""
    cells = expand(load_suite(suite), device=device)
    rows = [Record.of(cell, Status.OK).to_json() | {"measure": cell.measure} for cell in cells]
    return pd.DataFrame(rows)


def _about(cells: pd.DataFrame, claim: Claim, label: str, where: Mapping[str, Value]) -> list[str]:
    test = claim.test
    rows = of_variant(having(cells, {name: value for name, value in where.items() if name != "threads"}), label)
    if isinstance(test, Score):
        wanted = [parse_spec(task) for task in test.tasks]
        trained = [parse_spec(task) if task else None for task in rows["task"]]
        about = [one is not None and any(is_spec(one, task) for task in wanted) for one in trained]
    else:
        measure = _MEASURE.get(str(getattr(test, "of", "")))
        about = [measure is None or measure in measures for measures in rows["measure"]]
    return [str(cell) for cell in rows["cell_id"][about]]
