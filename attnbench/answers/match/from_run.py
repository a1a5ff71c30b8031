"""``match --from RUN``: choose settings for a budget among those that a finished run measured or trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from attnbench.answers.gate.verdict import options_before
from attnbench.answers.match.budget import COLUMN, Budget, MeasuredSetting, scored
from attnbench.answers.match.result import Match
from attnbench.answers.match.search import FoundSetting, knob_of, turned
from attnbench.contract.spec import Scalar, Spec, parse_spec
from attnbench.contract.traits import Knob
from attnbench.contract.variant import VARIANTS
from attnbench.errors import ResultsError, UsageError
from attnbench.measure.status import Status
from attnbench.results.frame.label_options import pick_inputs
from attnbench.results.frame.same_model import SAME
from attnbench.results.frame.scored import short_tasks
from attnbench.results.frame.settings import RUN, chosen_length, records
from attnbench.results.frame.words import in_words
from attnbench.results.record import COLUMNS
from attnbench.results.trainings import CountedTrainings, choose, trained
from attnbench.suite.axes import ALIKE, AXES, OF_MODEL

_CELL = [*(name for name in COLUMNS if name in ALIKE and name != "seed"), "device"]
_ALIKE = [*_CELL, "process", "threads", "machine_id", "torch_version", RUN]
"""Columns in which times and memory that are compared must agree."""
_SHAPE = [name for name in OF_MODEL if AXES[name].only in ("", "operator")]
"""Columns in which the error of the attention and the time of what holds it agree; a batch changes no error."""

_Key = tuple[str, tuple[tuple[str, Scalar], ...]]
_Measured = dict[_Key, MeasuredSetting]
_Problem = tuple[str, tuple[tuple[str, object], ...]]
"""A task, and how the models were trained on it, by column."""
_COSTS = ("time_median_s", "time_ci_low_s", "time_ci_high_s", "peak_bytes")


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
    """Choose among the settings of these variants that a run measured; no variants: of all.

    Times and memory are those of ``level`` and ``pass_``, of the circumstances with most rows; errors are those of the
    attention alone, by default of the inputs with most rows. Both are joined by variant and options if they are of one
    shape; else only the budget's own measure is given. A value of the knob that is given stays. By default ``n`` is the
    length with most settings, and the longest of these. Raises UsageError for an unknown variant, or a length or input
    that was not measured, and ResultsError if the run has nothing that the budget is about.
    """
    speed, errors = _timed_rows(frame, level, pass_), frame[frame["error_kind"] != ""]
    about = errors if budget.target == "error" else speed[speed[COLUMN[budget.target]].notna()]
    if about.empty:
        what = "error" if budget.target == "error" else f"{budget.target} of {level} {pass_}"
        known = _timed_kinds(frame) or "measure it: attnbench match without --from"
        raise ResultsError(f"the run has no {what}; {known}")
    counts = about.groupby("seq_len")["label"].nunique()
    n = chosen_length(n, counts, "rows")
    errors, speed = errors[errors["seq_len"] == n], speed[speed["seq_len"] == n]
    warnings = []
    if budget.target == "error":
        errors = _alike(_of_inputs(errors, inputs), _SHAPE)
        timed, speed = speed, _alike(_fitting(speed, errors))
        if speed.empty and not timed.empty:
            warnings.append(f"the times at n = {n} are of another shape than the errors, and are left out")
    else:
        speed = _alike(speed)
        erred, errors = errors, _fitting(errors, speed)
        errors = _alike(_of_inputs(errors, inputs), _SHAPE)
        if errors.empty and not erred.empty:
            warnings.append(f"the errors at n = {n} are of another shape than the {budget.target}, and are left out")
    of = "operator" if budget.target == "error" else level
    found = _hold(budget, variants, _with_errors(_timed_points(speed), errors), of)
    if warnings:
        here = f"the run has no {budget.target} of it at this shape"
        found = [one if one.tries else replace(one, note=here) for one in found]
    first = (speed if not speed.empty else errors).iloc[0]
    same = {name: first[name] for name in ("level", "pass", *_CELL)} | {"seq_len": n}
    same["inputs"] = errors["inputs"].iloc[0] if not errors.empty else ""
    where = f"B={first['batch']} H={first['heads']} D={first['head_dim']}, {first['dtype']}, on {first['device']}"
    said = f"n = {n}, {level} {pass_}, {where}" + (f", errors of {same['inputs']}" if same["inputs"] else "")
    others = _timed_kinds(frame)
    if speed.empty and others and not warnings:
        warnings.append(f"no times of {level} {pass_} at n = {n}; {others}")
    return Match(budget, found, said, _plain(same), warnings)


def _of_inputs(errors: pd.DataFrame, wanted: str | None) -> pd.DataFrame:
    if errors.empty:
        return errors
    counts = errors["inputs"].value_counts(sort=False)
    here = str(counts.idxmax()) if wanted is None else pick_inputs([str(one) for one in counts.index], wanted)
    return errors[errors["inputs"] == here]


def _with_errors(found: _Measured, errors: pd.DataFrame) -> _Measured:
    for row in errors.drop_duplicates("label").to_dict("records"):
        one = MeasuredSetting.of({**row, **dict.fromkeys(_COSTS)})
        known = found.get(_key_of(row), one)
        found[_key_of(row)] = replace(
            known, error=one.error, error_low=one.error_low, error_high=one.error_high, error_kind=one.error_kind
        )
    return found


def match_scores(
    frame: pd.DataFrame,
    variants: Sequence[str],
    budget: Budget,
    *,
    n: int | None = None,
    task: str | None = None,
    pass_: str = "training",
) -> Match:
    """Choose among the settings of these variants that a run trained; no variants: of all.

    Scores are those at the learning rate that validation chose, over seeds. Times and memory are those of the same
    model and of ``pass_``, of the circumstances with most rows. By default ``n`` and ``task``, a label or a name, are
    those with most settings, at the longest length of these. Raises UsageError for an unknown variant, or a length or
    task that was not trained, and ResultsError if the run has no score.
    """
    rows = records(frame)
    problems: dict[_Problem, list[CountedTrainings]] = {}
    for choice in choose(trained(rows, also_alike=[RUN] if RUN in frame else [])):
        problems.setdefault(choice.problem, []).append(choice)
    if not problems:
        raise ResultsError("the run has no score; train first: attnbench match --score without --from, or score")
    (name, setting), choices = _wanted(problems, n, task)
    facts = {**dict(setting), "task": name, "level": "model"}
    known = {row["label"]: row for row in rows}
    timed = _timed_rows(frame, "model", pass_)
    speed = _alike(timed[_of_the_model(timed, facts)])
    times, points = _timed_points(speed), _Measured()
    for choice in choices:
        row = known[choice.label]
        bare = MeasuredSetting(choice.label, own_form=row["own_form"], family=row["family"])
        base = replace(times.get(_key_of(row), bare), status=Status.OK, reason="")
        points[_key_of(row)] = scored(base, choice)
    found = _hold(budget, variants, points)
    same = {
        "level": "model",
        "pass": pass_,
        **facts,
        "seeds": len({row.seed for choice in choices for row in choice.rows}),
    }
    warnings = [f"{choice.label} {note}" for choice in choices for note in choice.notes]
    if speed.empty:
        others = _timed_kinds(frame)
        warnings.append(f"no times of model {pass_} of these models" + (f"; {others}" if others else ""))
    return Match(budget, found, _about(facts, pass_), _plain(same), warnings)


def _wanted(
    problems: Mapping[_Problem, list[CountedTrainings]], n: int | None, task: str | None
) -> tuple[_Problem, list[CountedTrainings]]:
    left = dict(problems)
    if task is not None:
        left = {one: choices for one, choices in left.items() if task in (one[0], parse_spec(one[0]).name)}
        if not left:
            known = ", ".join(sorted(short_tasks({name for name, _ in problems}).values()))
            raise UsageError(f"--task {task}: nothing was trained on it; there are: {known}")
    if n is not None:
        lengths = sorted({_length_of(one) for one in left})
        left = {one: choices for one, choices in left.items() if _length_of(one) == n}
        if not left:
            raise UsageError(f"no trainings at n = {n}; there are: {', '.join(map(str, lengths))}")
    best = max(left, key=lambda one: (_length_of(one, "test_len") == _length_of(one), len(left[one]), _length_of(one)))
    return best, left[best]


def _length_of(problem: _Problem, column: str = "seq_len") -> int:
    return int(float(str(dict(problem[1])[column])))


def _of_the_model(rows: pd.DataFrame, facts: Mapping[str, object]) -> pd.Series[bool]:
    same = pd.Series(True, index=rows.index)
    for name in SAME:
        if facts.get(name) is not None:
            same &= rows[name] == facts[name]
    return same


def _about(facts: Mapping[str, object], pass_: str) -> str:
    task = str(facts["task"])
    model = [in_words(name, facts[name]) for name in ("layers", "heads", "head_dim", "ffn", "steps") if facts.get(name)]
    return ", ".join([short_tasks({task})[task], f"n = {facts['seq_len']}", *model, f"times of {pass_}"])


def _key_of(row: Mapping[Any, Any]) -> _Key:
    try:
        options = json.loads(row["options"] or "{}")
    except ValueError:
        options = {}
    return row["variant"], Spec.of(row["variant"], options if isinstance(options, dict) else {}).options


def _timed_rows(frame: pd.DataFrame, level: str, pass_: str) -> pd.DataFrame:
    rows = frame[(frame["level"] == level) & (frame["pass"] == pass_) & (frame["protocol"].fillna("") == "")]
    return rows[rows["time_median_s"].notna() | rows["peak_bytes"].notna() | (rows["status"] != Status.OK)]


def _timed_kinds(frame: pd.DataFrame) -> str:
    rows = frame[frame["time_median_s"].notna() | frame["peak_bytes"].notna()]
    kinds = rows[["level", "pass"]].drop_duplicates().itertuples(index=False)
    what = " or ".join(f"--level {level} --pass {pass_}" for level, pass_ in kinds)
    return f"it has {what}" if what else ""


def _fitting(rows: pd.DataFrame, to: pd.DataFrame) -> pd.DataFrame:
    """The rows of the shape of the first of ``to``; all of them if ``to`` is empty."""
    if to.empty:
        return rows
    shape = to[_SHAPE].iloc[0]
    return rows[[all(row[name] == shape[name] for name in _SHAPE) for row in rows[_SHAPE].to_dict("records")]]


def _alike(rows: pd.DataFrame, columns: Sequence[str] = _ALIKE) -> pd.DataFrame:
    """The rows of the circumstances with the most labels, one for each label: the first that is ok, else the first."""
    if rows.empty:
        return rows
    groups = rows.groupby([name for name in columns if name in rows], sort=False, dropna=False)
    most = max(groups, key=lambda group: group[1]["label"].nunique())[1]
    ok_first = most.sort_values("status", key=lambda status: status != Status.OK, kind="stable")
    return ok_first.drop_duplicates("label").sort_index(kind="stable")


def _timed_points(rows: pd.DataFrame) -> _Measured:
    found = [{**row, "rel_error": None, "error_kind": None} for row in rows.to_dict("records")]
    return {_key_of(row): MeasuredSetting.of(row) for row in found}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}


def _hold(budget: Budget, variants: Sequence[str], points: _Measured, level: str = "") -> list[FoundSetting]:
    """The outcome of each variant, or of every measured one if none is named. Raises UsageError: an unknown variant or
    option."""
    return [_choose(budget, *group, points) for group in _groups(variants, points, level)]


_Group = tuple[str, Spec, Knob | None, str]
"""Label, all options that must agree, knob, and the reason for having none; the knob's option is left out."""


