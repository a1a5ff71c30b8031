"""Settings: rows of one machine, one shape and one method may share a series; others are separated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
import pandas as pd

from attnbench.errors import ResultsError, UsageError, did_you_mean
from attnbench.measure.status import Status
from attnbench.results.frame.marks import name_text
from attnbench.results.frame.words import as_typed, difference
from attnbench.results.record import COLUMNS
from attnbench.suite.axes import ALIKE, FOLLOWING

SAME = (
    *("run", "suite", "level", "pass"),
    *(axis for axis in ALIKE if axis != "seed"),
    *("device", "process", "threads", "quick", "seed", "machine_id", "torch_version", "method_version"),
)
"""Columns in which all rows of one series agree, with those that readers ask about first in front."""
_OF_A_RUN = ("suite", "device", "process", "threads", "machine_id", "torch_version", "method_version", "quick")
"""Columns in which the rows of one run agree."""
PANELS = 6
"""Most settings that one figure shows."""
RUN = "run"
"""Column with the name of each run, in a table read from several runs."""


@dataclass(frozen=True)
class Setting:
    """Rows that were measured alike: one for each label, length and input."""

    rows: pd.DataFrame
    name: str = ""
    """Few words that distinguish it from the other settings: ``bfloat16, causal``; empty for the only one."""
    about: str = ""

    @cached_property
    def ok(self) -> pd.DataFrame:
        return self.rows[self.rows["status"] == Status.OK]

    @cached_property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(self.rows["label"]))

    @cached_property
    def by_length(self) -> Mapping[int, pd.DataFrame]:
        return {int(str(n)): part for n, part in self.rows.groupby("seq_len")}


def check_columns(frame: pd.DataFrame) -> None:
    """Raise ResultsError if the frame is not a results table."""
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise ResultsError(f"not a results table: column {missing[0]} is missing; read it with read_results")


def restrict(frame: pd.DataFrame, only: Mapping[str, object]) -> pd.DataFrame:
    """The rows with the values of ``only``; UsageError lists the existing values if none has one, or no such column."""
    told: list[str] = []
    for column, value in only.items():
        if column not in frame:
            raise UsageError(f"no column {column!r} in the results{did_you_mean(column, frame.columns)}")
        here = frame[column] == value
        if not here.any():
            known = ", ".join(as_typed(one) for one in sorted(frame[column].unique())) or "none"
            among = f" among those with {' and '.join(told)}" if told else ""
            raise UsageError(f"no rows with {column} {as_typed(value)}{among}; there are: {known}")
        frame = frame[here]
        told.append(f"{column} {as_typed(value)}")
    return frame


def check_length(n: int | None, lengths: Iterable[int], what: str) -> None:
    """Raise UsageError if ``n`` is none of the lengths; ``what`` names their contents: rows, pairs."""
    known = sorted(lengths)
    if n is not None and n not in known:
        raise UsageError(f"no {what} at n = {n}; there are: {', '.join(map(str, known)) or 'none'}")


def of_length(rows: pd.DataFrame, n: int | None, what: str) -> pd.DataFrame:
    """The rows of one length, or all if ``n`` is None; UsageError if there are rows, and none of this length."""
    check_length(n if len(rows) else None, set(rows["seq_len"]), what)
    return rows if n is None else rows[rows["seq_len"] == n]


def chosen_length(n: int | None, counts: pd.Series[int], what: str) -> int:
    """``n``, if it is among the counted lengths; by default the one that counts most, and the longest of these."""
    check_length(n, counts.index, what)
    return int(counts[counts == counts.max()].index.max()) if n is None else n


def only_length(rows: pd.DataFrame) -> int | None:
    """The length of all rows; None if they have several."""
    return int(rows["seq_len"].iloc[0]) if rows["seq_len"].nunique() == 1 else None


def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of the sweeps that measured time or memory, or nothing at all; without trainings for a score."""
    check_columns(frame)
    return _of_sweeps(frame[~_is_training(frame)], ["time_median_s", "peak_bytes"], or_empty=True)


