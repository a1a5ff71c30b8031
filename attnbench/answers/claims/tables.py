"""Published tables of numbers in one form, shipped or a user's, as claims.

A file is a mapping. ``rows`` have the fields of :class:`Number`, with a list of ``values``; a field beside ``rows`` is
that of all rows without it. ``at`` maps axes of suites, and ``shape``, to a value, or to one for each of the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from attnbench.answers.claims.claims import Claim, Crossover, Ratio, Strict, Value
from attnbench.contract.variant import VARIANTS
from attnbench.errors import UsageError
from attnbench.figures.published.points import csv_text
from attnbench.suite.axes import defaults
from attnbench.suite.cell import Level, Pass
from attnbench.suite.document import NotASuite, read_document
from attnbench.suite.expand import check_names
from attnbench.suite.messages import Origin, Place, explain, pick, shown
from attnbench.suite.named_shapes import spelled_out
from attnbench.suite.schema import Suite
from attnbench.units import format_number

Unit = Literal["s", "ms", "us", "steps/s", "TFLOP/s", "MB", "GB", "times faster", "times smaller"]
_SIZES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "MB": 1e6, "GB": 1e9}
BACKENDS = {
    "cudnn": "sdpa:backend=cudnn",
    "cudnn-oss": "",
    "fa-2": "sdpa:backend=flash",
    "fa-3": "peer.sdpa.flash3",
    "fa-4": "peer.sdpa.flash4",
}
"""Back end of exact attention, as tables name it -> the variant that calls it; empty for none."""
_PRODUCTS = {"forward": (1, 1), "backward": (3, 2), "training": (4, 3)}
"""Pass of exact attention -> its products of the width of keys, and of values."""
_LENGTHS = ("seq_len", "kv_len")


class Number(Strict):
    """One published number."""

    title: str = ""
    source: str
    place: str
    note: str = ""
    row: str
    """The name of its row in the table."""
    variant: str
    """A variant with options, or a name of :data:`BACKENDS`."""
    kernel: str = ""
    """The kernel of the variant that was measured, if the catalogue has another."""
    value: float = Field(gt=0)
    """As printed."""
    unit: Unit
    """``times faster`` and ``times smaller`` are held to the baseline."""
    device: str = Field(min_length=1)
    level: Level
    pass_: Pass = Field(default="forward", alias="pass")
    model: dict[str, int] | None = None
    """Sizes of the model, at level model."""
    at: dict[str, Value]
    """Axis -> value; an axis without one was not published."""
    shape: str = ""
    baseline: str = ""
    """The row that others are held against; of ratios, the variant."""
    within: float = Field(default=0.1, gt=0)
    """A larger difference contradicts it, as a share; and so does the other order."""
    line: int

    @property
    def label(self) -> str:
        """The variant that is measured here; empty if none that is loaded does."""
        label = "" if self.kernel else BACKENDS.get(self.variant, self.variant)
        return "" if label.startswith("peer.") and label not in VARIANTS else label

    @property
    def exact(self) -> bool:
        """True if it is a time of exact attention."""
        name = self.variant.partition(":")[0]
        known = name in BACKENDS or (not self.kernel and name in VARIANTS and VARIANTS.get(name).traits.exact)
        return known and self.of == "time_median_s"

    @property
    def of(self) -> str:
        """The column of results that has it."""
        return "peak_bytes" if self.unit in ("MB", "GB", "times smaller") else "time_median_s"

    @property
    def amount(self) -> float | None:
        """Seconds of a call, or bytes; None for a ratio."""
        flops, size = self.flops(self.pass_), _SIZES.get(self.unit)
        if self.unit == "TFLOP/s":
            return flops and flops / self.value / 1e12
        return size * self.value if size else 1 / self.value if self.unit == "steps/s" else None

    def flops(self, pass_: str) -> float | None:
        """FLOPs of exact attention at its sizes, half of them if causal; None if a mask, steps or sizes hide them."""
        at: dict[str, Any] = defaults() | self.at
        if at["mask"] != "none" or pass_ not in _PRODUCTS or not {"heads", "head_dim"} <= self.at.keys():
            return None
        of_keys, of_values = _PRODUCTS[pass_]
        width = of_keys * at["head_dim"] + of_values * (at["v_dim"] or at["head_dim"])
        pairs = at["batch"] * at["heads"] * at["seq_len"] * (at["kv_len"] or at["q_start"] + at["seq_len"])
        return float(2 * pairs * width / (2 if at["causal"] else 1))

    @property
    def where(self) -> dict[str, Value]:
        """Columns of results -> the values of rows that were measured at its place."""
        return {"level": self.level, "pass": self.pass_, **self.at, **(self.model or {})}

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for numbers of one place."""
        return tuple(sorted(map(str, self.where.items())))

    @property
    def n(self) -> int:
        """The length."""
        return int(str(self.at["seq_len"]))

    def against(self, numbers: Iterable[Number]) -> tuple[float, str] | None:
        """The baseline's time or memory over its own, as published, and the variant of the baseline."""
        if self.unit.startswith("times"):
            return self.value, self.baseline
        alike = (self.baseline, self.device, self.of, self.key)
        base = next((one for one in numbers if (one.row, one.device, one.of, one.key) == alike), self)
        return (base.amount / self.amount, base.label) if base is not self and base.amount and self.amount else None

    def over_best(self, exacts: Sequence[Number]) -> tuple[float, str] | None:
        """Time of the fastest exact kernel that was published for its device over its own, and that kernel.

        A kernel that was not timed at its place, but at up to twice or half its length, takes its FLOPs at that rate.
        Forward and backward together are a training step. None unless it is a time of an operator.
        """
        ways = [(self.pass_,), *([("forward", "backward")] if self.pass_ == "training" else [])]
        sums = []
        for way in ways:
            parts = [part for pass_ in way if (part := min(self._estimates(pass_, exacts), default=None))]
            if len(parts) == len(way):
                sums.append((sum(time for time, _ in parts), " + ".join(dict.fromkeys(name for _, name in parts))))
        time, name = min(sums, default=(0.0, ""))
        timed = self.amount and self.level == "operator" and self.of == "time_median_s"
        return (time / self.amount, name) if time and timed and self.amount else None

    def _estimates(self, pass_: str, exacts: Sequence[Number]) -> Iterator[tuple[float, str]]:
        axes = ("head_dim", "v_dim", "causal", "dtype")
        about = (self.device, self.level, pass_, *map(self.at.get, axes))
        alike = [one for one in exacts if (one.device, one.level, one.pass_, *map(one.at.get, axes)) == about]
        timed = {one.variant for one in alike if one.key == self.key}
        for one in alike:
            flops, there, same = self.flops(pass_), one.flops(pass_), one.key == self.key
            if flops and there and one.amount and 0.5 <= one.n / self.n <= 2 and (same or one.variant not in timed):
                yield flops * one.amount / there, one.row + f" at n={one.n}" * (one.n != self.n)


