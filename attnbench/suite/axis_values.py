"""Read the values of an axis of a matrix or of ``exclude`` from YAML data; mistakes have a place, for pydantic."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal, get_args

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from attnbench.contract.inputs import INPUTS
from attnbench.contract.problem.mask import FORMS as MASK_FORMS
from attnbench.contract.problem.mask import masks_of
from attnbench.contract.registry import Entry, Registry
from attnbench.contract.spec import Spec, parse_scalar, parse_specs
from attnbench.contract.task import TASKS
from attnbench.contract.variant import VARIANTS
from attnbench.errors import UsageError
from attnbench.suite.axes import Axis, Flag, Layers, Masks, Rate, Share, Specs, Whole, Words
from attnbench.suite.cell import UNTOUCHED
from attnbench.suite.messages import pick, shown, wrong
from attnbench.suite.ranges import FORMS, MAX_VALUES, is_number, parse_range

Device = Literal["cpu", "cuda", "mps"]
DEVICES: tuple[str, ...] = get_args(Device)

Test = Callable[[Any], bool]
Check = Callable[[object, ValidationInfo], list[Any]]
"""From plain data to checked values, or to conditions."""

MAX_IN_ALL = 100_000
_UNTOUCHED = Spec(UNTOUCHED)
"""Stands for no variant; :mod:`attnbench.suite.expand` refuses it unless the model is trained already."""
_COMPARISON = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*([0-9]{1,18}k?)\s*")
_OPERATORS: dict[str, Callable[[int, int], bool]] = {
    ">=": operator.le,
    "<=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.lt,
    "<": operator.gt,
}
"""Comparison -> the function of the number that was written and then the value."""


@dataclass(slots=True)
class SuiteReading:
    """One reading of a suite, which pydantic hands to every check here as its context."""

    values: int = 0

    def add(self, number: int, *place: str | int) -> None:
        """Count values before they are all held in memory."""
        self.values += number
        if self.values > MAX_IN_ALL:
            wrong(f"more than {MAX_IN_ALL} values in one suite; use fewer, or larger steps", *place)


def _reading(info: ValidationInfo) -> SuiteReading:
    reading = info.context or SuiteReading()
    assert isinstance(reading, SuiteReading)
    reading.add(0)  # a suite that has too many is not read on
    return reading


def _listed(value: object, axis: str | None) -> list[object]:
    items = value if isinstance(value, list) else [value]
    if not items:
        wrong(f"{axis!r} is an empty list; give at least one value")
    return items


def _whole(low: int, high: int, *, null: bool = False) -> Check:
    def check(value: object, info: ValidationInfo) -> list[int | None]:
        axis, reading = info.field_name, _reading(info)
        numbers: list[int | None] = []
        for index, item in enumerate(_listed(value, axis)):
            if item is None and null:
                numbers.append(None)
                continue
            part = _numbers(item, axis, index)
            for number in part:
                if not low <= number <= high:
                    wrong(f"{axis!r} must lie between {low} and {high}, got {number}; write a number in between", index)
            numbers += part
            reading.add(len(part), index)
            if len(numbers) > MAX_VALUES:
                wrong(f"{axis!r}: {len(numbers)} values, at most {MAX_VALUES}; use fewer", index)
        return numbers

    return check


def _numbers(item: object, axis: str | None, index: int) -> list[int]:
    if isinstance(item, bool) or not isinstance(item, int | str):
        wrong(f"{axis!r} must be whole numbers, got {shown(item)}; {FORMS}", index)
    if isinstance(item, str) and ".." not in item and "," not in item and (item.isdecimal() or not is_number(item)):
        # A quoted number is text: the types of a suite are strict. YAML has no number such as 16k.
        remedy = "remove the quotes" if item.isdecimal() else FORMS
        wrong(f"{axis!r} must be whole numbers, got the text {shown(item)}; {remedy}", index)
    try:
        return parse_range(item)
    except UsageError as error:
        wrong(f"{axis!r}: {error}", index)


def _specs(kind: str) -> Check:
    """Names and options as they stand: torch must not be imported for what is no suite. :func:`named` looks them up."""

    def check(value: object, info: ValidationInfo) -> list[Spec]:
        reading = _reading(info)
        items = enumerate(_listed(value, info.field_name))
        return [spec for index, item in items for spec in _written(kind, item, index, reading)]

    return check


def _written(kind: str, item: object, index: int, reading: SuiteReading) -> list[Spec]:
    try:
        specs = specs_of(kind, item)
    except UsageError as error:
        wrong(_with_remedy(error, f"'attnbench list {kind}s' shows the names"), index)
    reading.add(len(specs), index)
    for spec in specs:
        for option, value in spec.options:
            if isinstance(value, float) and not math.isfinite(value):
                wrong(f"{spec.name}: option {option}={value} is not finite; write a finite number", index)
    return specs


def specs_of(kind: str, item: object) -> list[Spec]:
    """The specs that an item of a list writes; ``none`` for a variant is nothing in YAML. Raises UsageError."""
    return parse_specs(UNTOUCHED if item is None and kind == "variant" else item)


def _with_remedy(error: UsageError, remedy: str) -> str:
    return str(error) if ";" in str(error) else f"{error}; {remedy}"


def named(kind: str, spec: Spec) -> Spec:
    """The variant, input or task as its registry has it: each option by its name, and none at its default.

    Raises UsageError: an unknown name or option.
    """
    if kind == "variant" and spec == _UNTOUCHED:
        return spec
    remedy = f"'attnbench list {kind}s' shows the names"
    try:
        entry: Entry = _REGISTRIES[kind].get(spec.name)
        remedy = f"'attnbench show {spec.name}' lists its options"
        return entry.normalise(spec)
    except UsageError as error:
        raise UsageError(_with_remedy(error, remedy)) from None


def _each(read: Callable[[object], Any]) -> Check:
    """Read the items of a list one by one; ``read`` raises UsageError with what follows the axis in the message."""

    def check(value: object, info: ValidationInfo) -> list[Any]:
        found = []
        for index, item in enumerate(_listed(value, info.field_name)):
            try:
                found.append(read(item))
            except UsageError as error:
                wrong(f"{info.field_name!r} {error}", index)
        return found

    return check


def _words(known: tuple[str, ...]) -> Check:
    def word(item: object) -> object:
        found = "none" if item is None and "none" in known else item  # without quotes it is nothing in YAML
        if not isinstance(found, str) or found not in known:
            raise UsageError(f"cannot be {shown(item)}{pick(item, known)}")
        return found

    return _each(word)


def _masks(value: object, info: ValidationInfo) -> list[str]:
    masks: list[str] = []
    reading = _reading(info)
    for index, item in enumerate(_listed(value, info.field_name)):
        if item is not None and not isinstance(item, str | Mapping):
            wrong(f"{info.field_name!r} cannot be {shown(item)}; write {MASK_FORMS}", index)
        try:
            found = masks_of("none" if item is None else item)  # without quotes it is nothing in YAML
        except UsageError as error:
            wrong(str(error) if ";" in str(error) else f"{error}; write {MASK_FORMS}", index)
        reading.add(len(found), index)
        masks += map(str, found)
    return masks


def _layers(item: object) -> str:
    words = str(item).split("+")
    if item == "all":
        return "all"
    if isinstance(item, bool) or not all(one.isdecimal() and len(one) < 5 for one in words):
        raise UsageError(f"cannot be {shown(item)}; write all, a layer such as 3, or 0+5")
    return "+".join(map(str, sorted({int(one) for one in words})))


def _flag(item: object) -> bool:
    if not isinstance(item, bool):
        raise UsageError(f"cannot be {shown(item)}; write true or false")
    return item


def _share(item: object) -> float:
    if isinstance(item, bool) or not isinstance(item, int | float) or not 0 <= item < 1:
        raise UsageError(f"must be at least 0 and below 1, got {shown(item)}; write 0.5, say")
    return float(item)


def _rate(item: object) -> float:
    if isinstance(item, bool) or not isinstance(item, int | float) or not 0 < item <= 1:
        is_rate = isinstance(item, str) and isinstance(parse_scalar(item), float)
        remedy = "write 2.0e-3: YAML takes 2e-3 for text" if is_rate else "write 0.002, say"
        raise UsageError(f"must be above 0 and at most 1, got {shown(item)}; {remedy}")
    return float(item)


def _number_tests(value: object, info: ValidationInfo) -> list[Test]:
    numbers: set[int] = set()
    tests: list[Test] = [numbers.__contains__]
    reading = _reading(info)
    for index, item in enumerate(_listed(value, info.field_name)):
        comparison = _COMPARISON.fullmatch(item) if isinstance(item, str) else None
        if comparison:
            (number,) = parse_range(comparison[2])
            tests.append(partial(_OPERATORS[comparison[1]], number))
        elif isinstance(item, str) and item.lstrip()[:1] in tuple("<>=!"):
            wrong(f"{info.field_name!r}: {shown(item)} is not a comparison; write for instance '>=65536'", index)
        else:
            part = _numbers(item, info.field_name, index)
            reading.add(len(part), index)
            numbers.update(part)
    return tests


def _spec_tests(kind: str) -> Check:
    def check(value: object, info: ValidationInfo) -> list[Test]:
        tests: list[Test] = []
        reading = _reading(info)
        for index, item in enumerate(_listed(value, info.field_name)):
            by_name = ":" not in item if isinstance(item, str) else isinstance(item, Mapping) and set(item) == {"name"}
            tests += [_named(kind, spec, by_name=by_name) for spec in _written(kind, item, index, reading)]
        return tests

    return check


def _named(kind: str, spec: Spec, *, by_name: bool) -> Test:
    whole = cache(lambda: named(kind, spec))
    return lambda value: bool(value.name == spec.name if by_name else value == whole())


def _equal_to(values: Check) -> Check:
    return lambda value, info: [partial(operator.eq, one) for one in values(value, info)]


def _schema(item: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [item, {"type": "array", "items": item, "minItems": 1}]})


_SPEC = {"type": ["string", "object"]}
_CONDITION = {"type": ["number", "string", "boolean", "object"]}
_REGISTRIES: dict[str, Registry[Any]] = {"variant": VARIANTS, "input": INPUTS, "task": TASKS}


def _checked_by(axis: Axis) -> tuple[Check, dict[str, Any]]:
    match axis.values:
        case Specs(kind):
            types = [*_SPEC["type"], *["null"] * (kind == "variant")]
            return _specs(kind), {**_SPEC, "type": types}
        case Whole(low, high):
            types = ["integer", "string", *["null"] * bool(axis.same_as)]
            return _whole(low, high, null=bool(axis.same_as)), {"type": types}
        case Words(known):
            return _words(known), {"enum": [*known, *[None] * ("none" in known)]}
        case Masks():
            return _masks, {"type": ["string", "object", "null"]}
        case Layers():
            return _each(_layers), {"type": ["string", "integer"]}
        case Share():
            return _each(_share), {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
        case Rate():
            return _each(_rate), {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
        case Flag():
            return _each(_flag), {"type": "boolean"}


def values_of(axis: Axis) -> Any:
    """The type of a field with values of an axis: one value or a list of them."""
    check, schema = _checked_by(axis)
    return Annotated[list[Any], PlainValidator(check), _schema(schema)]


def tests_of(axis: Axis) -> Any:
    """The type of a field with conditions on an axis."""
    match axis.values:
        case Specs(kind):
            return _tests(_spec_tests(kind))
        case Whole():
            return _tests(_number_tests)
    return _tests(_equal_to(_checked_by(axis)[0]))


def _tests(check: Check) -> Any:
    return Annotated[list[Test], PlainValidator(check), _schema(_CONDITION)]


DeviceTests = Annotated[list[Test], PlainValidator(_equal_to(_words(DEVICES))), _schema(_CONDITION)]
