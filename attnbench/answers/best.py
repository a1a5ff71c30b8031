"""The fastest form at each of many shapes that keeps an error: ``attnbench best``.

At each shape all forms take turns, as in ``attnbench compare``. The verdicts of the whole table hold together.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from attnbench.contract.spec import parse_spec, parse_specs
from attnbench.contract.variant import VARIANTS
from attnbench.errors import UsageError, any_of, did_you_mean
from attnbench.figures.published.points import csv_text
from attnbench.harness.compare.compare import Comparison, Contest, OnLength, Row, Side, Stopped
from attnbench.harness.compare.question import Question
from attnbench.harness.trial import load_all
from attnbench.measure.machine import resolve_device
from attnbench.measure.statistics import Ratio
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.axes import IN_ROWS, exists
from attnbench.suite.cell import Pass
from attnbench.suite.expand import read_axis
from attnbench.suite.named_shapes import known
from attnbench.units import format_number

EXACT = "exact"
"""A word for all exact forms of this machine, in place of a variant."""
_AXES = {"n": "seq_len", **{axis: axis for axis in IN_ROWS if exists(axis, "operator")}}
COLUMNS = ("name", "shape", "pass", *_AXES)
"""The columns that a file of shapes may have."""
_BACKENDS = {"cpu": ("math", "flash")}
_ON_GPU = ("math", "flash", "efficient", "cudnn")


@dataclass(frozen=True, slots=True)
class Asked:
    """One shape of the question, at one length or several."""

    name: str
    place: str
    """The file and line or the option that names it."""
    values: Mapping[str, Any]
    """Axis, or ``shape`` or ``pass_`` -> value; others have their defaults."""
    lengths: Sequence[int]


def shapes_of(file: Path | None, names: str | None, lengths: Sequence[int]) -> list[Asked]:
    """The shapes of a CSV file and those named with commas between them; ``lengths`` are those of shapes without one.

    Raises:
        UsageError: there is none; or a name, a column or a value is wrong, with the file and the line.
    """
    named = [one.strip() for one in names.split(",")] if names is not None else []
    try:
        asked = [Asked(known(one), f"--shape {one}", {"shape": one}, lengths) for one in named]
    except UsageError as error:
        raise UsageError(f"--shape: {error}") from None
    asked += [] if file is None else _in_file(file, lengths)
    if not asked:
        raise UsageError("best needs shapes; for example: attnbench best --shape llama3-8b --n 1024, or a CSV file")
    return asked


def _in_file(file: Path, lengths: Sequence[int]) -> list[Asked]:
    reader = csv.reader(io.StringIO(csv_text(file, "shapes")), strict=True)
    columns, asked = list[str](), list[Asked]()
    try:
        for cells in reader:
            at, texts = f"{file}:{reader.line_num}", [cell.strip() for cell in cells]
            if not any(texts):
                continue
            if not columns:
                columns = _columns(at, texts)
            elif len(texts) != len(columns):
                raise UsageError(f"{at}: {len(texts)} cells, but {len(columns)} columns; write a value or nothing")
            else:
                asked.append(_asked(file, at, dict(zip(columns, texts, strict=True)), lengths))
    except csv.Error as error:
        raise UsageError(f"{file}:{reader.line_num}: not CSV ({error}); check the quotes") from None
    if not asked:
        raise UsageError(f"{file}:1: no shapes; write columns such as n,heads,head_dim and a row for each shape")
    return asked


def _columns(at: str, names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in COLUMNS:
            hint = did_you_mean(name, COLUMNS) or f"; there are {', '.join(COLUMNS)}"
            raise UsageError(f"{at}: unknown column {name[:60]!r}{hint}")
        if names.count(name) > 1:
            raise UsageError(f"{at}: column {name!r} is there twice; remove one")
    return list(names)


def _asked(file: Path, at: str, texts: Mapping[str, str], lengths: Sequence[int]) -> Asked:
    given = {name: text for name, text in texts.items() if text}
    name, shape, pass_ = (given.pop(one, "") for one in ("name", "shape", "pass"))
    values: dict[str, Any] = {"shape": shape} if shape else {}
    try:
        if shape:
            known(shape)
        if pass_ and pass_ not in get_args(Pass):
            raise UsageError(
                f"unknown pass {pass_[:60]!r}{did_you_mean(pass_, get_args(Pass))}; write {any_of(get_args(Pass))}"
            )
        read = {column: read_axis(_AXES[column], text, column) for column, text in given.items()}
        for column, found in read.items():
            if column != "n" and len(found) > 1:
                raise UsageError(f"{column!r} has {len(found)} values; write one, and a row for each of the others")
    except UsageError as error:
        raise UsageError(f"{at}: {error}") from None
    own = read.pop("n", lengths)
    values |= {_AXES[column]: found[0] for column, found in read.items()}
    values |= {"pass_": pass_} if pass_ else {}
    return Asked(name or shape or f"{file.name}:{at.rpartition(':')[2]}", at, values, own)


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


Word = Literal["fastest", "a tie", "slower", "faster", "withheld", ""]


@dataclass(frozen=True, slots=True)
class Form:
    """One form at one shape and length."""

    label: str
    side: Side
    out: str = ""
    """The reason why it is not chosen from; empty if it is."""
    word: Word = ""
    """The verdict on its time beside the fastest one's; empty if it was not held against it."""
    why: str = ""
    """The reason to withhold that, or the mark of a busy machine."""
    ratio: Ratio | None = None
    """Its time over that of the fastest one; None if it was not held against it, or that is withheld."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds, None if not measured."""
        record, ratio = self.side.record, self.ratio
        low, high = self.side.interval or (None, None)
        joint_low, joint_high = (ratio.joint if ratio else None) or (None, None)
        return {
            "label": self.label,
            "variant": record.variant,
            "options": record.options,
            "status": str(record.status),
            "left_out": self.out,
            "it_is": self.word,
            "why": self.why,
            "time_median_s": self.side.time,
            "time_ci_low_s": low,
            "time_ci_high_s": high,
            "ratio": ratio.estimate if ratio else None,
            "ratio_ci_low": ratio.low if ratio else None,
            "ratio_ci_high": ratio.high if ratio else None,
            "joint_ci_low": joint_low,
            "joint_ci_high": joint_high,
            "peak_bytes": record.peak_bytes,
            "error_kind": record.error_kind,
            "rel_error": record.rel_error,
            "kernel": record.kernel,
            "launched": record.launched,
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """The answer at one shape and length."""

    asked: Asked
    about: str
    """Pass, masks, sizes and data type, in words."""
    n: int
    forms: Sequence[Form]
    """The fastest first, then the others by time, and last those that are not chosen from."""

    @property
    def fastest(self) -> Form | None:
        return self.forms[0] if self.forms and not self.forms[0].out else None

    @property
    def tied(self) -> list[Form]:
        return [one for one in self.forms if one.word == "a tie"]

    @property
    def next(self) -> Form | None:
        """The fastest of those that are slower beyond doubt."""
        return next((one for one in self.forms if one.word == "slower"), None)

    @property
    def verdict(self) -> str:
        """``faster``, ``a tie``, ``withheld``, ``the only one``, or ``none`` if nothing keeps the error."""
        if self.fastest is None:
            return "none"
        words = [one.word for one in self.forms[1:] if not one.out]
        for word in ("withheld", "faster", "a tie"):
            if word in words:
                return "a tie" if word == "a tie" else "withheld"
        return "faster" if words else "the only one"

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``fastest`` is None if nothing keeps the error."""
        first, after = self.fastest, self.next
        columns = self.forms[0].side.record.to_json()
        return {
            "shape": self.asked.name,
            "about": self.about,
            "pass": columns["pass"],
            **{axis: columns[axis] for axis in _AXES.values()},
            "fastest": first and first.label,
            "verdict": self.verdict,
            "tied": [one.label for one in self.tied],
            "next": after and after.label,
            "margin": after.ratio.estimate if after and after.ratio else None,
            "margin_ci_low": after.ratio.low if after and after.ratio else None,
            "margin_ci_high": after.ratio.high if after and after.ratio else None,
            **{name: first and getattr(first.side.record, name) for name in ("peak_bytes", "rel_error", "kernel")},
            "time_median_s": first and first.side.time,
            "forms": [one.to_json() for one in self.forms],
        }


@dataclass(slots=True)
class Best:
    """The answers at all shapes that were measured."""

    max_error: float
    choices: list[Choice] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    family: int = 0
    """Number of ratios whose verdicts hold together."""
    processes: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if anything could be measured."""
        return any(form.side.time is not None for one in self.choices for form in one.forms)

    def add(self, asked: Asked, about: str, found: Comparison) -> None:
        """Take the comparison at one shape, finished or not."""
        self.environment = found.environment
        self.processes = sorted({*self.processes, *found.processes})
        self.warnings += [f"{asked.name}: {one}" for one in found.warnings]
        at: dict[int, dict[tuple[str, str], Row]] = {}
        for pair, rows in found.rows.items():
            for row in rows:
                at.setdefault(row.n, {})[pair] = row
        self.choices += [Choice(asked, about, n, choose(pairs, self.max_error)) for n, pairs in at.items()]

    def to_json(self) -> dict[str, Any]:
        """Answers, warnings and the machine, for a program."""
        shapes = [one.to_json() for one in self.choices]
        return {
            "environment": {"machine" if name == "environment" else name: v for name, v in self.environment.items()},
            "warnings": self.warnings,
            "max_error": self.max_error,
            "shapes": shapes,
        }


def choose(pairs: Mapping[tuple[str, str], Row], most: float) -> list[Form]:
    """The forms at one length, from the rows of each pair of them, or of one with itself: the fastest first.

    The fastest is the one of least mean ratio to all others that keep the error ``most``.
    """
    sides = {label: side for (a, b), row in pairs.items() for label, side in ((b, row.b), (a, row.a))}
    out = {label: _against(side.record, side.time, most) for label, side in sides.items()}
    ratios = {pair: row.ratio for pair, row in pairs.items() if row.ratio}
    ratios |= {(b, a): turned(ratio) for (a, b), ratio in ratios.items()}
    kept = [label for label, why in out.items() if not why]

    def slowness(label: str) -> float:
        logs = [math.log(ratios[label, other].estimate) for other in kept if (label, other) in ratios]
        return fmean(logs) if logs else math.inf

    ordered = sorted(kept, key=slowness)
    if not ordered:
        return [Form(label, sides[label], why) for label, why in out.items()]
    first, *others = ordered
    forms = [Form(first, sides[first], word="fastest")]
    forms += [_beside(first, one, sides[one], pairs, ratios.get((one, first))) for one in others]
    return [*forms, *(Form(label, sides[label], why) for label, why in out.items() if why)]


def _against(record: Record, time: float | None, most: float) -> str:
    """The reason not to choose this one; empty for none."""
    if record.status is not Status.OK:
        return f"{record.status}: {record.reason}"
    if time is None:
        return "not timed beside the others"
    if record.rel_error is None:
        exact = VARIANTS.get(record.variant).claims(parse_spec(record.label), causal=record.causal).exact
        return "" if exact else "its error is not known here"
    return "" if record.rel_error <= most else f"its error is {format_number(record.rel_error, 2)}, above {most:g}"


def _beside(first: str, label: str, side: Side, pairs: Mapping[tuple[str, str], Row], ratio: Ratio | None) -> Form:
    row = pairs.get((first, label)) or pairs[label, first]
    if ratio is None:
        return Form(label, side, word="withheld", why="they never took turns")
    if row.verdict in ("same", "inconclusive"):
        return Form(label, side, "", "a tie", row.busy, ratio)
    if row.verdict == "withheld":
        return Form(label, side, "", "withheld", row.withheld)
    slower = (row.verdict == "faster") == ((first, label) in pairs)
    return Form(label, side, "", "slower" if slower else "faster", row.busy, ratio)


def turned(ratio: Ratio) -> Ratio:
    """The ratio of B to A."""
    low, high = _inverse((ratio.low, ratio.high)) if ratio.low and ratio.high else (None, None)
    return replace(ratio, estimate=1 / ratio.estimate, low=low, high=high, joint=ratio.joint and _inverse(ratio.joint))


def _inverse(ends: tuple[float, float]) -> tuple[float, float]:
    return 1 / ends[1], 1 / ends[0]


class StoppedBest(KeyboardInterrupt):
    """Ctrl-C, with the shapes so far."""

    def __init__(self, best: Best) -> None:
        super().__init__()
        self.best = best


@dataclass(frozen=True, slots=True)
class Prepared:
    """Contests that are ready to be measured, one a shape."""

    asked: Sequence[Asked]
    contests: Sequence[Contest]
    max_error: float

    @classmethod
    def of(cls, asked: Sequence[Asked], variants: Sequence[str], given: Mapping[str, Any]) -> Prepared:
        """Look up every name and check every value, with the options in ``given``.

        Raises:
            UsageError: a variant, a shape or an option is wrong.
        """
        load_all(given["plugins"])
        forms = forms_of(variants, resolve_device(given["device"]))
        same = {name: value for name, value in given.items() if name not in ("shape", "variants", "max_error")}
        contests = []
        for one in asked:
            try:
                how = {**same, **one.values, "lengths": list(one.lengths)}
                contests.append(Question.of(forms, how).prepare(alone=True))
            except UsageError as error:
                raise UsageError(f"{one.place}: {error}") from None
        return cls(asked, contests, given["max_error"])

    @property
    def family(self) -> int:
        """Number of ratios in the whole table."""
        return sum(one.ratios for one in self.contests)

    @property
    def count(self) -> int:
        """Number of shapes and lengths."""
        return sum(len(one.lengths) for one in self.contests)

    def answer(self, watching: Callable[[Asked, Contest], OnLength]) -> Best:
        """Measure; ``watching`` is called before each shape and watches its lengths.

        Raises:
            WorkerFailed: the worker could not be started.
            StoppedBest: Ctrl-C, with what was measured.
        """
        best, laws = Best(self.max_error, family=self.family), list[Record]()
        for asked, contest in zip(self.asked, self.contests, strict=True):
            contest = replace(contest, family=self.family, known=tuple(laws))
            try:
                found = contest.answer(watching(asked, contest))
            except Stopped as pressed:
                best.add(asked, contest.about, pressed.comparison)
                raise StoppedBest(best) from pressed
            except KeyboardInterrupt as pressed:
                raise StoppedBest(best) from pressed
            best.add(asked, contest.about, found)
            laws += [form.side.record for one in best.choices[-len(contest.lengths) :] for form in one.forms]
        return best