@dataclass(frozen=True, eq=False)
class Table:
    """The content of a file."""

    path: str
    """The file, or the name of a shipped table."""
    numbers: Sequence[Number]
    left_out: Sequence[str] = ()
    """Numbers that an importer left out, and why."""

    def claims(self, machines: Iterable[str], cannot: Mapping[tuple[str, ...], str]) -> Iterator[Claim]:
        """Each number as a claim, and each crossover.

        ``machines``: names of those whose rows are at hand. ``cannot``: key of a place -> why it was not measured.
        """
        exacts = [one for other in {*map(load, shipped()), self} for one in other.numbers if one.exact]
        here = [set(re.findall(r"\w+", name)) for name in machines]
        lines: dict[tuple[object, ...], list[Number]] = {}
        for one in self.numbers:
            against, best = one.against(self.numbers), one.over_best(exacts)
            place = " ".join(filter(None, [one.shape, f"n={one.n}", one.pass_, str(one.at.get("mask", ""))]))
            says = f"{place}: {one.row} {format_number(one.value)} {one.unit}"
            if against and not one.unit.startswith("times"):
                says += f", {one.baseline} over it {format_number(against[0])}"
            if best:
                lost = ", slower than exact attention" * (against is not None and best[0] < 1 < against[0])
                says += f", best exact kernel on {one.device} ({best[1]}) over it {format_number(best[0])}{lost}"
            about = {"id": f"line-{one.line}", "says": says, "source": f"{one.source}, {one.place}", "table": self.path}
            test = {"kind": "ratio", "of": one.of, "where": one.where, "within": one.within}
            if why := cannot.get(one.key, "") if one.label else f"nothing loaded has {one.kernel or one.variant}":
                yield Claim(**about, missing=why)
                continue
            if against and against[1]:
                yield Claim(**about, test=Ratio(**test, top=against[1], bottom=one.label, about=against[0]))
                rest = [part for part in one.where.items() if part[0] not in _LENGTHS]
                lines.setdefault((one.row, one.device, one.of, *rest), []).append(one)
            if one.amount and any(set(re.findall(r"\w+", one.device)) <= words for words in here):
                yield Claim(**about, test=Ratio(**test, top=one.label, about=one.amount))
            elif not against or not against[1]:
                yield Claim(**about, missing=f"it is judged on the published device alone: {one.device}")
        yield from self._crossovers(lines.values())

    def _crossovers(self, lines: Iterable[Sequence[Number]]) -> Iterator[Claim]:
        for line in lines:
            ratios = {one.n: one.against(self.numbers) or (0.0, "") for one in line}
            lost = max((n for n, (ratio, _) in ratios.items() if ratio <= 1), default=0)
            won = min((n for n in ratios if n > lost), default=0)
            if lost and won:
                one = line[0]
                about = {"id": f"line-{one.line}", "source": f"{one.source}, {one.place}", "table": self.path}
                where = {axis: value for axis, value in one.where.items() if axis not in _LENGTHS}
                test = {"of": one.of, "top": one.label, "bottom": ratios[one.n][1], "where": where}
                crossover = Crossover(kind="crossover", lowest=lost, highest=won, **test)
                yield Claim(
                    says=f"{one.row} overtakes {one.baseline} between n={lost} and {won}.", test=crossover, **about
                )

    def suite(self, numbers: Iterable[Number], beside: Sequence[str]) -> Suite:
        """A suite with a sweep for each place of these numbers, and the variants ``beside`` them.

        Raises SuiteError, with the line, for an axis, a value or a variant that does not exist.
        """
        sweeps, lines = dict[tuple[str, ...], dict[str, Any]](), dict[Place, int]()
        for one in numbers:
            about: dict[str, Any] = {"level": one.level, "pass": one.pass_} | (
                {"model": one.model} if one.model else {}
            )
            about |= {"name": f"place-{len(sweeps)}", "matrix": {"variant": [], **one.at}}
            sweep = sweeps.setdefault(one.key, about)
            lines.setdefault(("sweeps", place := int(sweep["name"][6:])), one.line)
            variants = sweep["matrix"]["variant"]
            for label in (one.label, one.baseline if one.unit.startswith("times") else "", *beside):
                if label and label not in variants:
                    lines["sweeps", place, "matrix", "variant", len(variants)] = one.line
                    variants.append(label)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", f"claims-{Path(self.path).stem}")[:60].rstrip(".")
        data = {"name": name, "min_time": 0.2, "rounds": 2, "sweeps": list(sweeps.values())}
        suite = Suite.of(data, Origin(self.path, lines))
        check_names(suite)
        return suite