def scored(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of trainings for a score, failed ones too."""
    check_columns(frame)
    return _marked(frame[_is_training(frame) | frame["score"].notna()])


def _is_training(frame: pd.DataFrame) -> pd.Series[bool]:
    return frame["protocol"].notna() & (frame["protocol"] != "")


def compared(frame: pd.DataFrame, column: str = "rel_error") -> pd.DataFrame:
    """Rows of the sweeps that measured ``column``, an error or a score."""
    return _of_sweeps(frame, [column], or_empty=False)


def _of_sweeps(frame: pd.DataFrame, columns: Sequence[str], *, or_empty: bool) -> pd.DataFrame:
    check_columns(frame)
    if frame.empty:
        return frame
    sweeps = list(zip(frame["suite"], frame["sweep"], strict=True))

    def with_any(columns: Sequence[str]) -> set[tuple[str, str]]:
        found = np.any([frame[name].notna().to_numpy() for name in columns], axis=0)
        return set(compress(sweeps, found))

    kept = with_any(columns)
    if or_empty:
        kept |= set(sweeps) - with_any(["time_median_s", "peak_bytes", "rel_error", "score"])
    return _marked(frame[np.array([sweep in kept for sweep in sweeps])])


def _marked(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(label=list(map(name_text, frame["label"], frame["own_form"])))


def settings(
    frame: pd.DataFrame, prefer: Mapping[str, Sequence[object]] | None = None, *, also_same: Sequence[str] = ()
) -> list[Setting]:
    """Group the rows that were measured alike: preferred settings first, then those with most measured rows.

    ``prefer``: column -> values, the best first. A preferred setting with less than half as many measured labels as the
    richest comes after the others. ``also_same``: further columns in which rows must agree.
    """
    if frame.empty:
        return []
    frame = _large_with_the_others(frame)
    keys = [key for key in (*SAME, *also_same) if key in frame]
    # In self-attention kv_len equals seq_len at each length; in cross-attention each kv_len is another setting.
    crossed = frame["kv_len"].where(frame["kv_len"] != frame["seq_len"], 0)
    groups = frame.groupby([*(frame[key] for key in keys), crossed], dropna=False, sort=False).ngroup().to_numpy()
    # The newest of several runs comes first; within a run the order is that of the table.
    alike = [frame[key] for key in (*_OF_A_RUN, RUN) if key in frame]
    newest = (
        frame["started_at"]
        .groupby(alike, dropna=False, sort=False)
        .transform("max")
        .to_numpy()[np.unique(groups, return_index=True)[1]]
    )
    parts = [part for _, part in frame.groupby(groups)]
    labels = [part.loc[part["status"] == Status.OK, "label"].nunique() for part in parts]
    ranks = [
        (2 * count < max(labels), *_rank(part, prefer or {}, str(at)))
        for part, count, at in zip(parts, labels, newest, strict=True)
    ]
    parts = [parts[i] for i in sorted(range(len(parts)), key=lambda i: ranks[i])]
    columns = list(dict.fromkeys([*keys, *FOLLOWING, *FOLLOWING.values()]))
    told = pd.concat([part[columns].iloc[:1] for part in parts])
    for name, other in FOLLOWING.items():
        told[name] = told[name].where(told[name] != told[other], 0)
    names = difference(told[[*keys, "kv_len"]])
    return [Setting(_one_each(part), *name) for part, name in zip(parts, names, strict=True)]


def _large_with_the_others(frame: pd.DataFrame) -> pd.DataFrame:
    """Relabel a tuned run's rows that ran with the default allocator only because of their size, and mark them."""
    alike = [frame[key] for key in (*_OF_A_RUN, RUN, "sweep", "level", "pass") if key in frame and key != "process"]
    tuned = (frame["process"] == "tuned").groupby(alike, dropna=False, sort=False).transform("any")
    large = tuned & (frame["process"] == "as-shipped") & ~_is_training(frame)
    return frame.assign(process=frame["process"].mask(large, "tuned"), large=large)


def without_room(found: Sequence[Setting]) -> str:
    """One line on the settings that a figure leaves out and the way to see them."""
    rest = [setting.name for setting in found[PANELS:]]
    names = "; ".join(rest[:PANELS]) + f" and {len(rest) - PANELS} more" * (len(rest) > PANELS)
    remedy = "choose rows with --sweep, --level, --pass, --dtype, --causal or --head-dim"
    return f"Not drawn, for want of room: {names}; {remedy}." if rest else ""


def _rank(rows: pd.DataFrame, prefer: Mapping[str, Sequence[object]], newest: str) -> tuple[Any, ...]:
    first = {column: rows[column].iloc[0] for column in prefer}
    wishes = [list(order).index(first[c]) if first[c] in order else len(order) for c, order in prefer.items()]
    return (*wishes, -int((rows["status"] == Status.OK).sum()), -len(rows), tuple(-ord(c) for c in newest))


def _one_each(rows: pd.DataFrame) -> pd.DataFrame:
    """The newest measured row, else the newest, of each label, length, input and task, in the table's order."""
    one = ["label", "seq_len", "kv_len", "inputs", "task"]
    ordered = rows.assign(_ok=rows["status"] == Status.OK, _row=np.arange(len(rows)))
    ordered = ordered.sort_values(["_ok", "started_at"], kind="stable")
    ordered = ordered.drop_duplicates(one, keep="last")
    return ordered.sort_values("_row").drop(columns=["_ok", "_row"])


def by_model(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """The rows of each trained model and text, whose losses may be compared."""
    return [part for _, part in rows.groupby(["model", "text", "windows", "seq_len"], sort=False, dropna=False)]


def records(rows: pd.DataFrame, *columns: str) -> list[dict[str, Any]]:
    """Rows as dictionaries with all columns, or only these."""
    return [{str(name): cell for name, cell in row.items()} for row in rows[[*columns] or [*rows]].to_dict("records")]
