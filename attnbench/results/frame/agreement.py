"""Agreement of each label with exact attention: the rows that measure it, and those that share one scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from attnbench.measure.status import Status
from attnbench.results.frame.label_options import pick_inputs
from attnbench.results.frame.same_model import CHANCE, NO_MIXING, match, notes
from attnbench.results.frame.scored import Problem, problems
from attnbench.results.frame.settings import RUN, Setting, compared, settings
from attnbench.results.frame.words import in_words
from attnbench.results.intervals import learnt
from attnbench.suite.axes import OF_MODEL

Y_AXES = {
    "rel_error": "relative error\n(log scale, better upwards)",
    "max_abs_error": "largest absolute error\n(log scale, better upwards)",
    "cosine": "cosine with the exact output",
    "score": "score",
    "loss_delta": "loss over the untouched model's, nats\n(better upwards)",
    "hidden_error": "relative error of the last features\n(log scale, better upwards)",
}
OF_TRAINED = ("loss_delta", "hidden_error")
"""Losses of a trained model by its new attention; the timed row itself holds them."""
KINDS = ("exact", "measured", "missing", "learned", "other")
"""``exact``: equal up to rounding, at least on these inputs. ``measured``: has a place on the scale. ``missing``: has
no number. ``learned``: has no error before fitting. ``other``: another operator, whose difference is not an error."""


ROUNDING = 1e-5
"""A smaller relative error is rounding in float32."""


@dataclass(frozen=True)
class Agreement:
    """One row for each label: label, family, y, y_std, error_kind; for scores also y_low, y_high, learnt."""

    rows: pd.DataFrame
    column: str
    said: str
    trivial: float
    """Error of answering mean(V) on the same inputs; NaN if it was not measured."""
    inputs: str = ""
    lines: Mapping[str, float] = field(default_factory=dict)
    """Name -> score, for chance and for a model that mixes no tokens."""
    band: tuple[float, float] | None = None
    """Interval of softmax's score."""
    left_out: tuple[str, ...] = ()


def agreement(frame: pd.DataFrame, column: str, inputs: str | None, speed: Setting) -> Callable[[int], Agreement]:
    """The values of ``column`` on the problem most like the timed one, by length; else at the longest with a value.

    Default inputs: those of the timed rows if their sweep has several, else ``listops``, else the first. Raises
    UsageError if no row has the given inputs.
    """
    if column == "score":
        every = problems(same_run(frame, speed))
        return lambda n: _scores(same_run(frame, speed), every, speed, n)
    if column in OF_TRAINED:
        return lambda n: _of_trained(speed, n, column)
    rows = compared(same_run(frame, speed), column)
    if rows.empty:
        return lambda n: _nothing(column)
    own = _own(frame, speed) if inputs is None else None
    chosen = _inputs(list(dict.fromkeys(rows["inputs"])), inputs, own)
    rows = rows[rows["inputs"] == chosen]
    rows = alike(rows, speed).rows
    rows = rows[rows["status"] == Status.OK]
    by_length = {int(str(n)): part for n, part in rows.groupby("seq_len")}
    known = {n for n, part in by_length.items() if part[column].notna().any()}

    def at_length(n: int) -> Agreement:
        at = n if not known or n in known else max(known)
        on = "the timed inputs" if chosen == own else f"inputs {chosen}"
        return _errors(by_length.get(at, rows[:0]), column, _said(by_length.get(at, rows[:0]), at, n, on), chosen)

    return at_length


def _errors(rows: pd.DataFrame, column: str, said: str, inputs: str) -> Agreement:
    values = pd.DataFrame(
        {"label": rows["label"], "family": rows["family"], "error_kind": rows["error_kind"], "y": rows[column]}
    )
    values["y_std"] = rows["rel_error_std"] if column == "rel_error" else math.nan
    trivial = rows["trivial_error"].dropna() if column == "rel_error" else pd.Series(dtype=float)
    return Agreement(values, column, said, float(trivial.median()) if len(trivial) else math.nan, inputs)


def of_trained(rows: pd.DataFrame) -> str | None:
    """Column of trained models' loss if they predict something, else of the error of their last features."""
    return next((column for column in OF_TRAINED if rows[column].notna().any()), None)


def same_run(frame: pd.DataFrame, setting: Setting) -> pd.DataFrame:
    """The rows of the run that a setting belongs to."""
    return frame[frame[RUN] == setting.rows[RUN].iloc[0]] if RUN in frame else frame