_TABLES = files("attnbench.answers.claims").joinpath("tables")


@cache
def shipped() -> tuple[str, ...]:
    """The names of the shipped tables."""
    return tuple(sorted(one.name.removesuffix(".yaml") for one in _TABLES.iterdir()))


def is_table(text: str) -> bool:
    """True if an argument names a table, shipped or a file, and no results."""
    own = text.endswith(".csv") and Path(text).is_file() and "cell_id" in csv_text(Path(text), "numbers")
    return not own and (text in shipped() or text.endswith((".yaml", ".yml", ".csv", ".json", ".jsonl")))


@cache
def load(name: str) -> Table:
    """Read a shipped table by its name, or a file.

    Raises:
        UsageError: there is none, or it cannot be read.
        SuiteError: a line of it is wrong.
    """
    here = name in shipped()
    text = (_TABLES / f"{name}.yaml").read_text("utf-8") if here else csv_text(Path(name), "numbers", others=shipped())
    if not here and not name.endswith((".yaml", ".yml")):
        from attnbench.answers.claims.imported import imported

        return _table(name, *imported(name, text))
    try:
        return _table(name, *read_document(text))
    except NotASuite as error:
        said = str(error).replace("a suite", "a table").replace("name: and sweeps:", "source: and rows:")
        raise Origin(name).error_on(error.line, said) from None


