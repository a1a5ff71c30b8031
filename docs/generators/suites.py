"""Every key of a suite, from the models that check one, and the suites that come with attnbench."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from attnbench.suite.load import shipped_descriptions
from attnbench.suite.schema import AXES, Axes, Exclude, Include, Matrix, Profiles, Rules, Size, Suite, Sweep
from generators.markdown import code, page, table, text, words

_MODELS: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("The suite", Suite, "The keys at the top of the file."),
    ("A sweep", Sweep, "The keys of each entry under `sweeps`."),
    ("The matrix", Matrix, "The keys under `matrix`: the axes. Give one value or a list. Two axes must be there."),
    ("The model", Size, "The keys under `model`, at `level: model`."),
    ("The training", Rules, "The keys under `training`, with `measure: score`."),
    ("Profiles", Profiles, "The keys under `profiles`, of the suite or of a sweep; under each of them stand axes."),
    ("Exclude", Exclude, "The conditions of each row under `exclude`. A cell that meets all of them is left out."),
    ("Include", Include, "The keys of each row under `include`: the axes, and these."),
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
        parts += [f"## {title}", said, words(" ".join((inspect.getdoc(model) or "").split()))]
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
        value = _is(properties[key], schema)
        if model is Exclude and name in AXES:
            value = "a condition, or a list of them"
        yield [code(key), text(value), _default(name, field), text(field.description or "")]


def _default(name: str, field: FieldInfo) -> str:
    default = field.get_default()
    if field.is_required() or default is PydanticUndefined:
        return "required"
    if default in ([], "", None) or isinstance(default, BaseModel):
        return "none"
    return code(", ".join(map(str, default)) if isinstance(default, list) else str(default))


def _is(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """The values that a key takes, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        titles = {model.__name__: title for title, model, _ in _MODELS}
        return "a mapping of axes" if name == "Axes" else f"a mapping: see {titles[name]}"
    if "enum" in schema:
        return ", ".join("null" if one is None else str(one) for one in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_is(one, root) for one in schema["anyOf"]))
    if schema.get("type") == "array":
        return f"a list of {_is(schema['items'], root)}" if schema.get("items") else "a list"
    types = schema.get("type", "object")
    named = [_WORDS.get(one, "a mapping") for one in ([types] if isinstance(types, str) else types)]
    bounds = [f"{how} {schema[key]:g}" for key, how in _BOUNDS.items() if key in schema]
    return " or ".join(named) + (f", {', '.join(bounds)}" if bounds else "")
