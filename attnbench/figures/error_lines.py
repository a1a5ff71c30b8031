"""The panels of the error figure: the rows of each line, and the quantity on the horizontal axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from attnbench.errors import UsageError
from attnbench.measure.status import Status
from attnbench.results.frame.agreement import ROUNDING
from attnbench.results.frame.label_options import (
    is_number,
    logit_std,
    options_of,
    pick_inputs,
    varying_numbers,
    without_logit_std,
    written,
)
from attnbench.results.frame.settings import Setting, chosen_length
from attnbench.results.frame.words import bare

ORACLES = ("oracle-lowrank", "oracle-topk")


@dataclass
class Curve:
    """Errors of one method at the values on a panel's horizontal axis."""

    name: str
    family: str
    variant: str
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)
    rows: list[object] = field(default_factory=list)
    """Index of each value's row."""
    beside: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Inputs without a place on the horizontal axis, such as those of a trained model -> error and its deviation."""


@dataclass(frozen=True)
class Panel:
    """The contents of one pair of axes."""

    heading: str
    lines: list[Curve]
    x_label: str
    said: str
    trivial: dict[float, float]
    beside: dict[str, float] = field(default_factory=dict)
    """Inputs without a place on the axis -> error of mean(V); NaN if unknown."""


def panels_of(heading: str, rows: pd.DataFrame, inputs: str | None, option: str | None) -> list[Panel]:
    """The panels for the rows of one setting at one length."""
    ok = rows[(rows["status"] == Status.OK) & np.isfinite(rows["rel_error"])]
    drawn = ok[(ok["error_kind"] == "approximation") & (ok["rel_error"] >= ROUNDING)]
    if drawn.empty:
        return []
    options, here = options_of(drawn), _inputs(drawn, inputs)
    spent, axis = over_option(drawn[drawn["inputs"] == here], options, option)
    panels = []
    if spent:
        known = trivial(ok[ok["inputs"] == here])
        panels.append(Panel(heading, spent, f"{axis} (log2 scale)", f"inputs {here}", known))
    kinds = ok["inputs"].map({one: without_logit_std(one) for one in ok["inputs"].unique() if logit_std(one)})
    for kind in kinds.dropna().unique():
        if peaked := over_logit_std(drawn[kinds[drawn.index] == kind], options):
            axis = "standard deviation of the logits (log2 scale)"
            others = _beside(peaked, drawn[kinds[drawn.index].isna()], ok)
            panels.append(Panel(heading, peaked, axis, f"inputs {kind}", trivial(ok[kinds == kind]), others))
    return panels


def at_one_length(setting: Setting) -> pd.DataFrame:
    """The rows of the longest of the lengths with most measured rows."""
    measured = setting.ok if len(setting.ok) else setting.rows
    return setting.rows[setting.rows["seq_len"] == chosen_length(None, measured["seq_len"].value_counts(), "rows")]


def _inputs(rows: pd.DataFrame, wanted: str | None) -> str:
    known = rows["inputs"].value_counts(sort=False)
    if wanted is None:
        # Among inputs with equally many rows, take those with a logit standard deviation nearest to 1.
        far = {label: abs(math.log(logit_std(str(label)) or 1e9)) for label in known.index}
        return str(min(known.index, key=lambda label: (-known[label], far[label])))
    return pick_inputs([str(label) for label in known.index], wanted)


def over_option(
    rows: pd.DataFrame, options: Mapping[str, Mapping[str, Any]], wanted: str | None
) -> tuple[list[Curve], str]:
    """One line for each variant and setting of its other options, and the axis label with the options' names."""
    lines: dict[str, Curve] = {}
    names: dict[str, list[str]] = {}
    known: set[str] = set()
    for variant, part in rows.groupby("variant", sort=False):
        scaled = {label: _scaled(options[label]) for label in part["label"]}
        varying = varying_numbers(scaled.values())
        known |= set(varying)
        name = next((one for one in varying if wanted in (None, one)), None)
        if name is None and variant not in ORACLES:
            continue
        if name is not None:
            names.setdefault(name, []).append(str(variant))
        told = [key for key in differing([options[label] for label in part["label"]]) if key != name]
        columns = ["label", "family", "rel_error", "rel_error_std"]
        for row, label, family, error, std in part[columns].itertuples():
            rest = ", ".join(_told(key, options[label]) for key in told)
            value = math.nan if name is None else scaled[label].get(name)
            if value is None:
                continue
            title = str(label) if name is None else f"{bare(str(variant), label)} {rest}".rstrip()
            line = lines.setdefault(title, Curve(title, str(family), str(variant)))
            line.x.append(value)
            line.y.append(error)
            line.std.append(std)
            line.rows.append(row)
    if wanted is not None and not names:
        raise UsageError(
            f"no option {wanted!r} varies in the error rows; there are: {', '.join(sorted(known)) or 'none'}"
        )
    if not names:
        return [], ""
    axis = "; ".join(f"{name} ({', '.join(variants)})" if len(names) > 1 else name for name, variants in names.items())
    return list(lines.values()), axis


