"""The conditions of a stored row: types, ranges, and agreement with its run, its cell and its samples."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from attnbench.measure.status import Status
from attnbench.results.record import FIELDS, Column, Record
from attnbench.suite.axes import AXES
from attnbench.suite.cell import Cell
from attnbench.text import one_line

_OF_THE_REGISTRY = ["options", "family", "target", "cost", "claimed_time_exponent", "claimed_memory_exponent", "inputs"]
"""Identity columns that depend on which variants and inputs are installed."""
_FIELDS = list(FIELDS)
_OF_THE_CELL = [name for name in _FIELDS[: _FIELDS.index("status")] if name not in _OF_THE_REGISTRY]
"""Columns that depend on the cell alone."""

_LARGEST, _LARGEST_INT = sys.float_info.max, 2**63 - 1
_SHORTEST, _LONGEST = 1e-12, 3.2e9
"""A picosecond and a century: bounds of a time in seconds that is not 0, but for the spread of several."""
_SPREAD = ("time_ci_low_s", "time_ci_high_s", "time_iqr_s")


def _range(name: str, column: Column) -> tuple[float, float]:
    low = -_LARGEST if column.negative else getattr(AXES[name].values, "low", 0) if name in AXES else 0
    if column.unit == "seconds" and name not in _SPREAD:
        return low, _LONGEST
    return low, _LARGEST_INT if column.kind is int or column.unit == "bytes" else _LARGEST


_RANGES = {name: _range(name, column) for name, column in FIELDS.items() if column.kind in (int, float)}
_ORDERED = (
    ("time_ci_low_s", "time_median_s", "time_ci_high_s"),
    ("time_min_s", "time_median_s", "time_ci_high_s"),
    ("loss_delta_low", "loss_delta", "loss_delta_high"),
    ("score_low", "score", "score_high"),
)


def checked(record: Record) -> Record:
    """``record`` itself, if it can be stored and read again and may come from a measurement.

    Raises:
        ValueError: a field has the wrong type or half a character, or the numbers are impossible.
    """
    for name, column in FIELDS.items():
        value = getattr(record, name)
        kinds = (int, float) if column.kind is float else (column.kind,)
        if value != value or (not (column.empty and value is None) and type(value) not in kinds):  # True is no number
            raise ValueError(f"{name} is {one_line(repr(value), 40)}")
        if isinstance(value, str):
            value.encode()  # half a character, say, raises a ValueError
    refuse_impossible({name: getattr(record, name) for name in _RANGES})
    return record


def refuse_impossible(row: Mapping[str, Any]) -> None:
    """Raise ValueError for a number that no run stores, or an interval that is not around its median or score.

    ``row``: field -> number; None or NaN if it was not measured.
    """
    numbers = {name: row[name] for name in _RANGES if row[name] is not None and row[name] == row[name]}
    for name, number in numbers.items():
        low, high = _RANGES[name]
        low = _SHORTEST if high == _LONGEST and number > 0 else low
        if number > high or number < -_LARGEST:
            raise ValueError(f"{name} is too large")
        if number < low:
            raise ValueError(f"{name} is {number}, below {low}")
    for names in _ORDERED:
        for below, above in itertools.pairwise(name for name in names if name in numbers):
            if numbers[below] > numbers[above]:
                raise ValueError(f"{below} is above {above}")
    if max(numbers.get("score", 0), numbers.get("score_high", 0)) > 1:
        raise ValueError(f"score is {numbers.get('score')}, its upper end {numbers.get('score_high')}, above 1")
    if abs(numbers.get("cosine", 0)) > 1.001:  # rounding may go a little beyond 1
        raise ValueError(f"cosine is {numbers['cosine']}, beyond 1")


_Amount = Annotated[float, Field(ge=0, le=_LARGEST)]
_Number = Annotated[float, Field(allow_inf_nan=False)]


class _StoredSample(BaseModel, strict=True, extra="forbid"):
    seconds: _Amount
    calls: Annotated[float, Field(gt=0, le=_LARGEST)]
    switches: _Amount = 0
    stopped: _Amount = 0
    waited: _Amount = 0
    sm_mhz: _Amount = 0
    throttled: _Amount = 0
    yardstick: Annotated[list[_Amount], Field(min_length=2, max_length=2)] = []


class _StoredPoint(BaseModel, strict=True, extra="forbid"):
    step: int
    train_loss: _Number
    val_score: _Number
    val_loss: _Number
    learning_rate: _Number
    cpu_s: _Number


_SAMPLES, _POINTS = TypeAdapter(list[_StoredSample]), TypeAdapter(list[_StoredPoint])


def are_samples(value: object) -> bool:
    """True if it can come from a clock: seconds, calls, switches and stops of each sample."""
    try:
        _SAMPLES.validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def are_points(value: object) -> bool:
    """True if it can be a learning curve: increasing steps and finite numbers."""
    try:
        points = _POINTS.validate_python(value, strict=True)
    except ValidationError:
        return False
    return all(before.step < after.step for before, after in itertools.pairwise(points))


def foreign_to_run(record: Record, environment: Mapping[str, Any]) -> str:
    """Difference of a row from the run that this ``environment.json`` belongs to; empty where there is none."""
    machine = environment.get("environment")
    machines = environment.get("machines")  # of a merged run
    known = [one.get("machine_id") for one in machines if isinstance(one, dict)] if isinstance(machines, list) else []
    wanted = {
        "machine_id": record.machine_id if record.machine_id in known else environment.get("machine_id"),
        "torch_version": machine.get("torch") if isinstance(machine, dict) else None,
        "threads": 1 if record.steps is not None and record.device == "cpu" else environment.get("threads"),
        "method_version": environment.get("method_version"),
    }
    return _difference(record, {name: value for name, value in wanted.items() if value is not None}, "this run")


def foreign_to_cell(record: Record, cell: Cell) -> str:
    """Difference of a row from the cell that its id stands for; empty where there is none."""
    identity = Record.of(cell, Status.OK)
    return _difference(record, {name: getattr(identity, name) for name in _OF_THE_CELL}, "the cell of its id")


def _difference(record: Record, wanted: Mapping[str, object], owner: str) -> str:
    for name, value in wanted.items():
        if getattr(record, name) != value:
            got = one_line(repr(getattr(record, name)), 40)
            return f"{name} is {got}, but {one_line(repr(value), 40)} for {owner}"
    return ""


def foreign_to_samples(record: Record, rounds: Iterable[list[dict[str, Any]]]) -> str:
    """Why a row's time cannot come from these samples of its rounds; empty if it can."""
    seconds = [sample["seconds"] for samples in rounds for sample in samples]
    low, high, middle = min(seconds, default=0.0), max(seconds, default=0.0), record.time_median_s
    if middle is None:
        return ""
    if not low <= middle <= high:
        return f"time_median_s is {middle}, but the samples lie between {low} and {high}"
    if record.time_samples is not None and record.time_samples > len(seconds):
        return f"time_samples is {record.time_samples}, but there are {len(seconds)} samples"
    return ""
