"""``attnbench show NAME``: paper, formula, cost, traits and every option of a variant, an input or a task."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnbench.cli import completion
from attnbench.cli.options import AsJson, File, Plugins
from attnbench.cli.screen import console
from attnbench.cli.screen.outputs import refuse_files
from attnbench.contract.reads import DRAWN, Read
from attnbench.contract.spec import Spec
from attnbench.contract.traits import ABILITIES, Knob, Rounds, Traits
from attnbench.results.frame.marks import OWN_FORM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnbench.contract.registry import Entry, Registry
    from attnbench.contract.task import TaskEntry
    from attnbench.contract.variant import Variant


def show(
    name: Annotated[str, typer.Argument(help="A variant, an input or a task.", autocompletion=completion.names)],
    plugin: Plugins = None,
    as_json: AsJson = False,
    picture: Annotated[
        Path | None, File(help="Also draw which keys each query sees, to this .svg, .png or .pdf.")
    ] = None,
) -> None:
    """Show a variant with its paper, formula, cost, claims and options, or an input, or a task."""
    tables = registries(plugin or ())
    if picture is not None:
        refuse_files(plot=picture, option="--picture")
        from attnbench.figures.kit.style import save
        from attnbench.figures.pictures import draw

        save(draw("pattern", [name]).figure, picture.with_suffix(""), (picture.suffix[1:],))
    data, *others = [facts(one, name) for one in tables if name in one] or [facts(tables[0], name)]
    if others and "family" not in data:  # listops is an input and a task
        data["task"] = others[0]
    if as_json:
        console.data(data)
    else:
        _print(data, console.width())
        if "task" in data:
            console.line()
            _print(data["task"], console.width())


Facts = dict[str, Any]
"""Everything that is known about an entry, as plain data."""


def registries(plugins: Sequence[str] = ()) -> list[Registry[Any]]:
    """The tables of variants, inputs and tasks, with those of plug-ins in them."""
    from attnbench.contract.inputs import INPUTS
    from attnbench.contract.task import TASKS
    from attnbench.contract.variant import VARIANTS

    if plugins:
        from attnbench.harness.trial import load_all

        load_all(plugins)
    return [VARIANTS, INPUTS, TASKS]


def facts(registry: Registry[Any], name: str) -> Facts:
    """The facts of an entry, from the index if that has them; UsageError if there is no such name."""
    known = registry.indexed().get(name) or told(registry, registry.get(name))
    return {key: one for key, one in known.items() if key != "hidden"}


def everything(registry: Registry[Any]) -> list[Facts]:
    """The facts of each entry that lists show, in their order."""
    known = [dict(one) for one in registry.indexed().values() if "hidden" not in one]
    return known or [told(registry, entry) for entry in registry]


def told(registry: Registry[Any], entry: Any) -> Facts:
    """The facts of an entry of one of the tables."""
    tell: dict[str, Callable[[Any], Facts]] = {"variant": as_data, "task": task_data}
    return tell.get(registry.kind, input_data)(entry)


def input_data(entry: Entry) -> Facts:
    """Everything that is known about an input, as plain data."""
    return {"name": entry.name, "summary": entry.summary, "options": options_of(entry)}


def task_data(entry: TaskEntry) -> Facts:
    """Everything that is known about a task, as plain data."""
    return {
        "name": entry.name,
        "kind": "task",
        "summary": entry.summary,
        "source": entry.source,
        "licence": entry.licence,
        "options": options_of(entry),
        "description": _description(entry),
    }


def options_of(entry: Entry) -> list[dict[str, Any]]:
    """Name, type, default, bounds and meaning of each option."""
    schema = entry.options_model.model_json_schema().get("properties", {})
    rows = []
    for name, field in entry.options.items():
        required = field.is_required()
        default = {"default": None if required else field.default, "required": required}
        meaning = ": ".join([*(mark for option, mark in entry.needs if option == name), field.description or ""])
        rows.append({"name": name, "type": _type_of(schema[name]), **default, "meaning": meaning})
    return rows


def _type_of(schema: dict[str, Any]) -> str:
    """``int >= 1, <= 64``, ``a | b`` for choices, ``int | none``."""
    if "anyOf" in schema:
        return " | ".join(_type_of(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    words = {"integer": "int", "number": "float", "boolean": "true | false", "string": "text", "null": "none"}
    bounds = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
    given = [f"{sign} {schema[key]}" for key, sign in bounds if key in schema]
    return " ".join([words.get(schema.get("type", ""), "any"), ", ".join(given)]).strip()


_OF_ENTRY = ("name", "family", "also", "year", "kind", "summary", "source", "formula", "cost")
_TRAITS = (
    *("target", "baseline", "own_form", "reads_ahead", "exact", "stochastic", "rows_sum_to_one", "heads_apart"),
    *("permutable", "compiled", "rounds_together", "emulated"),
)
"""Traits that are plain data."""


def as_data(entry: Variant) -> Facts:
    """Everything that is known about a variant, as plain data."""
    traits = entry.traits
    abilities = {key: getattr(traits, key) is True or str(getattr(traits, key)) for key in ABILITIES}
    return {
        **{name: getattr(entry, name) for name in _OF_ENTRY},
        "claimed_time_exponent": entry.time_exponent,
        "claimed_memory_exponent": entry.memory_exponent,
        **{name: getattr(traits, name) for name in _TRAITS},
        "own_form_by_default": not any(one.is_required() for one in entry.options.values()) and entry.own_form,
        "given": {condition: _plain(instead) for condition, instead in traits.given},
        "dtypes": list(traits.dtypes),
        "fused": fused.label if (fused := entry.fused_as(Spec(entry.name))) else "",
        "rounds": asdict(traits.rounds) if traits.rounds else None,
        "exact_with": list(traits.exact_with),
        "converges_with": traits.converges_with or None,
        "knob": None if traits.knob is None else asdict(traits.knob),
        "settings_checked": [setting or "defaults" for setting in entry.settings],
        **abilities,
        "options": options_of(entry),
        "description": _description(entry),
        "reads": _gates(traits.reads),
        "operator": None if entry.core is None else as_data(entry.core),
    }


def _description(entry: Entry) -> str:
    import inspect

    # Not getdoc, which finds nn.Module's docstring if a plug-in has none.
    _, _, rest = inspect.cleandoc(entry.make.__doc__ or "").partition("\n")
    return rest.strip()


_TARGETS = {
    "softmax": "softmax: approximates softmax attention of the same q, k, v",
    "learned": "learned: approximates softmax attention only after fitting; an error before that means nothing",
    "other": "other: another operator; a difference from softmax is a distance, not an error",
}


_MOST = 100
"""Most characters in a line of prose: longer lines are hard to read on a wide terminal."""


def _print(data: dict[str, Any], width: int) -> None:
    console.heading(prose(f"{data['name']}: {data['summary']}", width))
    if "family" in data:
        console.table(["", ""], _facts(data))
    elif "licence" in data:
        facts = [("task", "to train on: task: " + data["name"]), ("source", data["source"])]
        console.table(["", ""], facts + [("licence", data["licence"])] * bool(data["licence"]))
    _print_options(data["options"])
    if data.get("description"):
        console.line()
        console.line(prose(data["description"], min(width, _MOST)))
    if core := data.get("operator"):
        console.line()
        console.heading(prose(f"{data['name']} at level operator: {core['summary']}", width))
        rows = [("formula", core["formula"])]
        for one in core["reads"]:
            rows.append((one["name"], f"{one['size']}{one['range'] and ', '}{one['range']}: {one['meaning']}"))
            rows.append(("", f"drawn: {one['drawn']}"))
        console.table(["", ""], [*rows, ("checked at", "; ".join(core["settings_checked"]))])
        _print_options(core["options"])
        console.line()
        console.line(prose(core["description"], min(width, _MOST)))


def _print_options(options: list[dict[str, Any]]) -> None:
    if options:
        rows = [
            [o["name"], "required" if o["required"] else _text(o["default"]), o["type"], o["meaning"]] for o in options
        ]
        console.table(["option", "default", "type", "meaning"], rows, title="\noptions")


def _facts(data: dict[str, Any]) -> list[tuple[str, str]]:
    target = "softmax: equals softmax attention of the same q, k, v" if data["exact"] else _TARGETS[data["target"]]
    claims = [f"{what} ~ {_power(power)}" for what in _GROWN if (power := data[f"claimed_{what}_exponent"]) is not None]
    facts = [
        ("family", f"{', '.join([data['family'], *data['also']])} ({data['kind']})"),
        ("source", data["source"]),
        ("formula", data["formula"]),
        ("cost", f"{data['cost']}; claimed: {', '.join(claims) or 'nothing'}"),
    ]
    facts += _under("", _instead(data, "cost", str))
    facts += _under("target", [target, *_instead(data, "target", _TARGETS.__getitem__)])
    facts += _under("", _instead(data, "exact", _EXACT.__getitem__))
    if data["baseline"]:
        facts.append(("baseline", data["baseline"]))
    own_form = _instead(data, "own_form", lambda form: form or "as its source describes it")
    facts += _under(f"own form{OWN_FORM}", [*filter(None, [data["own_form"]]), *own_form])
    for key in ABILITIES:
        facts.append((key.partition("_")[2] or key, _ability(data, key)))
    told: list[tuple[str, str, Mapping[Any, str]]] = [
        ("random", "stochastic", _RANDOM),
        ("weights", "rows_sum_to_one", _WEIGHTS),
        ("order", "permutable", _ORDER),
    ]
    for word, trait, texts in told:
        facts += _under(word, [texts[data[trait]], *_instead(data, trait, texts.__getitem__)])
    if data["dtypes"] != list(Traits().dtypes):
        facts.append(("dtypes", f"{', '.join(data['dtypes'])} on a CPU"))
    if data["compiled"]:
        facts.append(("compiled", "for each shape and dtype at the first call, in seconds"))
    if data["fused"]:
        facts.append(("on a GPU", f"{data['fused']} is the same in fused kernels"))
    if data["rounds_together"]:
        facts.append(("rounding", "several tokens share a scale: one that is hidden moves how others are rounded"))
    if data["emulated"]:
        facts.append(("measured", f"errors and scores; no time or memory: {data['emulated']}"))
    facts += [("exact with", limit.replace("{n}", "n")) for limit in data["exact_with"]]
    if data["converges_with"]:
        facts.append(("converges", f"the squared error falls as 1/{data['converges_with']}"))
    knob = [knob_text(data["knob"])] if data["knob"] else []
    facts += _under("knob", [*knob, *_instead(data, "knob", knob_text)])
    facts.append(("checked at", "; ".join(data["settings_checked"])))
    return facts


def _instead(data: dict[str, Any], trait: str, said: Callable[[Any], str]) -> list[str]:
    """A line for each condition under which a claim is another one, with the words for it."""
    given = data["given"].items()
    return [f"{_where(condition)}: {said(instead[trait])}" for condition, instead in given if trait in instead]


def _under(word: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip([word, *[""] * len(lines)], lines, strict=False))


def knob_text(knob: Mapping[str, Any] | None) -> str:
    """The knob of ``attnbench match``, in words."""
    if knob is None:
        return "none"
    way = "a smaller value costs more" if knob["falling"] else "a larger value costs more"
    return f"{knob['option']}: {way}, in steps of {knob['step']}"


def _gates(reads: Iterable[Read]) -> list[dict[str, str]]:
    return [
        {"name": one.name, "size": one.size, "range": one.range, "meaning": one.meaning, "drawn": DRAWN[one.how]}
        for one in reads
    ]


def _plain(instead: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: asdict(claim) if isinstance(claim, Knob | Rounds) else claim for name, claim in instead.items()}
    return plain | ({"reads": _gates(instead["reads"])} if "reads" in instead else {})


def _where(condition: str) -> str:
    shape = {"causal=true": "causal", "causal=false": "not causal"}
    return ", ".join(shape.get(part, f"with {part}") for part in condition.split(","))


_EXACT = {True: "equals softmax attention", False: "approximates softmax attention"}
_RANDOM = {True: "yes, drawn once from the seed", False: "no"}
_WEIGHTS = {
    True: "sum to 1: the output is an average of the values",
    False: "need not sum to 1",
}
_ORDER = {
    None: "not known whether the output depends on where a token stands",
    True: "does not matter: permuted tokens give the permuted output",
    False: "matters: the output depends on where a token stands",
}


_GROWN = ("time", "memory")


def _power(exponent: float) -> str:
    return {0.0: "1", 1.0: "n", 2.0: "n²", 3.0: "n³"}.get(exponent, f"n^{exponent:g}")


def _ability(data: dict[str, Any], key: str) -> str:
    if data[key] is True:
        return "yes"
    if key == "decode" and data["causal"] is not True:
        return "no: it has no causal form"
    return f"no: {data[key]}" if data[key] else "no"


def _text(value: object) -> str:
    from attnbench.contract.spec import format_scalar

    return format_scalar(value) if isinstance(value, bool | int | float | str) or value is None else str(value)


_ROLE = re.compile(r":\w+:`~?(?:[^`]*\.)?([^`.]+)`")
_CODE = re.compile(r"``([^`]+)``")
_TOGETHER = 24
"""Code of up to this many characters, such as a shape, stays on one line."""
_HARD = "\N{NO-BREAK SPACE}"
_SECTION = re.compile(r"(Args|Returns|Raises):$")


def prose(text: str, width: int) -> str:
    """``text`` of ``inspect.getdoc`` in lines of at most ``width`` characters if its words allow that."""
    plain = _CODE.sub(_unmarked, _ROLE.sub(r"\1", text))
    blocks = re.split(r"\n\s*\n", plain.strip("\n"))
    return "\n\n".join("\n".join(_filled(block, width)) for block in blocks).replace(_HARD, " ")


def _unmarked(code: re.Match[str]) -> str:
    return code[1].replace(" ", _HARD) if len(code[1]) <= _TOGETHER else code[1]


def _filled(block: str, width: int) -> Iterator[str]:
    for first, later, line in _items(block):
        yield fill(
            line,
            width,
            initial_indent=" " * first,
            subsequent_indent=" " * later,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _items(block: str) -> list[tuple[int, int, str]]:
    items: list[tuple[int, int, str]] = []
    in_section = False
    for raw in block.splitlines():
        line = raw.strip()
        indent = len(raw) - len(raw.lstrip())
        if not items or line.startswith("- ") or (in_section and indent == 4) or indent < items[-1][0]:
            hanging = 2 if line.startswith("- ") else 4 if in_section else 0
            items.append((indent, indent + hanging, line))
        elif items[-1][2].startswith("- ") and indent <= items[-1][0]:
            items.append((indent, indent, line))
        else:
            first, later, begun = items[-1]
            items[-1] = (first, later, f"{begun} {line}")
        in_section = in_section or bool(_SECTION.match(line))
    return items
