"""``match --from RUN``: hold what a finished run measured to a budget; nothing is searched."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from attnbench.axes import ALIKE
from attnbench.decision.budget import Budget, Point, error_interval
from attnbench.decision.knobs import knob_of
from attnbench.decision.match import Match
from attnbench.decision.search import Found
from attnbench.errors import ResultsError, UsageError
from attnbench.plots.options import pick_inputs
from attnbench.record import COLUMNS
from attnbench.spec import Scalar, Spec, parse_spec, parse_specs
from attnbench.status import Status
from attnbench.traits import Knob
from attnbench.variant import VARIANTS

_CELL = [*(name for name in COLUMNS if name in ALIKE and name != "seed"), "device"]
"""Columns in which the cells of one match agree."""
_ALIKE = [*_CELL, "process", "threads"]
"""Columns in which times and memory that are compared must agree."""


def match_run(
    frame: pd.DataFrame,
    variants: Sequence[str],
    budget: Budget,
    *,
    n: int | None = None,
    inputs: str | None = None,
    level: str = "operator",
    pass_: str = "forward",
) -> Match:
    """Choose among the settings that a run measured.

    Times and memory are those of ``level`` and ``pass_``, of the circumstances in which most was measured; errors are
    those of the attention alone. Both are joined by variant and options.

    Args:
        frame: rows as :func:`attnbench.plots.load.read_results` gives them.
        variants: names with options; empty for everything in the run. A value of the knob that is given stays.
        n: the length; by default the one with the most settings, and the longest of these.
        inputs: of the errors, by label or name; by default those with the most rows.

    Raises:
        UsageError: an unknown variant, or a length or input that was not measured.
        ResultsError: the run has nothing that the budget is about.
    """
    speed = frame[(frame["level"] == level) & (frame["pass"] == pass_)]
    speed = speed[speed["time_median_s"].notna() | speed["peak_bytes"].notna() | (speed["status"] != Status.OK)]
    errors = frame[frame["error_kind"] != ""]
    about = errors if budget.target == "error" else speed[speed[_COLUMN[budget.target]].notna()]
    if about.empty:
        what = "error" if budget.target == "error" else f"{budget.target} of {level} {pass_}"
        raise ResultsError(f"the run has no {what}; {_timed(frame) or 'measure it: attnbench match without --from'}")
    n = _length(about, n)
    errors = errors[errors["seq_len"] == n]
    if not errors.empty:
        known = errors["inputs"].value_counts(sort=False)
        here = str(known.idxmax()) if inputs is None else pick_inputs([str(one) for one in known.index], inputs)
        errors = errors[errors["inputs"] == here]
    speed = _alike(speed[speed["seq_len"] == n])
    points = _points(speed, errors)
    found = [_choose(budget, *group, points) for group in _groups(variants, points)]
    first = (speed if not speed.empty else errors).iloc[0]
    same = {name: first[name] for name in ("level", "pass", *_CELL)} | {"seq_len": n}
    same["inputs"] = errors["inputs"].iloc[0] if not errors.empty else ""
    where = f"B={first['batch']} H={first['heads']} D={first['head_dim']}, {first['dtype']}, on {first['device']}"
    said = f"n = {n}, {level} {pass_}, {where}" + (f", errors of {same['inputs']}" if same["inputs"] else "")
    warnings = [f"no times of {level} {pass_} at n = {n}; {_timed(frame)}"] if speed.empty and _timed(frame) else []
    return Match(budget, found, said, {key: _plain(value) for key, value in same.items()}, warnings)


def _timed(frame: pd.DataFrame) -> str:
    """What the run did time, as options; empty for nothing."""
    rows = frame[frame["time_median_s"].notna() | frame["peak_bytes"].notna()]
    kinds = rows[["level", "pass"]].drop_duplicates().itertuples(index=False)
    what = " or ".join(f"--level {level} --pass {pass_}" for level, pass_ in kinds)
    return f"it has {what}" if what else ""


_COLUMN = {"memory": "peak_bytes", "time": "time_median_s"}


def _length(rows: pd.DataFrame, wanted: int | None) -> int:
    counts = rows.groupby("seq_len")["label"].nunique()
    if wanted is None:
        return int(counts[counts == counts.max()].index.max())
    if wanted not in counts:
        raise UsageError(f"no rows at n = {wanted}; there are: {', '.join(map(str, sorted(counts.index)))}")
    return wanted


def _alike(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the circumstances with the most labels, one row for each label."""
    if rows.empty:
        return rows
    groups = rows.groupby(_ALIKE, sort=False, dropna=False)
    most = max(groups, key=lambda group: group[1]["label"].nunique())[1]
    return most.drop_duplicates("label")


