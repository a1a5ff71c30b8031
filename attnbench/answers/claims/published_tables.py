"""Published tables of numbers in one form, shipped or a user's, as claims.

A file is a mapping. ``rows`` have the fields of :class:`Number`, with a list of ``values``; a field beside ``rows`` is
that of all rows without it. ``at`` maps axes of suites, and ``shape``, to a value, or to one for each of the values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from attnbench.answers.claims.claims import Claim, CrossoverTest, RatioTest, Value
from attnbench.answers.claims.evidence import MACHINE
from attnbench.answers.claims.imported import imported
from attnbench.contract.variant import OWN, VARIANTS
from attnbench.errors import SuiteError, UsageError
from attnbench.figures.published.point_file import csv_text
from attnbench.suite.axes import AXES, Whole, defaults
from attnbench.suite.cell import Level, Pass
from attnbench.suite.document import NotASuite, read_document
from attnbench.suite.expand import check_names
from attnbench.suite.messages import Origin, Place, explain, pick, shown, wrong
from attnbench.suite.named_shapes import spelled_out
from attnbench.suite.ranges import is_number, parse_range
from attnbench.suite.schema import Suite
from attnbench.units import format_number

_SIZES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "MB": 1e6, "GB": 1e9}
_PEERS = {"cudnn-oss": "", "fa-3": "peer.sdpa.flash3", "fa-4": "peer.sdpa.flash4"}
BACKENDS = {"cudnn": "sdpa:backend=cudnn", "fa-2": "sdpa:backend=flash", **_PEERS}
"""Back end of exact attention, as tables name it -> the variant that calls it; empty for none."""
_PRODUCTS = {"forward": (1, 1), "backward": (3, 2), "training": (4, 3)}
"""Pass of exact attention -> its products of the width of keys, and of values."""
_LENGTHS = ("seq_len", "kv_len")
SHIPPED = {one.stem: one for one in sorted(Path(__file__).with_name("tables").glob("*.yaml"))}
"""Name of each shipped table -> its file."""

_WORDS = re.compile(r"\d+-Core|CPU @.*|[^\W_]+")
_BESIDE = re.compile(r"\d+GB|HBM\w+|SXM\d|\d+-Core|Processor|CPU @.*")
"""Words after the model in the name of a device that tell no other model, as ``PCIe`` and ``Ti`` do."""


def _named(device: str) -> str:
    return device if _WORDS.search(device) else wrong(f"'device' {shown(device)} is no name; write one such as H200")


class Number(BaseModel):
    """One published number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    table: str
    line: int
    note: str = ""
    source: str
    place: str
    row: str
    variant: str
    """With options, or a name of :data:`BACKENDS`."""
    kernel: str = ""
    """The kernel of the variant that was measured, if the catalogue has another."""
    value: float = Field(ge=1e-30, le=1e30, allow_inf_nan=False)
    """Within bounds, so that no ratio of two is zero or infinite."""
    unit: Literal["s", "ms", "us", "steps/s", "TFLOP/s", "MB", "GB", "times faster", "times smaller"]
    """``times faster`` and ``times smaller`` are held to the baseline."""
    device: Annotated[str, AfterValidator(_named)]
    level: Level
    pass_: Pass = Field(default="forward", alias="pass")
    model: dict[str, int] | None = None
    at: dict[str, Value]
    """Axis -> value; an axis without one was not published."""
    shape: str = ""
    baseline: str = ""
    """The row that others are held against; of ratios, the variant."""
    within: float = Field(default=0.1, gt=0)
    """A larger difference contradicts it, as a share; and so does the other order."""

    def __str__(self) -> str:
        mask = str(self.at.get("mask", "none")).replace("none", "")
        place = " ".join(filter(None, [self.shape, f"n={self.n}", self.pass_, mask]))
        return f"{place}: {self.row} {self.value:g} {self.unit}"

    @property
    def label(self) -> str:
        """The variant that is measured here; empty if none that is loaded does."""
        label = "" if self.kernel else BACKENDS.get(self.variant, self.variant)
        return "" if label.startswith("peer.") and label not in VARIANTS else label

    @property
    def exact(self) -> bool:
        """True if it is one of exact attention."""
        name = self.variant.partition(":")[0]
        return name in BACKENDS or (not self.kernel and name in VARIANTS and VARIANTS.get(name).traits.exact)

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
        return {"level": self.level, "pass": self.pass_, **self.at}

    @property
    def n(self) -> int:
        """The length."""
        return int(str(self.at["seq_len"]))

    def against(self, numbers: Iterable[Number]) -> tuple[float, str] | None:
        """The baseline's time or memory over its own, as published, and the variant of the baseline."""
        if self.unit.startswith("times"):
            return self.value, self.baseline
        alike = (self.baseline, self.device, self.of, self.where)
        base = next((one for one in numbers if (one.row, one.device, one.of, one.where) == alike), self)
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
        # Of each kernel the time at this place, else that at the nearest length.
        alike.sort(key=lambda one: (one.where != self.where, abs(math.log(one.n / self.n))), reverse=True)
        for one in {one.variant: one for one in alike}.values():
            flops, there = self.flops(pass_), one.flops(pass_)
            if flops and there and one.amount and 0.5 <= one.n / self.n <= 2:
                yield flops * one.amount / there, one.row + f" (n={one.n})" * (one.n != self.n)