def _groups(variants: Sequence[str], points: _Measured, level: str) -> list[_Group]:
    groups: dict[str, _Group] = {}
    if variants:
        for spec, knob, fixed in turned(variants, level=level):
            whole = VARIANTS.get(spec.name).at(level).complete(spec)
            groups[spec.label] = (spec.label, whole if knob is None else _without(whole, knob), knob, fixed)
        return list(groups.values())
    for (name, options), point in points.items():
        whole = Spec(name, options)
        knob = knob_of(_known(whole), level=level) if name in VARIANTS else None
        if knob is None:
            groups[point.label] = (point.label, whole, None, "it has no knob")
        else:
            rest = _without(whole, knob)
            label = VARIANTS.get(name).normalise(_known(rest)).label
            groups.setdefault(label, (label, rest, knob, ""))
    return list(groups.values())


def _known(spec: Spec) -> Spec:
    options = VARIANTS.get(spec.name).options
    return Spec.of(spec.name, {option: value for option, value in spec.options if option in options})


def _without(spec: Spec, knob: Knob) -> Spec:
    return Spec.of(spec.name, {option: value for option, value in spec.options if option != knob.option})


def _choose(budget: Budget, label: str, rest: Spec, knob: Knob | None, note: str, points: _Measured) -> FoundSetting:
    mine, before = _rows_of(label, rest, knob, points)
    if not mine:
        return FoundSetting(label, knob.option if knob else "", (), None, "the run has no row of it")
    if knob is None:
        return _as_it_stands(budget, label, mine, note, before)
    by_value: dict[int, MeasuredSetting] = {}
    for (_, options), point in mine.items():
        value = dict(options).get(knob.option)
        if isinstance(value, int) and not isinstance(value, bool):
            by_value[value] = replace(point, value=value, label=_with_value(point.label, knob, value))
    if not by_value:  # rows of a time before the knob, or whose value was left to the variant
        return _as_it_stands(budget, label, mine, f"its row says nothing of {knob.option}", before)
    rising = [by_value[value] for value in sorted(by_value, reverse=knob.falling)]
    within = [point for point in rising if point.within(budget)]
    chosen = within[-1 if budget.bounds_cost else 0] if within else None
    return FoundSetting(label, knob.option, tuple(rising), chosen, before=before)


