"""The settings that a finished run measured, grouped by the knob that tells them apart, and held to a budget."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from attnbench.axes import ALIKE
from attnbench.decision.budget import Budget, Point
from attnbench.decision.knobs import knob_of
from attnbench.decision.search import Found
from attnbench.record import COLUMNS, options_of
from attnbench.spec import Scalar, Spec, parse_spec, parse_specs
from attnbench.status import Status
from attnbench.traits import Knob
from attnbench.variant import VARIANTS

CELL = [*(name for name in COLUMNS if name in ALIKE and name != "seed"), "device"]
"""Columns in which the cells of one match agree."""
_ALIKE = [*CELL, "process", "threads"]
"""Columns in which times and memory that are compared must agree."""
SHAPE = ["dtype", "causal", "mask", "bias", "sink", "padding", "q_start", "heads", "kv_heads", "head_dim", "v_dim"]
"""Columns in which the error of the attention and the time of what holds it agree; a batch changes no error."""

Key = tuple[str, tuple[tuple[str, Scalar], ...]]
"""Name and options, those at their defaults included."""
Measured = dict[Key, Point]
"""Each setting with what is known of it."""


def key_of(row: Mapping[Any, Any]) -> Key:
    """The setting of a row."""
    try:
        options = json.loads(options_of(row["options"], row["label"]) or "{}")
    except ValueError:
        options = {}
    return row["variant"], Spec.of(row["variant"], options if isinstance(options, dict) else {}).options


def timed_rows(frame: pd.DataFrame, level: str, pass_: str) -> pd.DataFrame:
    """Rows of one level and pass with a time or a peak, or with how the cell failed; without trainings for a score."""
    rows = frame[(frame["level"] == level) & (frame["pass"] == pass_) & (frame["protocol"].fillna("") == "")]
    return rows[rows["time_median_s"].notna() | rows["peak_bytes"].notna() | (rows["status"] != Status.OK)]


def timed_kinds(frame: pd.DataFrame) -> str:
    """What the run did time, as options; empty for nothing."""
    rows = frame[frame["time_median_s"].notna() | frame["peak_bytes"].notna()]
    kinds = rows[["level", "pass"]].drop_duplicates().itertuples(index=False)
    what = " or ".join(f"--level {level} --pass {pass_}" for level, pass_ in kinds)
    return f"it has {what}" if what else ""


def fitting(rows: pd.DataFrame, to: pd.DataFrame) -> pd.DataFrame:
    """The rows of the same shape as the first of ``to``; all of them if there is none."""
    if to.empty:
        return rows
    shape = to[SHAPE].iloc[0]
    return rows[[all(row[name] == shape[name] for name in SHAPE) for row in rows[SHAPE].to_dict("records")]]


def alike(rows: pd.DataFrame, columns: Sequence[str] = _ALIKE) -> pd.DataFrame:
    """The rows of the circumstances with the most labels, one row for each label."""
    if rows.empty:
        return rows
    groups = rows.groupby([*columns], sort=False, dropna=False)
    most = max(groups, key=lambda group: group[1]["label"].nunique())[1]
    return most.drop_duplicates("label")


def timed_points(rows: pd.DataFrame) -> Measured:
    """Each setting with its time and memory."""
    return {
        key_of(row): Point(
            label=row["label"],
            status=Status(row["status"]),
            reason=row["reason"],
            time=number(row["time_median_s"]),
            time_low=number(row["time_ci_low_s"]),
            time_high=number(row["time_ci_high_s"]),
            memory=number(row["peak_bytes"]),
            own_form=row["own_form"],
            family=row["family"],
        )
        for row in rows.to_dict("records")
    }


def number(value: Any) -> float | None:
    """A number of a table; None where there is none."""
    return None if value is None or not math.isfinite(value) else float(value)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON and CSV take them."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}


def hold(budget: Budget, variants: Sequence[str], points: Measured) -> list[Found]:
    """What became of each variant that was asked for, or of each that was measured where none is named.

    Raises:
        UsageError: an unknown variant or option.
    """
    return [_choose(budget, *group, points) for group in _groups(variants, points)]


_Group = tuple[str, Spec, Knob | None, str]
"""Label, all options that must agree, knob, and why it takes part as it stands; the knob's option is left out."""