def _scaled(options: Mapping[str, Any]) -> dict[str, float]:
    """The options with a place on a log scale, on which 0 gets one at the left end."""
    return {name: float(value) for name, value in options.items() if is_number(value) and value >= 0}


def _told(name: str, options: Mapping[str, Any]) -> str:
    value = options.get(name, "default")
    return value if isinstance(value, str) and name in options else f"{name}={written(value)}"


def differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the options that are not the same everywhere; a missing option counts as a value."""
    names = sorted({name for one in options for name in one})
    return [name for name in names if len({repr(one.get(name)) for one in options}) > 1]


def over_logit_std(rows: pd.DataFrame, options: Mapping[str, Mapping[str, Any]]) -> list[Curve]:
    """One line for each variant: its label without options, else the middle one of the labels with most values."""
    rows = rows.assign(_std=rows["inputs"].map({label: logit_std(label) for label in rows["inputs"].unique()}))
    rows = rows[rows["_std"].notna() & (rows["_std"] > 0)]
    lines = []
    for variant, part in rows.groupby("variant", sort=False):
        if variant == "mean-value":
            continue  # it is the line of the trivial answer
        counts = part.groupby("label", sort=False)["_std"].nunique()
        most = [str(label) for label in counts[counts == counts.max()].index]
        numbers = list(varying_numbers(options[label] for label in most))
        most.sort(key=lambda label: (len(options[label]), [options[label].get(name, 0) for name in numbers]))
        label = most[0] if ":" not in most[0] else most[len(most) // 2]
        if counts.max() > 1:
            own = part[part["label"] == label]
            x, y, std = (list(own[column]) for column in ("_std", "rel_error", "rel_error_std"))
            lines.append(Curve(label, str(own["family"].iloc[0]), str(variant), x, y, std, [*own.index]))
    return lines


def _beside(lines: Sequence[Curve], rows: pd.DataFrame, ok: pd.DataFrame) -> dict[str, float]:
    medians = ok.groupby("inputs")["trivial_error"].median()
    for line in lines:
        own = rows.loc[rows["label"] == line.name, ["inputs", "rel_error", "rel_error_std"]]
        line.beside = {str(inputs): (error, std) for inputs, error, std in own.itertuples(index=False)}
    return {inputs: float(medians[inputs]) for line in lines for inputs in line.beside}


def trivial(rows: pd.DataFrame) -> dict[float, float]:
    """Standard deviation of the logits (NaN if the inputs do not say) -> error of mean(V)."""
    medians = rows.groupby("inputs", sort=False)["trivial_error"].median().dropna()
    stds = [logit_std(str(label)) for label in medians.index]
    return {math.nan if std is None else std: float(error) for std, error in zip(stds, medians, strict=True)}
