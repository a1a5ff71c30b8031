"""Every row of a run for the table: its numbers in few digits, ratios to softmax's, and its distinguishing settings."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attnbench.answers.report.against import Change
from attnbench.measure.statistics import judged
from attnbench.results.frame.marks import error_text, name_text
from attnbench.results.frame.scored import short_tasks
from attnbench.results.frame.settings import RUN, Setting
from attnbench.results.frame.words import in_words
from attnbench.results.record import UNCHECKED
from attnbench.suite.axes import AXES, IN_ROWS
from attnbench.text import printable
from attnbench.units import format_interval, format_seconds

DIGITS = 5
"""Significant digits; three are shown."""


def compact(value: float | None) -> float | int | None:
    """``0.118965486`` -> ``0.11897``; None, NaN and infinity -> None."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


def times(ratio: float) -> str:
    """A positive ratio in two digits, near 1 in three: ``3.6``, ``0.91``, ``1.03``, ``140``."""
    if 0.9 <= ratio < 1.1:
        return f"{ratio:.2f}"
    rounded = float(f"{ratio:.2g}")
    return f"{rounded:.{max(0, 1 - math.floor(math.log10(rounded)))}f}"


def tokens(n: int) -> str:
    """A length: ``4096``, ``65,536``."""
    return f"{n:,}" if n >= 10_000 else str(n)


BASELINE = "softmax"
_TIMES = ("median", "ci_low", "ci_high")


@dataclass(frozen=True)
class Relative:
    """One row relative to softmax at the same length."""

    speed: float
    """Time of softmax over its time: above 1 it is faster."""
    low: float | None
    """Lower end of the interval of ``speed``, from both medians' intervals (``high``: upper); None without these."""
    high: float | None
    memory: float | None
    """Its peak over that of softmax; None if one was not measured, or is zero."""

    @property
    def verdict(self) -> str:
        """``faster`` or ``slower`` by the rule of ``compare``, else ``unsure``."""
        word = judged(None if self.low is None or self.high is None else (1 / self.high, 1 / self.low)).word
        return word if word in ("faster", "slower") else "unsure"


def relative(setting: Setting) -> dict[Hashable, Relative]:
    """Row's index -> its numbers relative to softmax; without softmax itself."""
    columns = ["label", "variant", "seq_len", "kv_len", *(f"time_{what}_s" for what in _TIMES), "peak_bytes"]
    timed = setting.ok.loc[setting.ok["time_median_s"] > 0, columns]
    groups: dict[tuple[int, int], dict[Hashable, Mapping[Hashable, Any]]] = {}
    for index, row in zip(timed.index, timed.to_dict("records"), strict=True):
        groups.setdefault((row["seq_len"], row["kv_len"]), {})[index] = row
    found: dict[Hashable, Relative] = {}
    for rows in groups.values():
        of_softmax = [index for index, row in rows.items() if row["variant"] == BASELINE]
        if of_softmax:
            base = min(of_softmax, key=lambda index: len(rows[index]["label"]))
            found |= {index: ratio(rows[base], row) for index, row in rows.items() if index != base}
    return found


def ratio(base: Mapping[Hashable, Any], row: Mapping[Hashable, Any]) -> Relative:
    """``row`` relative to ``base``; both have a time."""
    low, high = (
        _over(base[f"time_ci_{ours}_s"], row[f"time_ci_{theirs}_s"])
        for ours, theirs in (("low", "high"), ("high", "low"))
    )
    speed = base["time_median_s"] / row["time_median_s"]
    return Relative(float(speed), low, high, _over(row["peak_bytes"], base["peak_bytes"]))


def _over(one: float, other: float) -> float | None:
    return float(one / other) if math.isfinite(one) and math.isfinite(other) and one > 0 and other > 0 else None


def of_all(settings: Sequence[Setting]) -> dict[Hashable, Relative]:
    """The numbers of several settings' rows relative to softmax."""
    return {index: one for setting in settings for index, one in relative(setting).items()}


COLUMNS = (
    *("label", "family", "about", "n", "status", "reason", "warnings"),
    *("time_text", "spread", "error_text"),
    *("time", "time_low", "time_high", "speed", "ratio", "ratio_low", "ratio_high", "peak", "memory"),
    *("error_kind", "error", "error_std", "score", "score_low", "score_high"),
    *("first_token", "per_token", "state"),
    *("loss", "loss_delta", "loss_low", "loss_high", "features"),
    *("change", "change_low", "change_high", "verdict"),
)
"""Fields of a row, in order, with texts formatted as in every other table.

``speed`` is in examples per second, ``first_token`` and ``per_token`` in seconds, ``state`` in bytes; ``ratio`` and
``memory`` are relative to softmax, ``loss_delta`` to the untouched model, ``change`` to an older run.
"""

