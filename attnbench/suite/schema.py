"""A suite as a validated model; only this model, its sweeps and its axes validate one."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, create_model, model_validator

from attnbench.errors import did_you_mean
from attnbench.suite import axis_values as axes
from attnbench.suite.axes import AXES
from attnbench.suite.document import write_document
from attnbench.suite.messages import Origin, Place, explain, pick, shown, wrong
from attnbench.suite.sweep import Axes, Matrix, Name, Profiles, Rules, Size, Strict, Sweep, SweepNames, Tuning

_TESTS: dict[str, Any] = {
    name: (axes.tests_of(axis), Field(default=[], description=axis.condition or axis.values.condition))
    for name, axis in AXES.items()
}


class Include(Axes):
    """Cells in addition, whatever ``exclude`` says: the sweep's matrix with the axes of this row replaced."""

    sweep: SweepNames = Field(default=[], description="only in these sweeps")


class _Where(Strict):
    sweep: SweepNames = Field(default=[], description="only in these sweeps")
    device: axes.DeviceTests = Field(default=[], description="type of device: cpu, cuda or mps")


class Exclude(create_model("_Conditions", __base__=_Where, **_TESTS)):  # type: ignore[misc]
    """A cell that meets every condition of a row is left out; a list of values means any of them."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.data:
            wrong("an empty row excludes every cell; write conditions such as variant: softmax, or remove the row")
        return self

    def tests(self) -> dict[str, list[axes.Test]]:
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis)}


class Suite(Strict):
    """The checked content of a suite file."""

    name: Name = Field(description="its results stand in a folder of this name")
    description: str = Field(default="", description="what it measures, in a sentence or two")
    min_time: float = Field(default=0.5, gt=0, le=3600, description="least seconds spent on samples of a cell")
    rounds: int = Field(default=3, ge=1, le=20, description="shuffled visits of each cell")
    sweeps: list[Sweep] = Field(min_length=1, description="matrices of cells, each measured in one way")
    profiles: Profiles = Field(default=Profiles(), description="values by type of device, on top of every sweep")
    exclude: list[Exclude] = Field(default=[], max_length=256, description="cells to leave out, row by row")
    include: list[Include] = Field(default=[], max_length=256, description="cells to add, row by row")

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @classmethod
    def of(cls, data: object, origin: Origin) -> Self:
        """Validate plain data, all but the names in it: :func:`attnbench.suite.expand.check_names` looks them up.

        Raises SuiteError for the first mistake in the file, with its place; UsageError if a command made the suite.
        """
        try:
            suite = cls.model_validate(data, context=axes.SuiteReading())
        except ValidationError as error:
            raise origin.error(*_first_problem(error, origin)) from None
        suite._origin = origin
        return suite

    @property
    def origin(self) -> Origin:
        return self._origin

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        names = [sweep.name for sweep in self.sweeps]
        folded = [name.casefold() for name in names]  # -k cannot tell upper from lower case
        for index, name in enumerate(names):
            if folded[index] in folded[:index]:
                wrong(f"two sweeps are called {name!r}; rename one", "sweeps", index, "name")
        mentioned = {"exclude": [row.sweep for row in self.exclude], "include": [row.sweep for row in self.include]}
        for key, rows in mentioned.items():
            for index, row in enumerate(rows):
                for name in row:
                    if name not in names:
                        wrong(f"unknown sweep {shown(name)}{pick(name, names)}", key, index, "sweep")
        for index, row in enumerate(self.include):
            sweeps = [sweep for sweep in self.sweeps if not row.sweep or sweep.name in row.sweep]
            for axis in row.given():
                if not any(sweep.takes(axis) for sweep in sweeps):
                    sweeps[0].refuse_axis(axis, "include", index, axis)
        return self

    def to_yaml(self) -> str:
        return write_document(self.data)


def first_problem(error: ValidationError) -> str:
    """The first mistake in plain words, with a remedy."""
    return _first_problem(error, Origin())[1]


def _first_problem(error: ValidationError, origin: Origin) -> tuple[Place, str]:
    details = min(error.errors(include_url=False), key=lambda details: origin.line(details["loc"]))
    place = details["loc"]
    return place, _unknown_key(place) if details["type"] == "extra_forbidden" else explain(dict(details))


def _names(model: type[BaseModel]) -> list[str]:
    return [info.alias or name for name, info in model.model_fields.items()]


_PARTS: dict[str, type[BaseModel]] = {
    "sweeps": Sweep,
    "matrix": Matrix,
    "model": Size,
    "training": Rules,
    "tuning": Tuning,
    "profiles": Profiles,
    "exclude": Exclude,
    "include": Include,
}


def _unknown_key(place: Place) -> str:
    *inside, key = place
    last = [part for part in inside if isinstance(part, str)][-1:]
    model: type[BaseModel] = _PARTS.get(last[0], Axes) if last else Suite  # a type of device has axes
    if model is Sweep and key in AXES:
        return f"{key!r} does not stand here; put it under matrix"
    if model is Matrix and key in _names(Sweep):
        return f"{key!r} does not stand here; put it beside matrix"
    known = _names(model)
    hint = did_you_mean(str(key)[:100], known) or f"; known keys are {', '.join(known)}"
    return f"unknown key {shown(key)}{hint}"
