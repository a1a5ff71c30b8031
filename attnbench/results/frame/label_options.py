"""Read a label's options and its inputs: numbers that vary, and values in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import pandas as pd

from attnbench.contract.spec import format_scalar, parse_spec
from attnbench.errors import UsageError


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
    """True for a finite number that is not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def written(value: object) -> str:
    """An option's value as one would type it."""
    return format_scalar(value) if value is None or isinstance(value, bool | int | float | str) else str(value)


def logit_std(inputs: str) -> float | None:
    """The ``logit_std`` of an inputs label; None if it has none."""
    try:
        value = dict(parse_spec(inputs).options).get("logit_std")
    except UsageError:
        return None
    return float(value) if is_number(value) else None


def without_logit_std(inputs: str) -> str:
    """An inputs label without its ``logit_std``."""
    name, options = parse_spec(inputs).name, dict(parse_spec(inputs).options)
    told = ",".join(f"{key}={written(value)}" for key, value in options.items() if key != "logit_std")
    return f"{name}:{told}" if told else name


def most_peaked(inputs: Iterable[str]) -> dict[str, float]:
    """Label -> ``logit_std`` for the largest set of labels that differ in it alone."""
    kinds: dict[str, dict[str, float]] = {}
    for label in inputs:
        if std := logit_std(label):
            kinds.setdefault(without_logit_std(label), {})[label] = std
    return max(kinds.values(), key=len, default={})


def pick_inputs(known: Sequence[str], wanted: str) -> str:
    """The label that equals ``wanted`` up to spelling, or has that name; UsageError if there is none."""
    spec = parse_spec(wanted)
    exact = [label for label in known if label == wanted or parse_spec(label) == spec]
    named = [label for label in known if parse_spec(label).name == wanted]
    if not exact and not named:
        raise UsageError(f"no error rows with inputs {wanted!r}; there are: {', '.join(known)}")
    return [*exact, *named][0]
