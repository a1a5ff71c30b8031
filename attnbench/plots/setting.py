"""Which rows may share a figure: one machine, one shape, one way of measuring; and those circumstances in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import pandas as pd

from attnbench.errors import ResultsError, UsageError
from attnbench.record import COLUMNS
from attnbench.spec import format_scalar, parse_spec
from attnbench.status import Status

SAME = (
    "suite",
    "level",
    "pass",
    "batch",
    "heads",
    "head_dim",
    "causal",
    "bias",
    "dtype",
    "device",
    "seed",
    "process",
    "compile",
    "quick",
    "threads",
    "machine_id",
    "torch_version",
    "method_version",
)
"""Columns in which all rows of one figure agree."""
LEVELS = {"operator": "attention operator", "layer": "attention layer", "model": "whole model"}
_MOST = 20
_PASSES = {
    "forward": "forward pass",
    "backward": "backward pass",
    "training": "training step",
    "decode": "one decoding step",
}


@dataclass(frozen=True)
class Chosen:
    """Rows that may be compared, one for each label, length and input, and a line about those that may not."""

    rows: pd.DataFrame
    others: str

    @property
    def ok(self) -> pd.DataFrame:
        return self.rows[self.rows["status"] == Status.OK]


def check_columns(frame: pd.DataFrame) -> None:
    """Raises ResultsError where the frame is not a results table."""
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise ResultsError(f"not a results table: column {missing[0]} is missing; read it with read_results")


def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of the sweeps that measured time or memory, and of those that came to nothing."""
    return _of_sweeps(frame, ["time_median_s", "peak_bytes"], or_empty=True)


def compared(frame: pd.DataFrame, column: str = "rel_error") -> pd.DataFrame:
    """Rows of the sweeps that measured ``column``, an error or a score."""
    return _of_sweeps(frame, [column], or_empty=False)


def _of_sweeps(frame: pd.DataFrame, columns: Sequence[str], *, or_empty: bool) -> pd.DataFrame:
    check_columns(frame)
    if frame.empty:
        return frame
    sweeps = [frame["suite"], frame["sweep"]]
    keep = frame[list(columns)].notna().any(axis=1).groupby(sweeps).transform("any")
    if or_empty:
        measured = ["time_median_s", "peak_bytes", "rel_error", "score"]
        keep |= ~frame[measured].notna().any(axis=1).groupby(sweeps).transform("any")
    return frame[keep.to_numpy(dtype=bool)]


def choose(
    frame: pd.DataFrame,
    prefer: Mapping[str, Sequence[object]] | None = None,
    *,
    also_same: Sequence[str] = (),
    **only: object,
) -> Chosen:
    """The rows that a figure shows: those of one setting, by preference, then the one with most measured rows.

    A preferred setting must have at least half as many measured labels as the richest.

    Args:
        prefer: column -> values, the best first.
        also_same: further columns in which the rows must agree.
        only: column=value (``pass_`` for pass); None does not restrict.

    Raises:
        UsageError: a value that no row has.
    """
    for name, value in only.items():
        if value is None:
            continue
        column = name.rstrip("_")
        here = frame[column] == value
        if not here.any():
            known = ", ".join(str(one) for one in frame[column].unique()) or "none"
            raise UsageError(f"no rows with {column} {value!r}; there are: {known}")
        frame = frame[here]
    if frame.empty:
        return Chosen(frame, "")
    keys = [*SAME, *also_same]
    # Self-attention has kv_len = seq_len at each length; cross-attention is another setting for each kv_len.
    crossed = frame["kv_len"].where(frame["kv_len"] != frame["seq_len"], 0)
    groups = frame.groupby([*(frame[key] for key in keys), crossed], dropna=False, sort=False).ngroup().to_numpy()
    parts = [part for _, part in frame.groupby(groups)]
    # A preferred level with two variants is not what the figure is about.
    labels = [part.loc[part["status"] == Status.OK, "label"].nunique() for part in parts]
    rich = [part for part, count in zip(parts, labels, strict=True) if 2 * count >= max(labels)]
    best = min(rich, key=lambda part: _rank(part, prefer or {}))
    return Chosen(_one_each(best), _others(frame, best, keys))


def _rank(rows: pd.DataFrame, prefer: Mapping[str, Sequence[object]]) -> tuple[Any, ...]:
    first = rows.iloc[0]
    wishes = [list(order).index(first[c]) if first[c] in order else len(order) for c, order in prefer.items()]
    newest = max(rows["started_at"], default="")
    return (*wishes, -int((rows["status"] == Status.OK).sum()), -len(rows), tuple(-ord(c) for c in newest))


def _one_each(rows: pd.DataFrame) -> pd.DataFrame:
    """The measured row, else the newest, of each label, length, input and task, in the order of first appearance."""
    ordered = rows.assign(_ok=rows["status"] == Status.OK, _row=np.arange(len(rows)))
    ordered = ordered.sort_values(["_ok", "started_at"], kind="stable")
    ordered = ordered.drop_duplicates(["label", "seq_len", "kv_len", "inputs", "task"], keep="last")
    return ordered.sort_values("_row").drop(columns=["_ok", "_row"])


