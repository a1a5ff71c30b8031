"""The fastest form at each of many shapes that keeps an error: ``attnbench best``.

At each shape all forms take turns, as in ``attnbench compare``. The verdicts of the whole table hold together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from attnbench.contract.spec import parse_spec, parse_specs
from attnbench.contract.variant import VARIANTS
from attnbench.errors import UsageError, any_of, did_you_mean
from attnbench.figures.published.point_file import check_names, csv_lines, csv_text
from attnbench.harness.compare.compare import CompareRow, Comparison, Contest, OnLength, Side, Stopped
from attnbench.harness.compare.compare_question import CompareQuestion
from attnbench.harness.outside.isolation import WorkerFailed
from attnbench.harness.trial import load_all
from attnbench.measure.machine import resolve_device
from attnbench.measure.statistics import Ratio
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.axes import IN_ROWS, exists
from attnbench.suite.cell import Pass
from attnbench.suite.expand import read_axis
from attnbench.suite.named_shapes import known
from attnbench.text import quantity
from attnbench.units import format_number

EXACT = "exact"
"""A word for all exact forms of this machine, in place of a variant."""
_AXES = {"n": "seq_len", **{axis: axis for axis in IN_ROWS if exists(axis, "operator")}}
COLUMNS = ("name", "shape", "pass", *_AXES)
"""The columns that a file of shapes may have."""
_BACKENDS = {"cpu": ("math", "flash")}
_ON_GPU = ("math", "flash", "efficient", "cudnn")


@dataclass(frozen=True, slots=True)
class Workload:
    """One shape of the question, at one length or several."""

    name: str
    place: str
    """The file and line or the option that names it."""
    values: Mapping[str, Any]
    """Axis, or ``shape`` or ``pass_`` -> value; others have their defaults."""
    lengths: Sequence[int]


def shapes_of(file: Path | None, names: str | None, lengths: Sequence[int]) -> list[Workload]:
    """The shapes of a CSV file and those named with commas between them; ``lengths`` are those of shapes without one.

    Raises UsageError if there is none; or if a name, a column or a value is wrong, with the file and the line.
    """
    named = [one.strip() for one in names.split(",")] if names is not None else []
    try:
        asked = [Workload(known(one), f"--shape {one}", {"shape": one}, lengths) for one in named]
    except UsageError as error:
        raise UsageError(f"--shape: {error}") from None
    asked += [] if file is None else _in_file(file, lengths)
    if not asked:
        raise UsageError("best needs shapes; for example: attnbench best --shape llama3-8b --n 1024, or a CSV file")
    return asked


def _in_file(file: Path, lengths: Sequence[int]) -> list[Workload]:
    columns, asked = list[str](), list[Workload]()
    for at, texts in csv_lines(file, csv_text(file, "CSV file of shapes")):
        if not any(texts):
            continue
        if not columns:
            check_names(at, texts, COLUMNS)
            columns = texts
        elif len(texts) != len(columns):
            here = f"{quantity(len(texts), 'cell')}, but {quantity(len(columns), 'column')}"
            raise UsageError(f"{at}: {here}; write a value or nothing")
        else:
            asked.append(_asked(file, at, dict(zip(columns, texts, strict=True)), lengths))
    if not asked:
        raise UsageError(f"{file}:1: no shapes; write columns such as n,heads,head_dim and a row for each shape")
    return asked


def _asked(file: Path, at: str, texts: Mapping[str, str], lengths: Sequence[int]) -> Workload:
    given = {name: text for name, text in texts.items() if text}
    name, shape, pass_ = (given.pop(one, "") for one in ("name", "shape", "pass"))
    values: dict[str, Any] = {"shape": shape} if shape else {}
    try:
        if shape:
            known(shape)
        if pass_ and pass_ not in get_args(Pass):
            hint = did_you_mean(pass_, get_args(Pass)) or f"; write {any_of(get_args(Pass))}"
            raise UsageError(f"unknown pass {pass_[:60]!r}{hint}")
        read = {column: read_axis(_AXES[column], text, column) for column, text in given.items()}
        for column, found in read.items():
            if column != "n" and len(found) > 1:
                raise UsageError(f"{column!r} has {len(found)} values; write one, and a row for each of the others")
    except UsageError as error:
        raise UsageError(f"{at}: {error}") from None
    own = read.pop("n", lengths)
    values |= {_AXES[column]: found[0] for column, found in read.items()}
    values |= {"pass_": pass_} if pass_ else {}
    return Workload(name or shape or f"{file.name}:{at.rpartition(':')[2]}", at, values, own)


def forms_of(variants: Sequence[str], device: str) -> list[str]:
    """The labels of the variants that are measured, :data:`EXACT` spelled out; UsageError for an unknown one."""
    labels: dict[str, None] = {}
    for text in variants or (EXACT,):
        specs = _exact(device) if text == EXACT else parse_specs(text)
        labels |= {VARIANTS.get(spec.name).normalise(spec).label: None for spec in specs}
    return list(labels)


def _exact(device: str) -> list[Any]:
    names = [one.name for one in VARIANTS if one.kind == "operator" and one.traits.exact]
    backends = _BACKENDS.get(device.partition(":")[0], _ON_GPU)
    return [parse_spec(one) for one in (*names, *(f"sdpa:backend={backend}" for backend in backends))]


@dataclass(frozen=True, slots=True)
class BestChoice:
    """The answer at one shape and length."""

    asked: Workload
    about: str
    """Pass, masks, sizes and data type, in words."""
    n: int
    row: Record
    """One of its rows, which has the axes."""
    left_out: Mapping[str, str]
    """Form -> the reason why it is not chosen from, or has no verdict."""
    fastest: Side | None = None
    """None if nothing keeps the error."""
    verdict: str = "none"
    """``faster``, ``a tie``, ``withheld``, ``the only one``, or ``none``; perhaps with the mark of a busy machine."""
    tied: Sequence[str] = ()
    next: str | None = None
    """The fastest of the forms that are slower beyond doubt; None if another form has no verdict."""
    margin: Ratio | None = None
    """The time of that one over the time of the fastest."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the axes of the shape; None for nothing."""
        record, margin = (self.fastest.record if self.fastest else None), self.margin
        columns = self.row.to_json()
        return {
            "shape": self.asked.name,
            "about": self.about,
            **{axis: columns[axis] for axis in ("pass", *_AXES.values())},
            "verdict": self.verdict,
            "fastest": record and record.label,
            "time_median_s": self.fastest and self.fastest.time,
            **{name: record and getattr(record, name) for name in ("peak_bytes", "rel_error", "kernel")},
            "tied": self.tied,
            "next": self.next,
            "margin": margin and margin.estimate,
            "margin_ci_low": margin and margin.low,
            "margin_ci_high": margin and margin.high,
            "left_out": self.left_out,
        }