def is_model(device: str, machine: str) -> bool:
    """True if the name ``device`` has a model, a word with a digit, and ``machine`` is that model and no kind of it."""
    words, there = _WORDS.findall(device), _WORDS.findall(machine)
    models = [word for word in words if re.search(r"\d", word) and not _BESIDE.fullmatch(word)]
    if not models or not {*words} <= {*there}:
        return False
    after = there[min(map(there.index, models)) :]
    return all(word in words or _BESIDE.fullmatch(word) for word in after)


def claims_of(numbers: Sequence[Number], machines: Sequence[str]) -> Iterator[Claim]:
    """Each number of a table as a claim, place by place, and each crossover. ``machines`` have rows at hand."""
    tables = {name: load(name) for name in (*SHIPPED, numbers[0].table)}
    exacts = [one for table in tables.values() for one in table if one.exact and one.of == "time_median_s"]
    lines = dict[tuple[object, ...], list[Number]]()
    places = [one.where for one in numbers]
    for one in sorted(numbers, key=lambda one: places.index(one.where)):
        against, best = one.against(numbers), one.over_best(exacts)
        says = f"{one}, {format_number(against[0])} × {one.baseline}" if against and one.amount else str(one)
        if best and not best[1].startswith((one.baseline or one.row, one.row)):
            says += f", {format_number(best[0])} × {best[1]}"
            says += ", slower than exact attention" * (against is not None and best[0] < 1 < against[0])
        source = f"{one.source}, {one.place}"
        about: dict[str, Any] = {"id": f"line-{one.line}", "says": says, "source": source, "table": one.table}
        test: dict[str, Any] = {"kind": "ratio", "of": one.of, "where": one.where, "within": one.within}
        if not one.label:
            yield Claim(**about, missing=f"nothing loaded has {one.kernel or one.variant}")
            continue
        if against and against[1]:
            yield Claim(**about, test=RatioTest(**test, top=against[1], bottom=one.label, about=against[0]))
            rest = [part for part in one.where.items() if part[0] not in _LENGTHS]
            lines.setdefault((one.row, one.device, one.of, *rest), []).append(one)
        own = [name for name in machines if one.amount and is_model(one.device, name)]
        for name in own:
            test["where"] = {**one.where, MACHINE: name}
            yield Claim(**about, test=RatioTest(**test, top=one.label, about=one.amount))
        if not own and (not against or not against[1]):
            no_model = ", which names no model" * (not is_model(one.device, one.device))
            yield Claim(**about, missing=f"times and memory are judged on {one.device} alone" + no_model)
    for line in lines.values():
        ratios = {one.n: found for one in line if (found := one.against(numbers))}
        lost = max((n for n, (ratio, _) in ratios.items() if ratio <= 1), default=0)
        won = min((n for n in ratios if n > lost), default=0)
        if lost and won:
            one, ends = line[0], {"lowest": lost, "highest": won}
            says = f"{one.row} overtakes {one.baseline} between n={lost} and {won}"
            about = {"id": f"line-{one.line}", "says": says, "source": f"{one.source}, {one.place}", "table": one.table}
            where = {axis: value for axis, value in one.where.items() if axis not in _LENGTHS}
            crossing = CrossoverTest(
                kind="crossover", of=one.of, where=where, top=one.label, bottom=ratios[won][1], **ends
            )
            yield Claim(**about, test=crossing)


def suite_of(numbers: Sequence[Number], beside: Sequence[str]) -> Suite:
    """A suite with a sweep for each place of these numbers, and the variants ``beside`` them.

    Raises SuiteError, with the line, for an axis, a value or a variant that does not exist.
    """
    sweeps, lines = list[dict[str, Any]](), dict[Place, int]()
    places = [one.where for one in numbers]
    for place, first in enumerate(sorted({places.index(where) for where in places})):
        variants: dict[str, int] = {}
        for one in [one for one in numbers if one.where == places[first]]:
            labels = (one.label, one.baseline if one.unit.startswith("times") else "", *beside)
            variants |= {label: one.line for label in labels if label and label not in variants}
        lines |= {("sweeps", place, "matrix", "variant", i): line for i, line in enumerate(variants.values())}
        lines["sweeps", place] = min(variants.values())
        about = {"name": f"place-{place}", "level": one.level, "pass": one.pass_, "model": one.model}
        sweeps.append({**about, "matrix": {"variant": list(variants), **one.at}})
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"claims-{Path(numbers[0].table).stem}")[:60].rstrip(".")
    data = {"name": name, "min_time": 0.2, "rounds": 2, "sweeps": sweeps}
    suite = Suite.of(data, Origin(numbers[0].table, lines))
    check_names(suite)
    return suite