def _others(frame: pd.DataFrame, best: pd.DataFrame, keys: Iterable[str]) -> str:
    """``Measured too, but not comparable with these rows: level operator; dtype bfloat16.``"""
    parts = []
    for key in keys:
        here = best[key].iloc[0]
        values = [
            str(value) for value in frame[key].unique() if value != here and not (value != value and here != here)
        ]
        if values:
            parts.append(f"{key} {', '.join(values[:4])}{' …' if len(values) > 4 else ''}")
    return f"Measured too, but not comparable with what is drawn: {'; '.join(parts)}." if parts else ""


def where(rows: pd.DataFrame, n: int | None = None) -> list[str]:
    """Two lines for a subtitle: what was measured, and on what."""
    if rows.empty:
        return []
    row = rows.iloc[0]
    what = [
        row["suite"],
        f"n = {n}" if n is not None else "",
        f"{row['kv_len']} keys" if row["kv_len"] != row["seq_len"] else "",
        f"batch {row['batch']}",
        f"{row['heads']} heads × {row['head_dim']}",
        row["dtype"],
        "causal" if row["causal"] else "",
        f"bias {row['bias']}" if row["bias"] != "none" else "",
        LEVELS.get(row["level"], row["level"]),
        _PASSES.get(row["pass"], row["pass"]),
    ]
    threads = row["threads"]
    days = sorted({str(at)[:10] for at in rows["started_at"] if at})
    on = [
        row["device"],
        f"machine {row['machine_id']}" if row["machine_id"] else "",
        f"{threads:.0f} thread{'' if threads == 1 else 's'}" if pd.notna(threads) and row["device"] == "cpu" else "",
        f"process {row['process']}" if row["process"] else "",
        f"torch {row['torch_version']}" if row["torch_version"] else "",
        "compiled" if row["compile"] else "",
        "QUICK: one sample each" if row["quick"] else "",
        days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else "",
    ]
    return [" · ".join(str(part) for part in line if part) for line in (what, on)]


def failures(rows: pd.DataFrame, *, at_n: bool = True) -> list[str]:
    """One line for each status but ok: which labels (and lengths), and the reason of the first."""
    lines = []
    for status in Status:
        failed = rows[rows["status"] == status]
        if status is Status.OK or failed.empty:
            continue
        names = [_named(str(variant), part, at_n) for variant, part in failed.groupby("variant", sort=False)]
        names = [*names[:_MOST], f"and {len(names) - _MOST} more"] if len(names) > _MOST else names
        reasons = list(dict.fromkeys(reason for reason in failed["reason"] if reason))
        why = f" — {'' if len(reasons) == 1 else 'e.g. '}{reasons[0]}" if reasons else ""
        lines.append(f"{status}: {', '.join(names)}{why}")
    return lines


def _named(variant: str, rows: pd.DataFrame, at_n: bool) -> str:
    """The labels of one variant, or how many there are."""
    labels = list(dict.fromkeys(rows["label"]))
    name = ", ".join(labels) if len(labels) < 3 else f"{variant} with {len(labels)} settings"
    return f"{name} (n = {', '.join(str(n) for n in sorted(set(rows['seq_len'])))})" if at_n else name


def options_of(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Label -> its options."""
    table: dict[str, dict[str, Any]] = {}
    for label, text in rows[["label", "options"]].drop_duplicates().itertuples(index=False):
        try:
            given = json.loads(text or "{}")
        except json.JSONDecodeError:
            given = {}
        table[label] = given if isinstance(given, dict) else {}
    return table


def short_names(rows: pd.DataFrame) -> tuple[dict[str, str], str]:
    """Label -> the variant's name where it has one setting only; and the settings that this hides, in a line."""
    pairs = rows[["label", "variant"]].drop_duplicates()
    single = pairs.groupby("variant")["label"].transform("nunique") == 1
    names = {str(r): str(v if s else r) for (r, v), s in zip(pairs.itertuples(index=False), single, strict=True)}
    hidden = [label for label, name in names.items() if label != name]
    return names, f"Settings: {'; '.join(hidden)}." if hidden else ""


def varying_numbers(options: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Option -> number of different numeric values, for those with at least two, the most varied first."""
    values: dict[str, set[float]] = {}
    for one in options:
        for name, value in one.items():
            if is_number(value):
                values.setdefault(name, set()).add(float(value))
    counts = {name: len(found) for name, found in values.items() if len(found) > 1}
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def is_number(value: object) -> TypeGuard[int | float]:
    """A finite number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def written(value: object) -> str:
    """An option's value as one would type it."""
    return format_scalar(value) if value is None or isinstance(value, bool | int | float | str) else str(value)


def logit_std(inputs: str) -> float | None:
    """The ``logit_std`` of an inputs label, None where it has none."""
    try:
        value = dict(parse_spec(inputs).options).get("logit_std")
    except UsageError:
        return None
    return float(value) if is_number(value) else None


def pick_inputs(known: Sequence[str], wanted: str) -> str:
    """The label that means ``wanted`` (``gaussian:logit_std=2`` is ``gaussian:logit_std=2.0``), or has that name.

    Raises:
        UsageError: none does.
    """
    spec = parse_spec(wanted)
    exact = [label for label in known if label == wanted or parse_spec(label) == spec]
    named = [label for label in known if parse_spec(label).name == wanted]
    if not exact and not named:
        raise UsageError(f"no error rows with inputs {wanted!r}; there are: {', '.join(known)}")
    return [*exact, *named][0]