_RULES = (
    *(name for name, axis in AXES.items() if axis.only == "score"),
    "steps",
    "pretrain_steps",
    "guide",
    "protocol",
)
"""Columns that only trainings have."""
_OF_TRAINING = (*_RULES, "seed", "process", "threads")
"""Columns shown for trainings only, unless other rows differ in them too."""
_ABOUT = (
    *(RUN, "suite", "level", "pass"),
    *sorted(IN_ROWS, key=lambda axis: AXES[axis].asked),
    *("layers", "ffn", "device", "process", "threads", *_RULES),
    *("quick", "torch_version", "machine_id", "method_version"),
)
"""Columns that distinguish rows of one label and length; a task is among the inputs."""


_UNCHECKED = "not held to its laws before it was measured (--unchecked)"


def marked(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows as the figures label them, with text fit to be shown and a warning for unchecked ones."""
    text = {name: frame[name].map(printable) for name in frame.columns if frame[name].dtype == object}
    frame = frame.assign(**text)
    frame.attrs = {}  # pandas copies them with every part of the table
    more = frame["warnings"].where(frame["warnings"] == "", frame["warnings"] + "; ") + _UNCHECKED
    frame = frame.assign(warnings=frame["warnings"].mask(frame["laws"] == UNCHECKED, more))
    return frame.assign(label=list(map(name_text, frame["label"], frame["own_form"])))


def table(
    frame: pd.DataFrame, families: list[str], beside: Mapping[Hashable, Relative], changes: Mapping[str, Change]
) -> dict[str, Any]:
    """All rows for the scripts.

    ``frame``: rows of one machine, counted from 0. ``families`` gets new names; a row holds the place of its own.
    ``beside``: row -> its numbers relative to softmax. ``changes``: cell id -> its change from an older run.
    """
    abouts = _abouts(frame)
    known = list(dict.fromkeys(abouts))
    places = {about: place for place, about in enumerate(known)}
    families += [name for name in dict.fromkeys(frame["family"]) if name not in families]
    rows = [
        _row(row, families.index(str(row["family"])), places[about], beside.get(number), changes.get(row["cell_id"]))
        for number, (row, about) in enumerate(zip(frame.to_dict("records"), abouts, strict=True))
    ]
    return {"columns": list(COLUMNS), "abouts": known, "rows": rows}


def _row(
    row: Mapping[Hashable, Any], family: int, about: int, beside: Relative | None, change: Change | None
) -> list[Any]:
    numbers = ("time_median_s", "time_ci_low_s", "time_ci_high_s", "examples_per_s")
    ratios = (beside.speed, beside.low, beside.high) if beside else (None, None, None)
    values = [
        *(row["label"], family, about, int(row["seq_len"]), row["status"], row["reason"], row["warnings"]),
        format_seconds(row["time_median_s"]).removeprefix("-"),
        format_interval(*(row[name] for name in numbers[:3])),
        error_text(row["rel_error"], row["error_kind"]).removeprefix("-"),
        *(compact(row[name]) for name in numbers),
        *map(compact, ratios),
        compact(row["peak_bytes"]),
        compact(beside.memory if beside else None),
        *(row["error_kind"], compact(row["rel_error"]), compact(row["rel_error_std"])),
        *(compact(row[name]) for name in ("score", "score_low", "score_high")),
        *map(compact, (row["first_token_s"], row["token_s"], row["state_bytes"])),
        *(compact(row[name]) for name in ("loss", "loss_delta", "loss_delta_low", "loss_delta_high", "hidden_error")),
        *((*map(compact, (change.ratio, change.low, change.high)), change.verdict) if change else ()),
    ]
    while values[-1] in (None, ""):  # most rows lack the last columns
        values.pop()
    return [None if value == "" else value for value in values]


def _abouts(frame: pd.DataFrame) -> list[str]:
    training = frame["protocol"] != ""
    names = [name for name in _ABOUT if name in frame and _tells(frame, name, training)]
    tasks = short_tasks(set(frame["inputs"]))
    return [_words(row, names, tasks) for row in frame.to_dict("records")]


def _tells(frame: pd.DataFrame, name: str, training: pd.Series[bool]) -> bool:
    if other := _followed(name):  # in self-attention the number of keys is the length itself
        return bool((frame[name] != frame[other]).any())
    if name in _OF_TRAINING:  # trainings differ from timed rows in all of these, which "scored" says already
        return any(part[name].nunique(dropna=True) > 1 for part in (frame[training], frame[~training]))
    return bool(frame[name].nunique(dropna=False) > 1)


def _followed(name: str) -> str:
    """The axis that this one equals by default; empty for none."""
    return AXES[name].same_as if name in AXES else ""


def _words(row: Mapping[Hashable, Any], names: list[str], tasks: Mapping[str, str]) -> str:
    parts = []
    for name in names:
        value = row[name]
        if pd.isna(value) or value == "" or value is False or value == row.get(_followed(name), ""):
            continue
        if name in _RULES and not row["protocol"]:
            continue
        if name == "inputs":
            parts.append(tasks[str(value)])
        elif name == "level":
            parts.append(str(value))
        else:
            parts.append(in_words(name, value))
    if row["protocol"]:
        parts.append("trained")
    return " · ".join(parts)
