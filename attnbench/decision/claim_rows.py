"""The rows of a table that a claim is about, and what tells one from the others."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from attnbench.axes import FOLLOWING, exists
from attnbench.decision.claims import Value
from attnbench.plots.setting import RUN, SAME
from attnbench.spec import Scalar, Spec, parse_spec

_INTERVALS = {"time_median_s": ("time_ci_low_s", "time_ci_high_s")}
"""Columns that have a measured interval -> the columns with its ends."""
_ALIKE = (*(name for name in SAME if name not in (RUN, "quick")), "seq_len", "kv_len", "inputs", "task", RUN)
"""Columns in which two rows agree if nothing but the variant differs."""
AS_LENGTH = ("seq_len", "kv_len")
AS_HEADS = ("heads", "head_dim", "kv_heads", "v_dim")
"""Columns in which rows differ that share a model's width among more or fewer heads."""
_NAMES = {"seq_len": "n", "head_dim": "d"}
"""Columns that a reader knows by a letter."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a claim needs of a row."""

    place: Mapping[str, Any]
    """Column -> value, of the columns in which rows that are compared agree; options of the variant are among them."""
    value: float
    low: float
    high: float

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for rows that are compared."""
        # NaN differs from itself, and would never meet its like.
        return tuple((name, str(value)) for name, value in sorted(self.place.items()) if name != "options")

    def without(self, columns: Collection[str]) -> Row:
        """The same row, about whose place these columns say nothing."""
        return replace(self, place={name: value for name, value in self.place.items() if name not in columns})


def with_followers(columns: Collection[str]) -> set[str]:
    """These columns and those that follow them unless a suite says otherwise, as the width of values that of heads."""
    return {*columns, *(axis for axis, other in FOLLOWING.items() if other in columns)}


def select(rows: pd.DataFrame, column: str, label: str, other: str | None = None) -> list[Row]:
    """The rows of a variant that have a number in a column.

    Options that neither ``label`` nor ``other`` names are part of the place, if both are about one variant.
    """
    spec, beside = parse_spec(label), parse_spec(other) if other else None
    named = {name for one in (spec, beside) if one for name, _ in one.options}
    found = []
    for row in of_variant(rows[rows[column].notna()], label).to_dict("records"):
        options = json.loads(row["options"])
        place = {name: row[name] for name in _ALIKE if name in row}
        if beside is None or beside.name == spec.name:
            place |= {name: value for name, value in options.items() if name not in named}
        value = float(row[column])
        low, high = _ends({str(name): cell for name, cell in row.items()}, column, value)
        if not (math.isfinite(low) and math.isfinite(high)):  # one sample of --quick says nothing about its spread
            continue
        found.append(Row(place | {"options": options}, value, low, high))
    return found


def having(rows: pd.DataFrame, values: Mapping[str, Value]) -> pd.DataFrame:
    """The rows that have these values in these columns; None for an empty one."""
    chosen = np.ones(len(rows), dtype=np.bool_)
    for column, value in values.items():
        chosen &= (rows[column].isna() if value is None else rows[column] == value).to_numpy(np.bool_)
    return rows[chosen]  # once, since each choice copies all columns


def of_variant(rows: pd.DataFrame, label: str) -> pd.DataFrame:
    """The rows of a variant with all options that ``label`` names."""
    spec = parse_spec(label)
    pairs = zip(rows["variant"], rows["options"], strict=True)
    chosen = [name == spec.name and has_options(json.loads(options), spec) for name, options in pairs]
    return rows[np.array(chosen, dtype=np.bool_)]


def is_spec(spec: Spec, wanted: Spec) -> bool:
    """Whether it is ``wanted``, perhaps with further options."""
    return spec.name == wanted.name and has_options(dict(spec.options), wanted)


def has_options(options: Mapping[str, Scalar], spec: Spec) -> bool:
    """Whether all options of ``spec`` are among these."""
    return all(name in options and options[name] == value for name, value in spec.options)


def _ends(row: Mapping[str, Any], column: str, value: float) -> tuple[float, float]:
    if column in _INTERVALS:
        low, high = (float(row[name]) for name in _INTERVALS[column])
        return low, high
    if column == "rel_error" and row["error_draws"] > 1:
        half = 2 * float(row["rel_error_std"]) / math.sqrt(row["error_draws"])  # two standard errors
        return value - half, value + half
    return value, value


def names_of(rows: Sequence[Row], ignore: Sequence[str] = ()) -> list[str]:
    """What tells each row from the others: the columns and options in which they differ."""
    flat = [{**one.place, **one.place["options"]} for one in rows]
    known = [name for name in dict.fromkeys(name for one in flat for name in one) if name != "options"]
    levels = [str(one.get("level", "model")) for one in flat]
    differ = [
        name
        for name in known
        if name not in ignore
        and len({str(one.get(name)) for one, level in zip(flat, levels, strict=True) if exists(name, level)}) > 1
    ]
    for axis, other in FOLLOWING.items():
        if other in differ and axis in differ and all(one[other] == one[axis] for one in flat):
            differ.remove(axis)
    return [
        ", ".join(_said(name, one[name]) for name in differ if name in one and exists(name, level))
        for one, level in zip(flat, levels, strict=True)
    ]


def _said(name: str, value: object) -> str:
    """``n=512``; a level needs no more than its value."""
    return str(value) if name == "level" else f"{_NAMES.get(name, name)}={_text(value)}"


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def lines_of(rows: Sequence[Row], apart: Sequence[str] = AS_LENGTH) -> list[list[Row]]:
    """Rows that differ in these columns alone, by default in their length; those of the least come first."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = tuple((name, str(value)) for name, value in sorted(row.place.items()) if name not in apart)
        found.setdefault(key, []).append(row)
    return [sorted(line, key=lambda row: int(row.place[apart[0]])) for line in found.values()]