@dataclass(slots=True)
class Best:
    """The answers at all shapes that were measured."""

    max_error: float
    family: int
    """Number of ratios whose verdicts hold together."""
    choices: list[BestChoice] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The rows of ``attnbench compare --json``, with the name of the shape."""
    records: list[Record] = field(default_factory=list)
    environment: Mapping[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    stopped: KeyboardInterrupt | None = None
    """Ctrl-C, after which nothing was measured."""

    def add(self, asked: Workload, about: str, found: Comparison) -> None:
        """Take the comparison at one shape, finished or not."""
        plain = found.to_json()
        self.environment = plain["environment"]
        self.warnings += [f"{asked.name}: {one}" for one in found.warnings]
        self.rows += [{"shape": asked.name, **row} for row in plain["rows"]]
        at: dict[int, dict[tuple[str, str], CompareRow]] = {}
        for pair, rows in found.rows.items():
            for row in rows:
                at.setdefault(row.n, {})[pair] = row
                self.records += [row.a.record, row.b.record]
        self.choices += [choose(asked, about, n, pairs, self.max_error) for n, pairs in at.items()]

    def to_json(self) -> dict[str, Any]:
        """Answers, rows, warnings, the machine, and the number of ratios that hold together, for a program."""
        shapes = [one.to_json() for one in self.choices]
        about = {"environment": self.environment, "warnings": self.warnings, "max_error": self.max_error}
        return {**about, "comparisons": self.family, "shapes": shapes, "rows": self.rows}


def choose(asked: Workload, about: str, n: int, pairs: Mapping[tuple[str, str], CompareRow], most: float) -> BestChoice:
    """The answer from the rows of each pair of forms, or of one with itself.

    The fastest is the one of least mean ratio to all others that keep the error ``most``.
    """
    sides = {label: side for (a, b), row in pairs.items() for label, side in ((b, row.b), (a, row.a))}
    reasons = {label: _against(side, most) for label, side in sides.items()}
    out, kept = {label: why for label, why in reasons.items() if why}, [one for one in sides if not reasons[one]]
    row = next(iter(pairs.values())).a.record
    if not kept:
        return BestChoice(asked, about, n, row, out)
    logs = {pair: math.log(row.ratio.estimate) for pair, row in pairs.items() if row.ratio}
    logs |= {(b, a): -log for (a, b), log in logs.items()}
    logs |= {(one, one): 0.0 for one in kept}
    first, *others = sorted(kept, key=lambda one: fmean(logs.get((one, other), math.inf) for other in kept))
    others.sort(key=lambda one: logs.get((one, first), math.inf))
    rows = {one: pairs.get((first, one)) or pairs[one, first] for one in others}
    tied = [one for one, beside in rows.items() if beside.verdict in ("same", "inconclusive")]
    withheld = {one: f"no verdict: {beside.withheld}" for one, beside in rows.items() if beside.withheld}
    after = next((one for one in rows if one not in tied), None) if not withheld else None
    busy = f" ({rows[after].busy})" * bool(rows[after].busy) if after else ""
    verdict = "withheld" if withheld else "a tie" if tied else "faster" if after else "the only one"
    margin = _oriented(rows[after].ratio, (after, first) in pairs) if after else None
    return BestChoice(asked, about, n, row, out | withheld, sides[first], verdict + busy, tied, after, margin)


def _against(side: Side, most: float) -> str:
    """The reason not to choose this one; empty for none."""
    record, error = side.record, side.record.rel_error
    if record.status is not Status.OK:
        return f"{record.status}: {record.reason}"
    if side.time is None:
        return "not timed beside the others"
    if error is None:
        exact = VARIANTS.get(record.variant).claims(parse_spec(record.label), causal=record.causal).exact
        return "" if exact else "its error is not known here"
    return "" if error <= most else f"its error is {format_number(error, 2)}, above {most:g}"


def _oriented(ratio: Ratio | None, straight: bool) -> Ratio | None:
    if straight or ratio is None:
        return ratio
    low, high = (end and 1 / end for end in (ratio.high, ratio.low))
    return replace(ratio, estimate=1 / ratio.estimate, low=low, high=high, joint=None)


@dataclass(frozen=True, slots=True)
class ReadyContests:
    """Contests that are ready to be measured, one a shape."""

    asked: Sequence[Workload]
    contests: Sequence[Contest]
    max_error: float

    @classmethod
    def of(cls, asked: Sequence[Workload], variants: Sequence[str], given: Mapping[str, Any]) -> ReadyContests:
        """Look up every name and check every value, with the options in ``given``; UsageError for a wrong one."""
        load_all(given["plugins"])
        forms = forms_of(variants, resolve_device(given["device"]))
        same = {name: value for name, value in given.items() if name not in ("shape", "variants", "max_error")}
        contests = []
        for one in asked:
            try:
                how = {**same, **one.values, "lengths": list(one.lengths)}
                contests.append(CompareQuestion.of(forms, how).prepare(alone=True))
            except UsageError as error:
                raise UsageError(f"{one.place}: {error}") from None
        return cls(asked, contests, given["max_error"])

    @property
    def count(self) -> int:
        """Number of shapes and lengths."""
        return sum(len(one.lengths) for one in self.contests)

    def answer(self, watching: Callable[[Workload, Contest], OnLength]) -> Best:
        """Measure until the end or Ctrl-C; ``watching`` is called before each shape and watches its lengths.

        Raises WorkerFailed and KeyboardInterrupt before a first length was finished.
        """
        best = Best(self.max_error, sum(one.ratios for one in self.contests))
        for place, (asked, contest) in enumerate(zip(self.asked, self.contests, strict=True)):
            contest = replace(contest, family=best.family, known=best.records)
            try:
                found = contest.answer(watching(asked, contest))
            except KeyboardInterrupt as pressed:
                best.stopped = pressed
                if isinstance(pressed, Stopped):
                    best.add(asked, contest.about, pressed.comparison)
                elif not best.choices:
                    raise
                return best
            except WorkerFailed as error:
                if not best.choices:
                    raise
                best.warnings.append(f"{error}; not measured: {', '.join(one.name for one in self.asked[place:])}")
                return best
            best.add(asked, contest.about, found)
        return best