def _as_it_stands(budget: Budget, label: str, mine: _Measured, note: str, before: str) -> FoundSetting:
    point = next(iter(mine.values()))
    return FoundSetting(label, "", (point,), point if point.within(budget) else None, note, before)


def _rows_of(label: str, rest: Spec, knob: Knob | None, points: _Measured) -> tuple[_Measured, str]:
    """The settings of a variant, and the options in which they differ from this version's.

    Rows with the same label are taken if no row has the same options, which may be new or have another default since.
    """

    def bare(spec: Spec) -> Spec:
        return spec if knob is None else _without(spec, knob)

    same = {key: point for key, point in points.items() if bare(Spec(*key)) == rest}
    if same:
        return same, ""
    written = _written(parse_spec(label))
    alike = {key: point for key, point in points.items() if _written(bare(parse_spec(point.label))) == written}
    then = [dict(bare(Spec(*key)).options) for key in alike]
    return alike, "; ".join(dict.fromkeys(options_before(one, dict(rest.options)) for one in then))


def _written(spec: Spec) -> str:
    return VARIANTS.get(spec.name).normalise(_known(spec)).label if spec.name in VARIANTS else spec.label


def _with_value(label: str, knob: Knob, value: int) -> str:
    spec = parse_spec(label)
    return Spec.of(spec.name, {**dict(spec.options), knob.option: value}).label
