"""Every key of a suite, from the models that check one, and the suites that come with attnbench."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from attnbench.contract.spec import Spec, format_scalar
from attnbench.errors import any_of
from attnbench.suite.axes import AXES
from attnbench.suite.load import shipped_descriptions
from attnbench.suite.schema import Axes, Exclude, Include, Matrix, Profiles, Rules, Size, Suite, Sweep, Tuning
from generators.markdown import code, page, table, text

_MODELS: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("The suite", Suite, "The keys at the top of the file."),
    ("A sweep", Sweep, "The keys of each entry under `sweeps`. All cells of a sweep are measured in the same way."),
    (
        "The matrix",
        Matrix,
        "The keys under `matrix`: the axes. Every combination of their values is a cell, and the axis written first "
        "varies slowest. `variant` and `seq_len` must be there.",
    ),
    ("The model", Size, "The keys under `model`, at `level: model`. Width and heads come from the matrix."),
    ("The training", Rules, "The keys under `training`, with `measure: score`."),
    ("The tuning", Tuning, "The keys under `tuning`, at `level: pretrained` with `tuned` in the matrix."),
    (
        "Profiles",
        Profiles,
        "The keys under `profiles`, of the suite or of a sweep. Each has axes, whose values replace those of the "
        "matrix on this type of device.",
    ),
    (
        "Exclude",
        Exclude,
        "The conditions of each row under `exclude`. A cell that meets all of them is left out. A list of values means "
        "any of them.",
    ),
    (
        "Include",
        Include,
        "The keys of each row under `include`: the axes, and this key. Each row adds cells, whatever `exclude` says: "
        "the cells of the matrix, with the axes of the row in place of the matrix's own.",
    ),
)
_WORDS = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text", "null": "null"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def pages() -> Iterator[tuple[str, str]]:
    """The keys, and the shipped suites."""
    schema = Suite.model_json_schema()
    parts = [
        "# Every key of a suite",
        "This page is made from the models that check a suite. [Suites](../suites.md) explains how to write one. "
        "`attnbench schema` prints the same as JSON Schema.",
    ]
    for title, model, said in _MODELS:
        parts += [f"## {title}", said]
        parts.append(table(["key", "value", "default", "meaning"], list(_keys(model, schema))))
    yield "reference/suite-keys.md", page(*parts)
    rows = [[code(name), text(said)] for name, said in shipped_descriptions().items()]
    yield (
        "reference/suites.md",
        page(
            "# The shipped suites",
            "`attnbench run NAME` measures one. `attnbench list suites` prints this list.",
            table(["suite", "what it measures"], rows),
        ),
    )


def _keys(model: type[BaseModel], schema: dict[str, Any]) -> Iterator[list[str]]:
    properties = schema["properties"] if model is Suite else schema["$defs"][model.__name__]["properties"]
    for name, field in model.model_fields.items():
        if model is Include and name in Axes.model_fields:
            continue
        key = field.alias or name
        value = _is(properties[key])
        if model is Exclude and name != "sweep":
            value = "a condition, or a list"
        default = _default(field)
        if model is Matrix and name in AXES and not AXES[name].required:
            unset = AXES[name].default
            default = (
                "none" if unset is None else code(unset.label if isinstance(unset, Spec) else format_scalar(unset))
            )
        yield [code(key), value, default, text(field.description or "")]


def _default(field: FieldInfo) -> str:
    default = field.get_default()
    if field.is_required() or default is PydanticUndefined:
        return "required"
    if default in ([], "", None) or isinstance(default, BaseModel):
        return "none"
    return code(", ".join(map(str, default)) if isinstance(default, list) else str(default))


def _is(schema: dict[str, Any]) -> str:
    """The values that a key takes, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name == "Axes":
            return "a mapping of axes"
        (title,) = (title for title, model, _ in _MODELS if model.__name__ == name)
        return f"a mapping: [{title.lower()}](#{title.lower().replace(' ', '-')})"
    if "enum" in schema:
        return any_of(["null" if one is None else f"`{one}`" for one in schema["enum"]])
    if "const" in schema:
        return code(str(schema["const"]))
    if "anyOf" in schema:
        first, second, *_ = schema["anyOf"]
        if second.get("items") == first:
            return f"{_is(first)}; or a list"
        *others, last = map(_is, schema["anyOf"])
        return f"{', '.join(others)}, or {last}"
    if schema.get("type") == "array":
        return "a list of mappings" + _is(schema["items"]).removeprefix("a mapping")
    types = schema.get("type", "object")
    named = [_WORDS.get(one, "a mapping") for one in ([types] if isinstance(types, str) else types)]
    bounds = [f"{how} {schema[key]:,}" for key, how in _BOUNDS.items() if key in schema]
    return any_of(named) + (f", {', '.join(bounds)}" if bounds else "")
