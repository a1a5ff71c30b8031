"""Every row of a run for the table: its numbers in few digits, ratios to softmax's, and its distinguishing settings."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd

from attnbench.answers.report.against import Change
from attnbench.figures.kit.palette import LIGHT
from attnbench.figures.kit.ticks import plain
from attnbench.measure.status import Status
from attnbench.results.frame.agreement import ROUNDING
from attnbench.results.frame.marks import error_text, name_text
from attnbench.results.frame.relative import BASELINE, Relation
from attnbench.results.frame.scored import short_tasks
from attnbench.results.frame.settings import RUN
from attnbench.results.frame.words import in_words
from attnbench.results.record import UNCHECKED
from attnbench.suite.axes import AXES, IN_ROWS, OF_SWAPS
from attnbench.text import printable
from attnbench.units import format_bytes, format_interval, format_seconds


def times(ratio: float) -> str:
    """A positive ratio in two digits, near 1 in three: ``3.6``, ``0.91``, ``1.03``, ``140``."""
    if 0.9 <= ratio < 1.1:
        return f"{ratio:.2f}"
    rounded = float(f"{ratio:.2g}")
    return f"{rounded:.{max(0, 1 - math.floor(math.log10(rounded)))}f}"


def tokens(n: int) -> str:
    """A length: ``4096``, ``65,536``."""
    return f"{n:,}" if n >= 10_000 else str(n)


COLUMNS = {
    "label": "variant",
    "n": "n",
    "time": "time",
    "ratio": "vs softmax",
    "first_token": "first token",
    "per_token": "per token",
    "state": "cache or state",
    "peak": "peak memory",
    "error": "error",
    "score": "score",
    "loss": "loss",
    "features": "features",
    "change": "vs older run",
    "verdict": "verdict",
    "about": "measured",
    "status": "status",
    "family": "family",
    "speed": "examples/s",
    "warnings": "warning",
}
"""Key of a column -> its title, in order. ``loss`` is in nats, ``change`` is time over that of an older run."""
_KINDS = {"label": "w", "verdict": "w", "about": "a", "status": "w", "family": "x", "speed": "x", "warnings": "x"}
"""Classes of the cells that hold words (``w``, ``a``), or that only pointing at the row tells (``x``)."""
_BARS = ("time", "ratio", "score")
"""Columns with a bar beside each number."""
_MEANINGS = {"distance": "from softmax: another operator, no error", "learned": "means nothing before fitting"}

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
    *sorted((*IN_ROWS, *OF_SWAPS), key=lambda axis: AXES[axis].asked),
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


@dataclass(frozen=True)
class Heading:
    """A column of the table; ``kind``: class of its cells, ``n`` for numbers."""

    key: str
    title: str
    kind: str
    bar: bool


@dataclass(frozen=True)
class ReportTable:
    """All rows: the columns that hold something, and the content of the table's body."""

    heads: Sequence[Heading]
    body: str
    marked: Sequence[str]
    """Labels and errors, whose marks need their meanings."""


@dataclass(frozen=True)
class _Field:
    text: str = ""
    small: str = ""
    title: str = ""
    ends: tuple[float | None, ...] = ()
    """A number and both ends of its interval, for a bar."""

    def html(self, kind: str) -> str:
        title = f' title="{escape(self.title)}"' if self.title else ""
        small = f" <small>{escape(self.small, quote=False)}</small>" if self.small else ""
        return f"<td class={kind}{title}>{escape(self.text, quote=False)}{small}"


def table(frame: pd.DataFrame, beside: Mapping[Hashable, Relation], changes: Mapping[str, Change]) -> ReportTable:
    """All rows of one machine, counted from 0.

    ``beside``: row -> its numbers relative to softmax. ``changes``: cell id -> its change from an older run.
    """
    rows = [
        _cells(row, about, beside.get(number), changes.get(row["cell_id"]))
        for number, (row, about) in enumerate(zip(frame.to_dict("records"), _abouts(frame), strict=True))
    ]
    used = [key for key in COLUMNS if any(row[key].text for row in rows)]
    titles = COLUMNS | ({"ratio": "vs best exact"} if any(one.base for one in beside.values()) else {})
    heads = [Heading(key, titles[key], _KINDS.get(key, "n"), key in _BARS) for key in used]
    bars = {key: _bar_of([row[key].ends for row in rows], key) for key in used if key in _BARS}
    places = {name: f"f{place}" for place, name in enumerate(LIGHT.families)}
    lines = [f"<tr class={places.get(row['family'].text, 'fx')}>{''.join(_html(row, heads, bars))}" for row in rows]
    return ReportTable(heads, "\n".join(lines), [row[key].text for row in rows for key in ("label", "error")])


