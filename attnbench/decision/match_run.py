"""``match --from RUN``: hold what a finished run measured to a budget; nothing is searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from attnbench.decision.budget import Budget, Point, error_interval
from attnbench.decision.matched import Match
from attnbench.decision.points_of_run import (
    CELL,
    SHAPE,
    Measured,
    alike,
    fitting,
    hold,
    key_of,
    number,
    plain,
    timed_kinds,
    timed_points,
    timed_rows,
)
from attnbench.errors import ResultsError, UsageError
from attnbench.plots.options import pick_inputs
from attnbench.status import Status


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
    those of the attention alone. Both are joined by variant and options if they are of one shape; else only
    what the budget is about is told.

    Args:
        frame: rows as :func:`attnbench.plots.load.read_results` gives them.
        variants: names with options; empty for everything in the run. A value of the knob that is given stays.
        n: the length; by default the one with the most settings, and the longest of these.
        inputs: of the errors, by label or name; by default those with the most rows.

    Raises:
        UsageError: an unknown variant, or a length or input that was not measured.
        ResultsError: the run has nothing that the budget is about.
    """
    speed, errors = timed_rows(frame, level, pass_), frame[frame["error_kind"] != ""]
    about = errors if budget.target == "error" else speed[speed[_COLUMN[budget.target]].notna()]
    if about.empty:
        what = "error" if budget.target == "error" else f"{budget.target} of {level} {pass_}"
        known = timed_kinds(frame) or "measure it: attnbench match without --from"
        raise ResultsError(f"the run has no {what}; {known}")
    n = _length(about, n)
    errors, speed = errors[errors["seq_len"] == n], speed[speed["seq_len"] == n]
    warnings = []
    if budget.target == "error":
        errors = alike(_of_inputs(errors, inputs), SHAPE)
        timed, speed = speed, alike(fitting(speed, errors))
        if speed.empty and not timed.empty:
            warnings.append(f"the times at n = {n} are of another shape than the errors, and are left out")
    else:
        speed = alike(speed)
        erred, errors = errors, fitting(errors, speed)
        errors = alike(_of_inputs(errors, inputs), SHAPE)
        if errors.empty and not erred.empty:
            warnings.append(f"the errors at n = {n} are of another shape than the {budget.target}, and are left out")
    found = hold(budget, variants, _with_errors(timed_points(speed), errors))
    if warnings:
        here = f"the run has no {budget.target} of it at this shape"
        found = [one if one.tries else replace(one, note=here) for one in found]
    first = (speed if not speed.empty else errors).iloc[0]
    same = {name: first[name] for name in ("level", "pass", *CELL)} | {"seq_len": n}
    same["inputs"] = errors["inputs"].iloc[0] if not errors.empty else ""
    where = f"B={first['batch']} H={first['heads']} D={first['head_dim']}, {first['dtype']}, on {first['device']}"
    said = f"n = {n}, {level} {pass_}, {where}" + (f", errors of {same['inputs']}" if same["inputs"] else "")
    others = timed_kinds(frame)
    if speed.empty and others and not warnings:
        warnings.append(f"no times of {level} {pass_} at n = {n}; {others}")
    return Match(budget, found, said, plain(same), warnings)


_COLUMN = {"memory": "peak_bytes", "time": "time_median_s"}


def _of_inputs(errors: pd.DataFrame, wanted: str | None) -> pd.DataFrame:
    """The errors on the inputs that were asked for, else on those with the most rows."""
    if errors.empty:
        return errors
    counts = errors["inputs"].value_counts(sort=False)
    here = str(counts.idxmax()) if wanted is None else pick_inputs([str(one) for one in counts.index], wanted)
    return errors[errors["inputs"] == here]


def _length(rows: pd.DataFrame, wanted: int | None) -> int:
    counts = rows.groupby("seq_len")["label"].nunique()
    if wanted is None:
        return int(counts[counts == counts.max()].index.max())
    if wanted not in counts:
        raise UsageError(f"no rows at n = {wanted}; there are: {', '.join(map(str, sorted(counts.index)))}")
    return wanted


def _with_errors(found: Measured, errors: pd.DataFrame) -> Measured:
    """The settings, and those that only have an error, with their errors."""
    for row in errors.drop_duplicates("label").to_dict("records"):
        draws = number(row["error_draws"])
        error, deviation = number(row["rel_error"]), number(row["rel_error_std"])
        low, high = error_interval(error, deviation, None if draws is None else int(draws))
        key = key_of(row)
        base = found.get(key) or Point(
            row["label"], None, Status(row["status"]), row["reason"], own_form=row["own_form"], family=row["family"]
        )
        found[key] = replace(base, error=error, error_low=low, error_high=high, error_kind=row["error_kind"])
    return found