def _groups(variants: Sequence[str], points: Measured) -> list[_Group]:
    groups: dict[str, _Group] = {}
    if variants:
        for spec in (spec for text in variants for spec in parse_specs(text)):
            entry = VARIANTS.get(spec.name)
            given, normal = entry.check(dict(spec.options)), entry.normalise(spec)
            knob = knob_of(normal)
            fixed = "it has no knob" if knob is None else f"its {knob.option} is given" if knob.option in given else ""
            whole = entry.complete(normal)
            turned = None if fixed else knob
            label = spec.label if fixed else normal.label
            groups[label] = (label, whole if turned is None else _without(whole, turned), turned, fixed)
        return list(groups.values())
    for (name, options), point in points.items():
        whole = Spec(name, options)
        knob = knob_of(_known(whole)) if name in VARIANTS else None
        if knob is None:
            groups[point.label] = (point.label, whole, None, "it has no knob")
        else:
            rest = _without(whole, knob)
            label = VARIANTS.get(name).normalise(_known(rest)).label
            groups.setdefault(label, (label, rest, knob, ""))
    return list(groups.values())


def _known(spec: Spec) -> Spec:
    """The spec without options that this version of the variant does not have."""
    options = VARIANTS.get(spec.name).options
    return Spec.of(spec.name, {option: value for option, value in spec.options if option in options})


def _without(spec: Spec, knob: Knob) -> Spec:
    return Spec.of(spec.name, {option: value for option, value in spec.options if option != knob.option})


def _choose(budget: Budget, label: str, rest: Spec, knob: Knob | None, note: str, points: Measured) -> Found:
    mine, before = _rows_of(label, rest, knob, points)
    if not mine:
        return Found(label, knob.option if knob else "", (), None, "the run has no row of it")
    if knob is None:
        return _as_it_stands(budget, label, mine, note, before)
    by_value: dict[int, Point] = {}
    for (_, options), point in mine.items():
        value = dict(options).get(knob.option)
        if isinstance(value, int) and not isinstance(value, bool):
            by_value[value] = replace(point, value=value, label=_with_value(point.label, knob, value))
    if not by_value:  # rows of a time before the knob, or whose value was left to the variant
        return _as_it_stands(budget, label, mine, f"its row says nothing of {knob.option}", before)
    rising = [by_value[value] for value in sorted(by_value, reverse=knob.falling)]
    within = [point for point in rising if point.within(budget)]
    chosen = within[-1 if budget.bounds_cost else 0] if within else None
    return Found(label, knob.option, tuple(rising), chosen, before=before)


def _as_it_stands(budget: Budget, label: str, mine: Measured, note: str, before: str) -> Found:
    point = next(iter(mine.values()))
    return Found(label, "", (point,), point if point.within(budget) else None, note, before)


def _rows_of(label: str, rest: Spec, knob: Knob | None, points: Measured) -> tuple[Measured, str]:
    """The settings of a variant, and in which options they differ from what this version calls so.

    A variant that got an option since, or another default, is the same variant if it is written the same: where no row
    has the very same options, those with the same label are taken.
    """

    def bare(spec: Spec) -> Spec:
        return spec if knob is None else _without(spec, knob)

    same = {key: point for key, point in points.items() if bare(Spec(*key)) == rest}
    if same:
        return same, ""
    alike = {
        key: point
        for key, point in points.items()
        if _written(bare(parse_spec(point.label))) == _written(parse_spec(label))
    }
    return alike, "; ".join(dict.fromkeys(_differing(dict(key[1]), dict(rest.options), knob) for key in alike))


def _written(spec: Spec) -> str:
    """The label without options that are at their defaults."""
    return VARIANTS.get(spec.name).normalise(_known(spec)).label if spec.name in VARIANTS else spec.label


def _differing(then: Mapping[str, Scalar], now: Mapping[str, Scalar], knob: Knob | None) -> str:
    """``no beta, kernel=relu``: what the options were that have other values now."""
    names = [name for name in dict.fromkeys([*then, *now]) if knob is None or name != knob.option]
    changed = [name for name in names if then.get(name) != now.get(name)]
    return ", ".join(f"{name}={then[name]}" if name in then else f"no {name}" for name in changed)


def _with_value(label: str, knob: Knob, value: int) -> str:
    """The label with the value of the knob, which a run leaves out where it is the default."""
    spec = parse_spec(label)
    return Spec.of(spec.name, {**dict(spec.options), knob.option: value}).label
