"""From a suite to its cells, and axes set from the command line."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from attnbench.contract.problem.mask import mask_of
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Scalar, Spec, comma_separated, parse_scalar
from attnbench.contract.variant import VARIANTS
from attnbench.errors import UsageError, any_of
from attnbench.suite.axes import AXES, Masks, Specs, filled, names_of, shortened
from attnbench.suite.axis_values import DEVICES, SuiteReading, named, specs_of
from attnbench.suite.cell import UNTOUCHED, Cell, ModelSize, Pretrained, Training, is_causal, tokens_after
from attnbench.suite.messages import Place, pick, shown
from attnbench.suite.named_shapes import spelled_out
from attnbench.suite.schema import Exclude, Suite, first_problem
from attnbench.suite.sweep import PASSES, Axes, Rules, Strict, Sweep

MAX_CELLS = 20_000
"""At half a second a cell, three hours."""

_DEFAULTS = {name: [axis.default] for name, axis in AXES.items() if not axis.required}
_OF_SHAPE, _OF_CELL = names_of("shape"), names_of("cell")

_NAMED = {name: axis.values.kind for name, axis in AXES.items() if isinstance(axis.values, Specs)}

Override = str | Scalar | list[Any]
"""One value, text as typed after ``--set axis=``, or a list of both."""


@dataclass(slots=True)
class _SweepGrid:
    index: int
    sweep: Sweep
    axes: dict[str, list[Any]]
    excludes: list[Exclude]

    @property
    def size(self) -> int:
        return math.prod(map(len, self.axes.values()))


def expand(suite: Suite, *, device: str = "cpu") -> list[Cell]:
    """Every cell of the suite, once each: sweeps in order, and in a sweep the axis written first varies slowest.

    The suite's profile for the type of ``device`` and then the sweep's own replace values of a sweep's matrix.
    ``exclude`` then takes cells away, and ``include`` adds some that ``exclude`` does not see. Cells at level
    pretrained have the sizes of the matrix: ``attnbench.models.pretrained.sizes`` fills in those of the model. Raises
    SuiteError: ``none`` for a variant without a trained model, no cells, more than :data:`MAX_CELLS` (counted before
    any is made), or an impossible shape. Raises UsageError: an unknown type of device.
    """
    kind = device.partition(":")[0]
    if kind not in DEVICES:
        raise UsageError(f"unknown device {shown(device)}{pick(kind, DEVICES)}")
    check_size(suite, kind)
    check_names(suite)
    cells = dict.fromkeys(cell for grid in _grids(suite, kind) for cell in _cells(suite, grid, device))
    if not cells:
        raise suite.origin.error(("exclude",), "every cell is excluded; remove a condition")
    return list(cells)


def check_size(suite: Suite, kind: str) -> None:
    """Count the cells on one type of device, before any is made. Raises SuiteError for more than MAX_CELLS."""
    count = 0
    for grid in _grids(suite, kind):
        count += grid.size
        if count > MAX_CELLS:
            place = ("sweeps", grid.index, "matrix")
            raise suite.origin.error(place, f"{count} cells, at most {MAX_CELLS}; use fewer values here")


def check_names(suite: Suite) -> None:
    """Look up every variant, input and task, which imports torch.

    Raises SuiteError for the first unknown name or option; UsageError if a command made the suite of its options.
    """
    problems = []
    for place, written in axes_in(suite):
        for axis in [one for one in written.data if one in _NAMED]:
            values = written.data[axis]
            for index, item in enumerate(values if isinstance(values, list) else [values]):
                try:
                    for spec in specs_of(_NAMED[axis], item):
                        named(_NAMED[axis], spec)
                except UsageError as error:
                    problems.append(((*place, axis, index), str(error)))
    if problems:
        raise suite.origin.error(*min(problems, key=lambda one: suite.origin.line(one[0])))


def axes_in(suite: Suite) -> Iterator[tuple[Place, Strict]]:
    """Every mapping of axes to values or conditions in a suite, with its place."""
    for index, sweep in enumerate(suite.sweeps):
        yield ("sweeps", index, "matrix"), sweep.matrix
        for kind in DEVICES:
            yield ("sweeps", index, "profiles", kind), getattr(sweep.profiles, kind)
    for kind in DEVICES:
        yield ("profiles", kind), getattr(suite.profiles, kind)
    for key in ("exclude", "include"):
        for index, row in enumerate(getattr(suite, key)):
            yield (key, index), row


def apply_overrides(
    suite: Suite,
    overrides: Mapping[str, Override],
    *,
    options: Mapping[str, str] | None = None,
    names: bool = True,
) -> Suite:
    """The suite with axes replaced in every sweep, over its matrices and profiles.

    Axes that apply to some sweeps only (:attr:`attnbench.suite.axes.Axis.only`) leave the others as they are. An
    ``include`` row loses the values that the override does not name. Raises UsageError for an unknown axis, or values
    that it does not take.

    Args:
        overrides: axis -> value, list, or text: ``{"seq_len": "1024..4096", "variant": "sdpa,performer:features=64"}``.
        options: axis -> the user's option, such as ``--dtype``, for messages; ``--set axis`` for other axes.
        names: False before torch is imported: names and options are then taken as they stand.
    """
    # Whether kv_len means anything depends on the architecture.
    for axis, value in sorted(overrides.items(), key=lambda one: one[0] == "kv_len"):
        suite = _with_axis(suite, axis, value, (options or {}).get(axis, f"--set {axis}"), names=names)
    return suite


def _with_axis(suite: Suite, axis: str, value: Override, option: str, *, names: bool) -> Suite:
    if axis not in AXES:
        raise UsageError(f"unknown axis {shown(axis)}{pick(axis, AXES)}")
    values = _split(axis, value)
    try:
        wanted = _read(axis, values, names=names)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
    data = copy.deepcopy(suite.data)
    sweeps = [plain for plain, sweep in zip(data["sweeps"], suite.sweeps, strict=True) if _has_axis(sweep, axis)]
    if not sweeps:
        owners = _OWNERS[AXES[axis].only]
        raise UsageError(f"{option}: only sweeps {owners} have this axis, and {suite.name!r} has none; remove it")
    for plain in sweeps:
        plain["matrix"][axis] = values
        if isinstance(sizes := plain.get("model"), dict):  # and not the name of a trained one
            sizes.pop(axis, None)  # positions may stand there
    for owner in (data, *sweeps):
        profiles = owner.get("profiles", {})
        for kind, profile in profiles.items():  # an axis taken away must not come back by the name of a shape
            profiles[kind] = {name: kept for name, kept in spelled_out(profile).items() if name != axis}
    if "include" in data:
        kept = (_narrowed(row, axis, wanted, names=names) for row in data["include"])
        data["include"] = [row for row in kept if row is not None]
    return Suite.of(data, suite.origin)


def read_axis(axis: str, text: str, called: str) -> list[Any]:
    """The values of an axis in text as after ``--set``; UsageError in which the axis is ``called`` so."""
    try:
        return _read(axis, _split(axis, text), names=True)
    except UsageError as error:
        said = str(error) if repr(axis) in str(error) else f"{axis!r}: {error}"
        raise UsageError(said.replace(repr(axis), repr(called))) from None


def _read(axis: str, values: Any, *, names: bool) -> list[Any]:
    try:
        found: list[Any] = getattr(Axes.model_validate({axis: values}, context=SuiteReading()), axis)
    except ValidationError as error:
        raise UsageError(first_problem(error)) from None
    return _as_named(axis, found) if names else found


def _as_named(axis: str, values: list[Any]) -> list[Any]:
    return [one and named(_NAMED[axis], one) for one in values] if axis in _NAMED else values


_OWNERS = {
    **{only: f"with pass: {any_of(passes)}" for only, passes in PASSES.items()},
    "operator": "at level operator",
    "cross": "at level operator or of an encoder-decoder",
    "layer": "at level layer or model",
    "model": "at level model",
    "task": "with a task",
    "score": "that measure a score",
    "pretrained": "at level pretrained",
}
"""Scope of an axis -> the test that a sweep is in it."""


def _has_axis(sweep: Sweep, axis: str) -> bool:
    return sweep.takes(axis) and (axis != "task" or bool(sweep.matrix.task))


def _narrowed(row: dict[str, Any], axis: str, wanted: list[Any], *, names: bool) -> dict[str, Any] | None:
    row = spelled_out(row)
    if axis not in row:
        return row
    values = [value for value in _read(axis, row[axis], names=names) if value in wanted]
    plain = [{"name": value.name, **dict(value.options)} if isinstance(value, Spec) else value for value in values]
    return {**row, axis: plain} if values else None


def _split(axis: str, value: object) -> list[Any]:
    """The values of text after ``--set axis=``, as YAML would give them."""
    if isinstance(value, list | tuple):
        return [one for item in value for one in _split(axis, item)]
    if not isinstance(value, str):
        return [value]
    if isinstance(AXES[axis].values, Specs | Masks):
        return _split_specs(value)
    return [parse_scalar(part) for part in comma_separated(value)]


def _split_specs(text: str) -> list[str]:
    """``a,b:x=1,y=2`` is a and b: a part that is only an option belongs to the name before it."""
    specs: list[str] = []
    for part in re.findall(r"(?:\[[^\[\]]*\]|[^,])+", text):
        key, equals, _ = part.partition("=")
        if specs and equals and ":" not in key:
            specs[-1] += f",{part.strip()}"
        else:
            specs.append(part.strip())
    return specs or [text]


def _grids(suite: Suite, kind: str) -> Iterator[_SweepGrid]:
    included = [(row.sweep, row.given()) for row in suite.include]
    for index, sweep in enumerate(suite.sweeps):
        axes = {
            **sweep.matrix.given(),
            **getattr(suite.profiles, kind).given(),
            **getattr(sweep.profiles, kind).given(),
        }
        axes = {axis: values for axis, values in axes.items() if sweep.takes(axis)}
        axes = {**axes, **{axis: values for axis, values in _DEFAULTS.items() if axis not in axes}}
        excludes = [
            row
            for row in suite.exclude
            if (not row.sweep or sweep.name in row.sweep) and (not row.device or any(test(kind) for test in row.device))
        ]
        yield _SweepGrid(index, sweep, axes, excludes)
        for only, values in included:
            if not only or sweep.name in only:
                own = {axis: one for axis, one in values.items() if sweep.takes(axis)}
                yield _SweepGrid(index, sweep, {**axes, **own}, [])


def _cells(suite: Suite, grid: _SweepGrid, device: str) -> Iterator[Cell]:
    sweep, measures = grid.sweep, grid.sweep.measures
    size = ModelSize(**(sweep.sizes.model_dump() if sweep.sizes else {})) if sweep.level == "model" else None
    trained = _trained(suite, grid)
    trainings = _trainings(sweep, grid.axes["learning_rate"])
    excluded = [row.tests() for row in grid.excludes]
    axes = {axis: _as_named(axis, values) for axis, values in grid.axes.items()}
    if sweep.level == "operator":
        _hold_to_cores(suite, grid, axes["variant"])
    shapes: dict[tuple[Any, ...], Shape] = {}
    for chosen in itertools.product(*axes.values()):
        at = dict(zip(axes, chosen, strict=True))
        asked = filled(at)
        masked = asked["mask"].startswith(("causal", "prefix"))  # other words for causal: true, and causal with more
        at["causal"] = asked["causal"] = is_causal(at["causal"] or masked, at["architecture"], sweep.pass_)
        asked["new_tokens"] = tokens_after(at["new_tokens"], sweep.pass_)
        if asked["positions"] is None:  # those of the level
            asked["positions"] = size.positions if size else "none"
        if any(all(any(test(asked[axis]) for test in row[axis]) for axis in row) for row in excluded):
            continue
        at = shortened(at)
        sizes = tuple(at[axis] for axis in _OF_SHAPE)
        shape = shapes.get(sizes)
        if shape is None:
            try:
                shape = shapes[sizes] = Shape(**dict(zip(_OF_SHAPE, sizes, strict=True)))
                mask_of(shape.mask).check(shape.M)
            except UsageError as error:
                where = ("sweeps", grid.index, "matrix")
                raise suite.origin.error(where, f"{error}; or exclude these cells") from None
        yield Cell(
            suite=suite.name,
            sweep=sweep.name,
            shape=shape,
            level=sweep.level,
            pass_=sweep.pass_,
            device=device,
            measure=measures,
            model=size,
            error_draws=sweep.error_draws,
            fit=sweep.fit,
            **{axis: at[axis] for axis in _OF_CELL},
            training=trainings.get(at["learning_rate"]),
            pretrained=trained,
        )


def _hold_to_cores(suite: Suite, grid: _SweepGrid, variants: list[Spec]) -> None:
    """Raise SuiteError for an option of a layer whose core, which level operator measures, does not have it."""
    for spec in variants:
        try:
            VARIANTS.get(spec.name).at("operator").check(dict(spec.options))
        except UsageError as error:
            raise suite.origin.error(("sweeps", grid.index, "matrix", "variant"), str(error)) from None


def _trained(suite: Suite, grid: _SweepGrid) -> Pretrained | None:
    sweep = grid.sweep
    if sweep.trained is not None:
        windows, last = sweep.windows if "loss" in sweep.measure else 0, max(grid.axes["tuned"])
        if last and sweep.measures != ("loss",):  # from a profile, or after --set
            said = "'tuned' trains a model, which is not timed; write measure: loss alone"
            raise suite.origin.error(("sweeps", grid.index, "matrix", "tuned"), said)
        rules = sweep.tuning.model_dump() if last and sweep.tuning else {}
        return Pretrained(sweep.trained, sweep.text or "", windows, last, **rules)
    if any(spec.name == UNTOUCHED for spec in grid.axes["variant"]):
        where = ("sweeps", grid.index, "matrix", "variant")
        said = "is a trained model as it is; write level: pretrained, or another variant"
        raise suite.origin.error(where, f"'variant': {UNTOUCHED} {said}")
    return None


def _trainings(sweep: Sweep, rates: list[float]) -> dict[float, Training]:
    if "score" not in sweep.measure:
        return {}
    rules = sweep.training or Rules()
    given = rules.model_dump(exclude={"pretrain"})
    given["pretrain_steps"] = (rules.pretrain_steps or rules.steps) if rules.pretrain == "masked" else 0
    protocol: Literal["fixed", "sweep"] = "sweep" if len(set(rates)) > 1 else "fixed"
    return {rate: Training(learning_rate=rate, protocol=protocol, **given) for rate in rates}
