"""A page for every variant, and one for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from attnbench.cli.show import _EXACT, _ORDER, _RANDOM, _TARGETS, _WEIGHTS, _where, as_data, knob_text, options_of
from attnbench.contract.registry import Entry
from attnbench.contract.spec import format_scalar
from attnbench.contract.variant import FAMILIES, VARIANTS, Variant
from generators.law_numbers import of_variant as of_laws
from generators.markdown import code, formula, page, prose, source, table, text
from generators.naive_times import of_variant as of_formula
from generators.picture import pictures
from generators.reference_rows import of_variant

FORMULAS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("formulas.yaml").read_text(encoding="utf-8"))
"""Name of a variant -> its formula in LaTeX."""

ABILITIES = {
    "causal": "Causal: query i sees the keys up to i",
    "cross": "Keys from another sequence",
    "key_padding": "Padding",
    "decode": "Decoding, one token at a time",
    "bias": "A bias for each pair of positions",
    "mask": "A prefix or a sliding window",
    "documents": "Documents packed into one sequence",
    "q_start": "Queries that are the last tokens alone",
    "sink": "A sink: a logit without a key",
    "v_dim": "Values wider or narrower than keys",
    "longer": "Longer sequences than it was made for",
}


def shipped() -> list[Variant]:
    """In the order of ``attnbench list``."""
    own = [entry for entry in VARIANTS if entry.make.__module__.startswith("attnbench.")]
    return sorted(own, key=lambda entry: FAMILIES.index(entry.family))


def pages() -> Iterator[tuple[str, str]]:
    """The overview, then the variants."""
    entries = shipped()
    yield "catalogue/index.md", _overview(entries)
    for entry in entries:
        yield f"catalogue/{entry.name}.md", _page(entry)


def _overview(entries: list[Variant]) -> str:
    parts = [
        "# The catalogue",
        f"There are {len(entries)} variants. One file is one algorithm. The families are those of the survey of Tay et "
        "al. 2020. Each page has the formula, the paper, what the variant can do, its options, the laws that it is "
        "held to with their numbers, and its rows of the reference runs.",
        "*Target* says what an error number means. *softmax* approximates softmax attention of the same q, k and v, "
        "and *= softmax* equals it. *learned* approximates it after fitting. *other* is another operator, whose "
        "difference is no error. *longer* says whether a module takes longer sequences than it was made for. A dagger "
        "(†) marks a variant whose default form, causal or not, is not quite the one that the source describes.",
        "[What is not here, and why](../not-here.md) names the methods that are missing.",
    ]
    for family in FAMILIES:
        members = [entry for entry in entries if entry.family == family]
        if members:
            parts += [f"## {family.capitalize()}", table(_HEAD, [_line(entry) for entry in members])]
    names = "\n".join(entry.name for entry in entries)
    return page(*parts, f":::{{toctree}}\n:hidden:\n\n{names}\n:::")


_HEAD = ["variant", "what it is", "cost", "target", "causal", "cross", "padding", "decodes", "longer"]


def _line(entry: Variant) -> list[str]:
    traits = entry.traits
    abilities = (traits.causal, traits.cross, traits.key_padding, traits.decode, traits.longer)
    marks = ["yes" if able else "no" for able in abilities]
    target = "=\N{NO-BREAK SPACE}softmax" if traits.exact else traits.target
    return [
        f"[{entry.name}]({entry.name}.md){'†' * entry.own_form}",
        text(entry.summary),
        text(entry.cost),
        target,
        *marks,
    ]


def _page(entry: Variant) -> str:
    data = as_data(entry)
    return page(
        f"# {entry.name}{'†' * entry.own_form}",
        text(entry.summary),
        formula(FORMULAS[entry.name], entry.formula),
        table(["", ""], _facts(data)),
        "## What it can do",
        table(["", "", "why not"], [_ability(data, key) for key in ABILITIES]),
        table(["", ""], _claims(entry, data)),
        "## Which tokens it sees" if (drawn := pictures(entry)) else "",
        drawn,
        "## Options",
        options(entry),
        "## How it works" if data["description"] else "",
        prose(data["description"]),
        *(_core(entry.core) if entry.core else []),
        "## Laws that it is held to",
        f"`attnbench check {entry.name}` holds it to these laws, at the settings "
        + ", ".join(code(setting) for setting in data["settings_checked"])
        + ".",
        of_laws(entry),
        "## In the reference runs" if (measured := of_variant(entry.name)) else "",
        measured,
    )


def _core(core: Variant) -> list[str]:
    """The operator within a layer: its formula, the gates that it reads, its options."""
    data = as_data(core)
    reads = [
        [code(one["name"]), code(one["size"]), text(one["range"]), text(one["meaning"]), text(one["drawn"])]
        for one in data["reads"]
    ]
    settings = ", ".join(code(setting) for setting in data["settings_checked"])
    return [
        "## At level operator",
        f"`attnbench compare {core.name}` measures the operator within this layer, on q, k, v and the gates below. "
        f'`attnbench.build("{core.name}", shape, level="operator")` is its module.',
        text(core.formula),
        table(["gate", "size", "range", "meaning", "as it is drawn"], reads),
        options(core),
        prose(data["description"]),
        f"The laws below hold for it, too, at the settings {settings}.",
    ]


def _facts(data: dict[str, Any]) -> list[list[str]]:
    kinds = {"operator": "operator: it maps q, k and v", "mixer": "mixer: it replaces the whole attention layer"}
    claimed = [
        f"{what} grows as {_power(power)}"
        for what in ("time", "memory")
        if (power := data[f"claimed_{what}_exponent"]) is not None
    ]
    return [
        ["Source", source(data["source"])],
        ["Cost", text(f"{data['cost']}; claimed: {', '.join(claimed) or 'nothing'}")],
        *[["", text(f"{_where(where)}: {one['cost']}")] for where, one in data["given"].items() if "cost" in one],
        *([["Beside its formula", beside]] if (beside := of_formula(data["name"])) else []),
        ["Family", ", ".join([data["family"], *data["also"]])],
        ["Kind", kinds[data["kind"]]],
    ]


def _power(exponent: float) -> str:
    return {0.0: "1", 1.0: "n", 2.0: "n²", 3.0: "n³"}.get(exponent, f"n^{exponent:g}")


def _ability(data: dict[str, Any], key: str) -> list[str]:
    if data[key] is True:
        return [ABILITIES[key], "yes", ""]
    reason = "it has no causal form" if key == "decode" and data["causal"] is not True else data[key] or ""
    return [ABILITIES[key], "no", text(reason)]


def _claims(entry: Variant, data: dict[str, Any]) -> list[list[str]]:
    target = "equals softmax attention of the same q, k, v" if data["exact"] else _TARGETS[data["target"]]
    rows = [["Target", text(target)], *_instead(data, "target", _TARGETS), *_instead(data, "exact", _EXACT)]
    rows += [["Baseline", text(data["baseline"])]] if data["baseline"] else []
    own = {"": data["own_form"]} if data["own_form"] else {}
    own |= {condition: instead["own_form"] for condition, instead in data["given"].items() if "own_form" in instead}
    for condition, form in own.items():
        where = f"{_where(condition)}: " if condition else ""
        rows.append(["Own form†", text(f"{where}{form or 'as its source describes it'}")])
    for title, trait, texts in (
        ("Random", "stochastic", _RANDOM),
        ("Weights", "rows_sum_to_one", _WEIGHTS),
        ("Order of the tokens", "permutable", _ORDER),
    ):
        rows += [[title, text(texts[data[trait]])], *_instead(data, trait, texts)]
    rows.append(["Element types on a CPU", ", ".join(data["dtypes"]) or "none: it needs a GPU"])
    if data["compiled"]:
        rows.append(["Compiled", "for each shape and type at the first call, which takes seconds"])
    if data["fused"]:
        rows.append(["On a GPU", f"{code(data['fused'])} is the same in fused kernels"])
    rows += [["Equals softmax with", code(limit.replace("{n}", "n"))] for limit in data["exact_with"]]
    if data["converges_with"]:
        rows.append(["Converges", f"the squared error falls as 1 / `{data['converges_with']}`"])
    if data["knob"]:
        rows.append(["Knob of `attnbench match`", text(knob_text(data["knob"]))])
    for condition, instead in data["given"].items():
        if "knob" in instead:
            rows.append(["Knob of `attnbench match`", text(f"{_where(condition)}: {knob_text(instead['knob'])}")])
    return rows


def _instead(data: dict[str, Any], trait: str, texts: Mapping[Any, str]) -> list[list[str]]:
    given = data["given"].items()
    return [["", text(f"{_where(condition)}: {texts[one[trait]]}")] for condition, one in given if trait in one]


def options(entry: Entry) -> str:
    """The options of a variant, an input or a task as a table."""
    rows = [
        [
            code(one["name"]),
            code(one["type"]),
            "required" if one["required"] else code(_value(one["default"])),
            text(one["meaning"]),
        ]
        for one in options_of(entry)
    ]
    return table(["option", "type and bounds", "default", "meaning"], rows) if rows else "It has no options."


def _value(value: object) -> str:
    return format_scalar(value) if isinstance(value, bool | int | float | str) or value is None else str(value)
