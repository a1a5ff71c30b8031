"""``attnbench list``: everything that can be measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from attnbench.cli.options import AsJson, File, Plugins
from attnbench.cli.screen import console
from attnbench.errors import UsageError
from attnbench.results.frame.marks import name_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnbench.cli.show import Facts


def list_(
    what: Annotated[
        Literal["variants", "suites", "inputs", "tasks"], typer.Argument(help="What to list.")
    ] = "variants",
    file: Annotated[Path | None, File(help="With inputs: what this file of captured q, k and v holds.")] = None,
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """List the variants by family, or the suites, the inputs, or the tasks to train on.

    attnbench list inputs --file FILE says what a file of attnbench capture holds.
    """
    if file is not None:
        _file(what, file, as_json)
        return
    if what == "suites":
        _suites(as_json)
        return

    from attnbench.cli.show import everything, registries

    tables = dict(zip(("variants", "inputs", "tasks"), registries(plugin or ()), strict=True))
    entries = everything(tables[what])
    if what == "variants":
        _variants(entries, as_json)
    else:
        _with_options(what.removesuffix("s"), entries, as_json)


def _suites(as_json: bool) -> None:
    from attnbench.suite.load import shipped_descriptions

    rows = [{"name": name, "description": text} for name, text in shipped_descriptions().items()]
    if as_json:
        console.data(rows)
    else:
        console.table(["suite", "what it measures"], [[row["name"], row["description"]] for row in rows])
        console.note("a suite that names no table or package stands beside none")


def _file(what: str, file: Path, as_json: bool) -> None:
    from attnbench.catalogue.inputs.captured_qkv import describe

    if what != "inputs":
        raise UsageError(f"--file says what an input holds; write: attnbench list inputs --file {file}")
    found = describe(file)
    if as_json:
        sizes = {"shape": list(found.sizes["q"]), "kv_heads": found.sizes["k"][2]}
        console.data({"file": str(file), **sizes, **found.about})
        return
    from attnbench.cli.capture import print_described

    print_described(file, found)


def _with_options(what: str, entries: Iterable[Facts], as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {"name": entry["name"], "summary": entry["summary"], "options": [one["name"] for one in entry["options"]]}
        for entry in entries
    ]
    if as_json:
        console.data(rows)
    else:
        table = [[row["name"], ", ".join(row["options"]), row["summary"]] for row in rows]
        console.table([what, "options", "what it is"], table)


def _variants(entries: Iterable[Facts], as_json: bool) -> None:
    from attnbench.contract.rules import FAMILIES

    entries = sorted(entries, key=lambda entry: FAMILIES.index(entry["family"]))
    if as_json:
        console.data(entries)
        return
    rows = []
    family = ""
    for entry in entries:
        if entry["family"] != family:
            family = entry["family"]
            rows.append([family.upper(), *[""] * 7])
        sign = "=" if entry["exact"] else "" if entry["longer"] is True else "≤"
        marks = ["yes" if entry[one] is True else "-" for one in ("causal", "cross", "key_padding", "decode")]
        name, cost = f" {name_text(entry['name'], entry['own_form_by_default'])}", entry["cost"].replace(" + ", "+")
        rows.append([name, cost, entry["target"], sign, *marks])
    console.table(["variant", "cost", "target", "", "causal", "cross", "pad", "decode"], rows)
    console.mark_notes(row[0] for row in rows)
    inside = ", ".join(entry["name"] for entry in entries if entry["operator"])
    console.note(
        "target: softmax approximates softmax attention (= equals it), learned does so\n"
        "after fitting, other is another operator, whose difference is no error\n"
        "≤: takes no longer sequences than it was made for\n"
        f"layers with an operator within, which level operator measures: {inside}\n"
        f"{len(entries)} variants; attnbench show NAME says what each one is"
    )