def _table(name: str, data: Mapping[str, Any], lines: Mapping[Place, int], left_out: Sequence[str] = ()) -> Table:
    origin, rows = Origin(name, lines), data.get("rows")
    if not isinstance(rows, list) or not rows:
        raise origin.error(("rows",), "no numbers; write rows: with row, variant and values for each row of the table")
    shared = {key: one for key, one in data.items() if key != "rows"}
    numbers = [one for place, row in enumerate(rows) for one in _numbers(row, shared, origin, place)]
    names = list(dict.fromkeys(one.row for one in numbers))
    for one in numbers:
        if one.unit.startswith("times") and not one.baseline:
            raise origin.error_on(one.line, f"{one.unit} than which variant? Name it in a key baseline")
        if one.baseline not in ("", *names) and not one.unit.startswith("times"):
            raise origin.error_on(one.line, f"no row is called {shown(one.baseline)}{pick(one.baseline, names)}")
    table = Table(name, numbers, left_out)
    table.suite(numbers, ["sdpa"])  # which looks up every name
    return table


def _numbers(row: object, shared: Mapping[str, Any], origin: Origin, place: int) -> Iterator[Number]:
    here = ("rows", place)
    if not isinstance(row, dict) or not isinstance(values := row.get("values"), list):
        raise origin.error(here, "write a row as {row: NAME, variant: NAME, values: [..]}")
    at = {**(shared.get("at") or {}), **(row.get("at") or {})}
    about = {**shared, **{key: one for key, one in row.items() if key != "values"}, "line": origin.line(here)}
    for index, value in enumerate(values):
        try:
            own = {axis: one[index] if isinstance(one, list) else one for axis, one in at.items()}
            own = {axis: one for axis, one in own.items() if one is not None}
            about |= {"at": spelled_out(own), "shape": str(own.get("shape", "")), "value": value}
            if value is not None:
                yield Number.model_validate(about)
        except IndexError:
            raise origin.error(here, f"an axis of 'at' has fewer than {len(values)} values; write one each") from None
        except UsageError as error:
            raise origin.error((*here, "at", "shape"), str(error)) from None
        except ValidationError as error:
            details = error.errors(include_url=False)[0]
            inside: Place = details["loc"]
            known = [info.alias or name for name, info in Number.model_fields.items() if name not in ("line", "value")]
            unknown = f"unknown key {shown(inside[-1])}{pick(inside[-1], [*known, 'values'])}"
            said = unknown if details["type"] == "extra_forbidden" else explain(dict(details))
            raise origin.error(inside if inside[0] in shared.keys() - row.keys() else (*here, *inside), said) from None