def is_table(text: str) -> bool:
    """True if an argument names a table, shipped or a file, and no results."""
    own = text.endswith(".csv") and Path(text).is_file() and "cell_id" in _text_of(text)
    return not own and (text in SHIPPED or text.endswith((".yaml", ".yml", ".csv", ".json", ".jsonl")))


@cache
def load(name: str) -> Sequence[Number]:
    """Read a shipped table by its name, or a file.

    Raises UsageError if there is none or it cannot be read, and SuiteError if a line of it is wrong.
    """
    text = _text_of(name)
    if name.endswith((".csv", ".json", ".jsonl")):  # which may have a measurement twice
        return _read(name, *imported(name, text))
    try:
        numbers, known = _read(name, *read_document(text)), dict[tuple[object, ...], float]()
    except NotASuite as error:
        said = str(error).replace("a suite", "a table").replace("name: and sweeps:", "source: and rows:")
        raise Origin(name).error_on(error.line, said) from None
    for one in numbers:
        place = (one.row, one.device, one.unit, frozenset(one.where.items()), str(one.model))
        if place in known:
            said = f"{one}, and {known[place]:g} at the same place; remove one, or write [..] in 'at'"
            raise Origin(name).error_on(one.line, said)
        known[place] = one.value
    return numbers


def _text_of(name: str) -> str:
    return csv_text(SHIPPED.get(name, Path(name)), "file of numbers", others=list(SHIPPED), megabytes=100)


def _read(name: str, data: Mapping[str, Any], lines: Mapping[Place, int]) -> Sequence[Number]:
    origin, rows = Origin(name, lines), data.get("rows")
    shared = {**{key: one for key, one in data.items() if key != "rows"}, "table": name}
    listed = enumerate(rows if isinstance(rows, list) else ())
    numbers = [one for place, row in listed for one in _numbers(row, shared, origin, place)]
    if not numbers:
        raise origin.error(("rows",), "no numbers; write rows: with row, variant and values for each row of the table")
    names: dict[str, str] = {}
    for one in numbers:
        if names.setdefault(one.row, one.variant) != one.variant and one.row == one.baseline:
            raise origin.error_on(one.line, f"another variant is called {shown(one.row)} too, the baseline; rename one")
    for one in numbers:
        if one.unit.startswith("times") and not one.baseline:
            raise origin.error_on(one.line, f"'{one.unit}' than what? add baseline: with a variant")
        if one.baseline not in ("", *names) and not one.unit.startswith("times"):
            raise origin.error_on(one.line, f"no row is called {shown(one.baseline)}{pick(one.baseline, names)}")
    if name not in SHIPPED:
        try:
            suite_of(numbers, ["sdpa"])  # which looks up every name
        except SuiteError as error:  # the command has no --plugin
            raise SuiteError(str(error).replace(OWN, "'attnbench list variants' shows the names")) from None
    return numbers


def _numbers(row: object, shared: Mapping[str, Any], origin: Origin, place: int) -> Iterator[Number]:
    here = ("rows", place)
    if not isinstance(row, dict) or not isinstance(values := row.get("values"), list):
        raise origin.error(here, "write a row as {row: NAME, variant: NAME, values: [..]}")
    about = {**shared, **{key: one for key, one in row.items() if key != "values"}, "line": origin.line(here)}
    for index, value in enumerate(values):
        try:
            at = {**(shared.get("at") or {}), **(row.get("at") or {})}
            if any(isinstance(one, list) and len(one) != len(values) for one in at.values()):
                raise origin.error(here, f"a list in 'at' is of another length; write {len(values)} values, or one")
            own = {axis: _single(axis, one[index] if isinstance(one, list) else one) for axis, one in at.items()}
            own = {axis: one for axis, one in own.items() if one is not None}
            about |= {"at": spelled_out(own), "shape": str(own.get("shape", "")), "value": value}
            if value is not None:
                yield Number.model_validate(about)
        except TypeError:
            raise origin.error(here, "'at' is no mapping; write {seq_len: 1024, heads: 8}, say") from None
        except UsageError as error:
            raise origin.error((*here, "at", "shape"), str(error)) from None
        except ValidationError as error:
            details = error.errors(include_url=False)[0]
            inside: Place = details["loc"]
            known = ["values", *(info.alias or name for name, info in Number.model_fields.items())]
            unknown = f"unknown key {shown(inside[-1])}{pick(inside[-1], known)}"
            said = unknown if details["type"] == "extra_forbidden" else explain(dict(details))
            raise origin.error(inside if inside[0] in shared.keys() - row.keys() else (*here, *inside), said) from None


def _single(axis: str, value: Value) -> Value:
    """A value of an axis, a whole number also as a suite may have it: ``16k``. Raises UsageError for several, and for
    the variant, which a row has."""
    if axis == "variant":
        raise UsageError("'variant' is no axis of 'at'; write it beside 'at'")
    if isinstance(value, str) and axis in AXES and isinstance(AXES[axis].values, Whole):
        if is_number(value) and not value.isdecimal():
            return parse_range(value)[0]
        if ".." in value or "," in value:
            raise UsageError(f"{axis!r} is {shown(value)}; write a list with one number for each of the values")
    return value  # the suite refuses all other values