def _html(row: Mapping[str, _Field], heads: Sequence[Heading], bars: Mapping[str, Callable[..., str]]) -> Iterator[str]:
    for head in heads:
        cell = row[head.key]
        if head.key == "label":  # it may be broken after its variant and between its options
            parts = [escape(part, quote=False) for part in re.split(r"(?<=[:,])", cell.text)]
            yield f"<th scope=row><button><bdi>{'<wbr>'.join(parts)}</bdi></button>"
        else:
            yield cell.html(head.kind)
        if head.bar:
            yield bars[head.key](*cell.ends)


def _cells(
    row: Mapping[Hashable, Any], about: str, beside: Relation | None, change: Change | None
) -> dict[str, _Field]:
    time = [_known(row[f"time_{name}_s"]) for name in ("median", "ci_low", "ci_high")]
    score = [_known(row[name]) for name in ("score", "score_low", "score_high")]
    error, std, kind = _known(row["rel_error"]), _known(row["rel_error_std"]), str(row["error_kind"])
    ratio = [beside.speed, beside.low, beside.high] if beside else [None] * 3
    changed = [change.ratio, change.low, change.high] if change else [None] * 3
    lost = _between(_known(row["loss_delta_low"]), _known(row["loss_delta_high"]), _signed)
    held = "state" if beside and beside.decodes else "peak"
    less = f"{times(100 * beside.memory)} % of {beside.base or BASELINE}'s" if beside and beside.memory else ""
    failed, spread = row["status"] != Status.OK, format_interval(time[0], time[1], time[2])
    texts = {
        "n": int(row["seq_len"]),
        "first_token": format_seconds(row["first_token_s"]).removeprefix("-"),
        "per_token": format_seconds(row["token_s"]).removeprefix("-"),
        "features": _digits(row["hidden_error"], 2),
        "verdict": change.verdict if change else "",
        "about": about,
        "speed": _digits(row["examples_per_s"], 3),
        **{name: row[name] for name in ("label", "family", "warnings")},
    }
    return {key: _Field(str(text)) for key, text in texts.items()} | {
        "time": _Field(
            format_seconds(time[0]).removeprefix("-"),
            spread,
            _between(time[1], time[2], format_seconds) * spread.startswith("±"),
            (*time,),
        ),
        "ratio": _Field(
            f"{_times(ratio[0])} {beside.base if beside else ''}".strip(),
            _between(ratio[1], ratio[2], times),
            "",
            (*ratio,),
        ),
        **{
            key: _Field(format_bytes(row[f"{key}_bytes"]).removeprefix("-"), title=less * (key == held))
            for key in ("state", "peak")
        },
        "error": _Field(
            error_text(error, kind).removeprefix("-"),
            f"sd {_digits(std, 1)}" if std and error and error > ROUNDING else "",
            _MEANINGS.get(kind, ""),
        ),
        "score": _Field(
            "" if score[0] is None else f"{score[0]:.3f}", "", _between(score[1], score[2], "{:.3f}".format), (*score,)
        ),
        "loss": _Field(
            "" if _known(row["loss"]) is None else f"{row['loss']:.3f} ({_signed(row['loss_delta'])})",
            title=f"{lost} over the untouched model's" if lost else "",
        ),
        "change": _Field(_times(changed[0]), _between(changed[1], changed[2], times)),
        "status": _Field(str(row["status"]) * failed, str(row["reason"]) * failed),
    }


def _known(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _times(ratio: float | None) -> str:
    return f"{times(ratio)}×" if ratio else ""


def _signed(value: float | None) -> str:
    return f"{value:+.3f}"


def _digits(value: float | None, digits: int) -> str:
    return "" if _known(value) is None else plain(float(f"{value:.{digits}g}"))


def _between(low: float | None, high: float | None, text: Callable[[float], str]) -> str:
    return "" if low is None or high is None else f"{text(low)} to {text(high)}"


def _bar_of(rows: Sequence[tuple[float | None, ...]], key: str) -> Callable[..., str]:
    """A function from a number and its interval to its bar: on a linear scale for a score, else on a log scale."""
    log = key != "score"
    values = [value for ends in rows for value in ends if value is not None and (value > 0 or not log)]
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    if key == "ratio":  # softmax's own speed is in the middle
        high = max(1.2, high, 1 / low)
        low = 1 / high

    def place(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        return round(2 + 96 * share, 1)

    def bar(middle: float | None = None, *ends: float | None) -> str:
        if middle is None or high <= low or (log and middle <= 0):
            return "<td>"
        known = [end for end in ends if end is not None and (end > 0 or not log)]
        first, last = (place(known[0]), place(known[1])) if len(known) == 2 else (0.0, 0.0)
        style = f"--a:{place(middle):g};--l:{first:g};--w:{last - first:.3g}"
        return f'<td><i class="bar{" one" * (key == "ratio")}" style="{style}"></i>'

    return bar


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
    return " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)
