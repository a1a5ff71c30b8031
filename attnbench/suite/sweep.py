"""One sweep of a suite as a validated model: a matrix of cells, and how they are measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PrivateAttr,
    StringConstraints,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_wrap_validator_function

from attnbench.errors import UsageError, any_of
from attnbench.suite import axis_values as axes
from attnbench.suite.axes import AXES, exists
from attnbench.suite.cell import STEPS, Level, Measure, Pass, Positions
from attnbench.suite.messages import shown, wrong
from attnbench.suite.named_shapes import NAMED, known, spelled_out

MEASURES: tuple[Measure, ...] = get_args(Measure)

_DEVICE = re.compile(r"(con|prn|aux|nul|(com|lpt)[0-9])(\..*)?", re.IGNORECASE)
"""Names that Windows reserves for devices, in any folder and with any suffix."""


def _name_of_a_folder(name: str) -> str:
    if _DEVICE.fullmatch(name):
        wrong(f"'name': {name!r} is a device on Windows, where no folder can be called so; choose another")
    if name.endswith("."):
        wrong(f"'name': {name!r} ends in a dot, which Windows drops; choose another")
    return name


_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}"

Name = Annotated[
    str,
    StringConstraints(pattern=rf"{_NAME}\z"),
    AfterValidator(_name_of_a_folder),
    WithJsonSchema({"type": "string", "pattern": f"{_NAME}$"}),  # \z means another thing in an editor
]


class Strict(BaseModel):
    """No unknown keys, no conversion between types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    _data: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_data(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        model = handler(data)
        if isinstance(data, dict):
            model._data = data
        return model

    @property
    def data(self) -> dict[str, Any]:
        """The plain data this was made from, in the order written."""
        return self._data


_VALUES: dict[str, Any] = {
    name: (axes.values_of(axis), Field(default=[], description=axis.help)) for name, axis in AXES.items()
}
_REQUIRED: dict[str, Any] = {
    name: (axes.values_of(axis), Field(description=axis.help)) for name, axis in AXES.items() if axis.required
}


def _known(name: object) -> str:
    try:
        return known(str(name))
    except UsageError as error:
        wrong(str(error))


ShapeName = Annotated[str | None, BeforeValidator(_known), WithJsonSchema({"enum": list(NAMED)})]


class Axes(create_model("_Values", __base__=Strict, **_VALUES)):  # type: ignore[misc]  # its fields are in a table
    """Values by axis; an empty list means that the axis is not mentioned."""

    shape: ShapeName = Field(default=None, description="heads, widths and causal of a published shape: llama3-8b")

    def given(self) -> dict[str, list[Any]]:
        """Axis -> values, only axes that are mentioned or in the named shape, in the order written."""
        named = {axis: [value] for axis, value in spelled_out({"shape": self.shape}).items()}
        return named | {axis: getattr(self, axis) for axis in self.data if axis in AXES and getattr(self, axis)}


class Matrix(create_model("_Required", __base__=Axes, **_REQUIRED)):  # type: ignore[misc]
    """Every combination of its values is a cell; the axis written first varies slowest."""


class Profiles(Strict):
    """Values that replace those of the matrix on one type of device."""

    cpu: Axes = Field(default=Axes(), description="values on a CPU")
    cuda: Axes = Field(default=Axes(), description="values on an NVIDIA GPU")
    mps: Axes = Field(default=Axes(), description="values on an Apple GPU")


class Size(Strict):
    """The model at level model; width and heads come from the matrix."""

    layers: int = Field(default=4, ge=1, le=1000, description="layers, of an encoder-decoder in each half")
    ffn: int = Field(default=1024, ge=1, le=2**20, description="width of the feed-forward layer")
    vocab: int = Field(default=256, ge=1, le=2**24, description="number of different tokens, if no task sets it")
    positions: Positions = Field(
        default="learned",
        description="a learned embedding, from noise or sinusoids, or fixed sinusoids; rotary: q and k are turned",
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of the numbers that is dropped after each layer")


class _OrName:
    """Mark of the field that takes sizes, or the name of a trained model: mistakes in sizes keep their own places."""

    @staticmethod
    def __get_pydantic_core_schema__(_: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_wrap_validator_function(
            lambda value, sizes: value if isinstance(value, str) else sizes(value),
            handler.generate_schema(Size | None),
        )

    @staticmethod
    def __get_pydantic_json_schema__(schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        sizes, nothing = handler(schema)["anyOf"]
        return {"anyOf": [sizes, {"type": "string"}, nothing]}


class Rules(Strict):
    """Rules for training a model to be scored."""

    steps: int = Field(
        default=300, ge=1, le=10**7, description="steps of training; the weights after the last one count"
    )
    warm_up: float = Field(default=0.1, ge=0, le=1, description="share of the steps in which the rate rises")
    weight_decay: float = Field(default=0.01, ge=0, le=10, description="weight decay of AdamW")
    sweep_seeds: int = Field(default=2, ge=1, le=100, description="seeds with which each of several rates is tried")
    pretrain: Literal["none", "masked"] = Field(
        default="none", description="masked: train on masked tokens of the task first"
    )
    pretrain_steps: int | None = Field(default=None, ge=1, le=10**7, description="default: as many as steps")
    evaluations: int = Field(default=6, ge=1, le=1000, description="points of the learning curve")
    solved: float | None = Field(default=None, gt=0, le=1, description="score that softmax must reach; else rows warn")
    guide: float = Field(
        default=0.0, ge=0, le=1000, description="weight of the guided-attention loss: attention keeps to the diagonal"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.pretrain_steps is not None and self.pretrain == "none":
            wrong("'pretrain_steps' does nothing without pretrain: masked; remove it", "pretrain_steps")
        return self


class Tuning(Strict):
    """Rules of the training after a swap."""

    rate: float = Field(
        default=3e-4, alias="learning_rate", gt=0, le=1, description="largest learning rate of the training"
    )
    redraw: int = Field(
        default=0, ge=0, le=10**6, description="steps after which random features are drawn again; 0: never"
    )


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _one_or_list(item: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [item, {"type": "array", "items": item}]})


SweepNames = Annotated[list[str], BeforeValidator(_as_list), _one_or_list({"type": "string"})]


PASSES: Mapping[str, tuple[Pass, ...]] = {"prompt": ("generate",), "generate": ("generate", "decode"), "steps": STEPS}
"""Scope of an axis -> the passes in which it has a meaning."""


class Sweep(Strict):
    """One matrix of cells that are measured in the same way."""

    name: Name = Field(description="its name in tables, in figures and after -k")
    level: Level = Field(
        default="operator",
        description="attention alone, with its projections, a whole model, or a trained one (pretrained)",
    )
    pass_: Pass = Field(
        default="forward",
        alias="pass",
        description="training: forward and backward together; decode: one step; stepwise: all tokens, one by one; "
        "generate: a prompt, then one token after the other",
    )
    measure: Annotated[list[Measure], BeforeValidator(_as_list), _one_or_list({"enum": list(MEASURES)})] = Field(
        default=["time", "memory"],
        min_length=1,
        description="time, memory, error and own_error (operator level only), loss (pretrained level only), score (by "
        "training)",
    )
    model: Annotated[Size | str | None, _OrName] = Field(
        default=None,
        description="sizes of the model (model level); a trained one (pretrained level): listops, a folder, FILE.gguf "
        "or pypi:PACKAGE/FILE",
    )
    text: str | None = Field(
        default=None, description="file of text that the trained model reads; default: its own (pretrained level only)"
    )
    windows: int = Field(default=16, ge=6, le=10**6, description="windows held out to measure a loss (measure: loss)")
    training: Rules | None = Field(default=None, description="how it is trained (measure: score only)")
    tuning: Tuning | None = Field(
        default=None, description="how a trained model is trained after the swap (axis tuned of level pretrained)"
    )
    error_draws: int = Field(default=5, ge=1, le=1000, description="inputs and projections drawn for one error")
    fit: int = Field(
        default=0, ge=0, le=10**6, description="steps of fitting what is learned to the exact output before the error"
    )
    matrix: Matrix = Field(description="axes and their values: every combination is a cell")
    profiles: Profiles = Field(default=Profiles(), description="values by type of device, after those of the suite")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for one in ("error", "own_error") if self.level != "operator" else ():
            if one in self.measure:
                wrong(
                    f"{one!r} is measured at level operator only, and sweep {self.name!r} is at level {self.level}; "
                    "put it into a sweep of its own",
                    "measure",
                )
        if self.data.get("error_draws") is not None and "error" not in self.measure:
            wrong("'error_draws' does nothing without measure: [error]; remove it", "error_draws")
        if self.fit and set(self.measure) != {"error"}:
            wrong("'fit' needs measure: [error] alone; remove it, or put the rest into a sweep of its own", "fit")
        if self.level == "pretrained":
            self._check_pretrained()
        else:
            self._check_model()
        self._check_training()
        for name in self.matrix.given():
            if not self.takes(name):
                self.refuse_axis(name, "matrix", name)
        return self

    @property
    def sizes(self) -> Size | None:
        return self.model if isinstance(self.model, Size) else None

    @property
    def trained(self) -> str | None:
        return self.model if isinstance(self.model, str) else None

    def _check_model(self) -> None:
        if self.trained is not None and self.level == "model":
            wrong(
                f"'model' must be sizes at level model, got {shown(self.model)}; write lines of 'key: value', or "
                "level: pretrained",
                "model",
            )
        if self.model is not None and self.level != "model":
            level = "model" if self.trained is None else "pretrained"
            wrong(f"'model' does nothing at level {self.level}; remove it or write level: {level}", "model")
        if self.matrix.positions and self.sizes is not None and "positions" in self.sizes.data:
            wrong("'positions' stands in the matrix as well; remove one of them", "model", "positions")
        if "loss" in self.measure:
            wrong("'loss' is that of a trained model; write level: pretrained and model: listops, say", "measure")
        for key in ("text", "windows", "tuning"):
            if self.data.get(key) is not None:
                wrong(f"{key!r} does nothing at level {self.level}; remove it or write level: pretrained", key)

    def _check_pretrained(self) -> None:
        if self.model is None:
            wrong("'model' is missing, without which there is nothing trained; write model: listops, say", "level")
        if self.trained is None:
            wrong("'model' must be the name of a trained model, not sizes; write model: listops, say", "model")
        if self.pass_ in STEPS:
            wrong(f"a trained model reads whole windows, and has no pass {self.pass_}; write pass: forward", "pass")
        if "loss" not in self.measure and self.data.get("windows") is not None:
            wrong("'windows' does nothing without measure: loss; remove it", "windows")
        if any(self.matrix.tuned) and set(self.measure) != {"loss"}:
            wrong("'tuned' trains a model, which is not timed; write measure: loss alone", "matrix", "tuned")
        if self.tuning is not None and not any(self.matrix.tuned):
            wrong("'tuning' does nothing without 'tuned' in the matrix; remove it", "tuning")

    def takes(self, axis: str) -> bool:
        only = AXES[axis].only
        if only in PASSES:
            return self.pass_ in PASSES[only]
        if only == "score":
            return "score" in self.measure
        if only == "cross" and self.level != "operator":
            return self.level == "model" and "encoder-decoder" in self.matrix.architecture
        return exists(axis, self.level)

    def refuse_axis(self, name: str, *place: str | int) -> NoReturn:
        """Say at ``place`` why an axis that this sweep does not take means nothing in it, as a validation error."""
        if self.level == "pretrained":
            wrong(f"{name!r} is the trained model's own at level pretrained; remove it", *place)
        only = AXES[name].only
        if only == "score":
            wrong(f"{name!r} does nothing without measure: score; remove it", *place)
        if only in PASSES:
            wrong(f"{name!r} does nothing without pass: {any_of(PASSES[only])}; remove it", *place)
        if only == "cross" and self.level == "model":
            remedy = "remove it or write architecture: encoder-decoder"
            wrong(f"{name!r} does nothing in a model of one sequence; {remedy}", *place)
        level = {"layer": "layer", "model": "model", "task": "model", "pretrained": "pretrained"}.get(only, "operator")
        wrong(f"{name!r} does nothing at level {self.level}; remove it or write level: {level}", *place)

    def _check_training(self) -> None:
        scored = "score" in self.measure
        if scored and (self.level != "model" or self.pass_ != "training"):
            wrong("'score' is measured by training a model; write level: model and pass: training", "measure")
        if scored and set(self.measure) != {"score"}:
            wrong("'score' stands alone: what trains is not timed; put the rest into a sweep of its own", "measure")
        if scored and not self.matrix.task:
            wrong("'score' needs a task; write task: recall, say ('attnbench list tasks')", "matrix")
        if self.training is not None and not scored:
            wrong("'training' does nothing without measure: score; remove it", "training")
        if self.matrix.task and set(self.matrix.architecture) - {"encoder"}:
            wrong("a task is answered by an encoder; remove 'architecture'", "matrix", "architecture")
        if self.matrix.padding and scored:
            wrong("'padding' does nothing to a task, which has its own; remove it", "matrix", "padding")
        if self.matrix.task and self.sizes is not None and self.sizes.data.get("vocab") is not None:
            wrong("'vocab' does nothing with a task, which has its own; remove it", "model", "vocab")

    @property
    def measures(self) -> tuple[Measure, ...]:
        return tuple(measure for measure in MEASURES if measure in self.measure)