def alike(rows: pd.DataFrame, setting: Setting) -> Setting:
    """The setting among other rows (errors or decoding steps) that is most like a given one."""
    first = setting.rows.iloc[0]
    order = dict.fromkeys(["suite", "causal", "machine_id", "dtype", "head_dim", "heads", *OF_MODEL, "pass"])
    return settings(rows, {key: (first[key],) for key in order if key in rows})[0]


def _own(frame: pd.DataFrame, speed: Setting) -> str | None:
    first = speed.rows.iloc[0]
    beside = frame[(frame["suite"] == first["suite"]) & (frame["sweep"] == first["sweep"])]
    return str(first["inputs"]) if beside.loc[beside["time_median_s"].notna(), "inputs"].nunique() > 1 else None


def _inputs(known: list[str], wanted: str | None, own: str | None) -> str:
    if wanted is not None:
        return pick_inputs(known, wanted)
    if own in known:
        return str(own)
    return next((label for label in known if label.partition(":")[0] == "listops"), known[0])


def _scores(frame: pd.DataFrame, every: Sequence[Problem], speed: Setting, n: int) -> Agreement:
    found = match(every, speed, n)
    if found is None:
        return _nothing("score")
    problem, said = found
    floor, still, reference = problem.floor, problem.no_mixing, problem.reference
    scores = [
        (one.label, one.family, one.over_seeds.mean, *(one.ends or (None, None)), learnt(one, floor))
        for one in problem.parts
    ]
    rows = pd.DataFrame(scores, columns=["label", "family", "y", "y_low", "y_high", "learnt"])
    rows = rows.astype({"y": float, "y_low": float, "y_high": float}).assign(error_kind="", y_std=math.nan)
    lines = {} if problem.chance is None else {CHANCE: problem.chance}
    lines |= {NO_MIXING: still.over_seeds.mean} if still else {}
    left_out = notes(frame, problem, list(speed.by_length[n]["label"]))
    return Agreement(rows, "score", said, math.nan, "", lines, reference.ends if reference else None, tuple(left_out))


def _of_trained(speed: Setting, n: int, column: str) -> Agreement:
    rows = speed.ok[speed.ok["seq_len"] == n]
    if not rows[column].notna().any():
        return _nothing(column)
    values = rows[["label", "family"]].assign(y=rows[column], y_std=math.nan, error_kind="")
    if column == "loss_delta":
        values = values.assign(y_low=rows["loss_delta_low"], y_high=rows["loss_delta_high"])
    nothing = values.loc[rows["variant"] == "mean-value", "y"]
    windows = rows["windows"].max()
    said = f"{rows['model'].iloc[0].rpartition('/')[2]}, no training after the swap · {windows:.0f} windows held out"
    return Agreement(values, column, said, float(nothing.iloc[0]) if len(nothing) else math.nan)


def _nothing(column: str) -> Agreement:
    what = "score" if column == "score" else "loss" if column == "loss_delta" else "error"
    empty = pd.DataFrame(columns=["label", "family", "y", "y_std", "error_kind"])
    return Agreement(empty, column, f"no {what} measured", math.nan)


def _said(rows: pd.DataFrame, at: int, n: int, on: str) -> str:
    if rows.empty:
        return "no error measured"
    row, draws = rows.iloc[0], rows["error_draws"].max()
    parts = [f"error: {in_words('level', row['level'])}", row["dtype"]]
    parts += [f"{in_words('heads', row['heads'])} × {row['head_dim']}", on]
    parts += [f"{draws:.0f} draw{'' if draws == 1 else 's'}"] if pd.notna(draws) else []
    parts += [f"n = {at} (none at {n})"] if at != n else []
    return " · ".join(parts)


def kind_of(error_kind: object, target: str, value: float, column: str) -> str:
    """One of :data:`KINDS`. A score is a score whatever the target, and so is a loss."""
    if column in OF_TRAINED and abs(value) < ROUNDING:
        return "exact"
    if column not in ("score", *OF_TRAINED):
        if error_kind == "learned" or (error_kind not in ("exact", "approximation") and target == "learned"):
            return "learned"
        if error_kind == "distance" or (error_kind != "exact" and target == "other"):
            return "other"
        # A window as wide as the sequence leaves nothing out, so that such an approximation is exact here.
        if error_kind == "exact" or (column == "rel_error" and 0 <= value < ROUNDING):
            return "exact"
    return "measured" if isinstance(value, float) and math.isfinite(value) else "missing"