Measured = dict[tuple[str, tuple[tuple[str, Scalar], ...]], Point]
"""Name and options, those at their defaults included, of each setting."""


def _points(speed: pd.DataFrame, errors: pd.DataFrame) -> Measured:
    """Each setting with what is known of it."""
    found: Measured = {}
    for row in speed.to_dict("records"):
        found[_key(row)] = Point(
            label=row["label"],
            status=Status(row["status"]),
            reason=row["reason"],
            time=_number(row["time_median_s"]),
            time_low=_number(row["time_ci_low_s"]),
            time_high=_number(row["time_ci_high_s"]),
            memory=_number(row["peak_bytes"]),
            own_form=row["own_form"],
            family=row["family"],
        )
    for row in errors.drop_duplicates("label").to_dict("records"):
        draws = _number(row["error_draws"])
        error, deviation = _number(row["rel_error"]), _number(row["rel_error_std"])
        low, high = error_interval(error, deviation, None if draws is None else int(draws))
        key = _key(row)
        base = found.get(key) or Point(
            row["label"], None, Status(row["status"]), row["reason"], own_form=row["own_form"], family=row["family"]
        )
        found[key] = replace(base, error=error, error_low=low, error_high=high, error_kind=row["error_kind"])
    return found


def _key(row: dict[Any, Any]) -> tuple[str, tuple[tuple[str, Scalar], ...]]:
    try:
        options = json.loads(row["options"] or "{}")
    except ValueError:
        options = {}
    return row["variant"], Spec.of(row["variant"], options if isinstance(options, dict) else {}).options


def _groups(variants: Sequence[str], points: Measured) -> list[tuple[str, Spec, Knob | None, str]]:
    """Label, all options that must agree, knob, and why it takes part as it stands; the knob's option is left out."""
    groups: dict[str, tuple[str, Spec, Knob | None, str]] = {}
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
    if knob is None:
        mine = [point for (name, options), point in points.items() if Spec(name, options) == rest]
        if not mine:
            return Found(label, "", (), None, "the run has no row of it")
        return Found(label, "", (mine[0],), mine[0] if mine[0].within(budget) else None, note)
    by_value: dict[int, Point] = {}
    for (name, options), point in points.items():
        value = dict(options).get(knob.option)
        if isinstance(value, int) and not isinstance(value, bool) and _without(Spec(name, options), knob) == rest:
            by_value[value] = replace(point, value=value, label=_with_value(point.label, knob, value))
    if not by_value:
        return Found(label, knob.option, (), None, "the run has no row of it")
    rising = [by_value[value] for value in sorted(by_value, reverse=knob.falling)]
    within = [point for point in rising if point.within(budget)]
    chosen = within[-1 if budget.rises else 0] if within else None
    return Found(label, knob.option, tuple(rising), chosen)


def _with_value(label: str, knob: Knob, value: int) -> str:
    """The label with the value of the knob, which a run leaves out where it is the default."""
    spec = parse_spec(label)
    return Spec.of(spec.name, {**dict(spec.options), knob.option: value}).label


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _plain(value: Any) -> Any:
    """A number as JSON and CSV take it."""
    return value.item() if hasattr(value, "item") else value
