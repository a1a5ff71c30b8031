"""Names for the shell to complete, read from the source files as text, without a command's imports."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from attnbench.errors import shell_word
from attnbench.figures.pictures import PICTURES
from attnbench.suite.shipped import shipped_suites

_PACKAGE = Path(__file__).parent.parent
_REGISTERED = re.compile(r"\n@register(?:_input|_task)?\(\s*\"([^\"]+)\"")  # ten times as fast as ^ on every line
_LAW = re.compile(r"\n@law\(\s*\"([^\"]+)\"")
_BREAKS = (":", "=")
"""Characters at which bash splits a word; it replaces the last part only."""
_KEPT = "_ATTNBENCH_KEPT"
"""Environment variable with the beginning of the completed word, which bash keeps."""


def variants(incomplete: str) -> list[str]:
    """Shipped variants with this beginning, and options after a variant's name: ``performer:features=``."""
    return _rest(incomplete, lambda typed: _with_options("catalogue/attention", typed))


def inputs(incomplete: str) -> list[str]:
    """Shipped inputs with this beginning, and their options."""
    return _rest(incomplete, lambda typed: _with_options("catalogue/inputs", typed))


def tasks(incomplete: str) -> list[str]:
    """Shipped tasks with this beginning, and their options."""
    return _rest(incomplete, lambda typed: _with_options("catalogue/tasks", typed))


def axes(incomplete: str) -> list[str]:
    """A suite's axes as ``AXIS=``, and after that variants, inputs or tasks."""
    from attnbench.suite.axes import AXES, Specs

    folders = {"variant": "catalogue/attention", "input": "catalogue/inputs", "task": "catalogue/tasks"}

    def whole(typed: str) -> Iterable[str]:
        axis, equals, value = typed.partition("=")
        if not equals:
            return [f"{name}=" for name in AXES]
        values = AXES[axis].values if axis in AXES else None
        if not isinstance(values, Specs):
            return []
        return [f"{axis}={spec}" for spec in _with_options(folders[values.kind], value)]

    return _rest(incomplete, whole)


def shapes(incomplete: str) -> list[str]:
    """Named shapes with this beginning."""
    from attnbench.suite.named_shapes import NAMED

    return [name for name in NAMED if name.startswith(incomplete)]


def suites(incomplete: str) -> list[str]:
    """Shipped suites with this beginning; for anything else the shell completes file names."""
    return [name for name in shipped_suites() if name.startswith(incomplete)]


def names(incomplete: str) -> list[str]:
    """All names that ``show`` can show."""
    every = (
        name
        for folder in ("catalogue/attention", "catalogue/inputs", "catalogue/tasks")
        for name in _found(_REGISTERED, f"{folder}/**/*.py")
    )
    return [name for name in dict.fromkeys(every) if name.startswith(incomplete)]


def laws(incomplete: str) -> list[str]:
    """The laws that ``check`` can test a variant against, each as one word of a command line."""
    return [word for name in _found(_LAW, "laws/*.py") if (word := shell_word(name)).startswith(incomplete)]


def figures(incomplete: str) -> list[str]:
    """The figures that ``plot`` can draw."""
    from attnbench.figures import FIGURES

    return sorted(name for name in FIGURES if name.startswith(incomplete))


def drawn(ctx: typer.Context, incomplete: str) -> list[str]:
    """The pictures of ``plot``, and then variants; the shell completes the names of runs."""
    given = [str(word) for word in ctx.params.get("results") or ()]
    if not given:
        return [name for name in PICTURES if name.startswith(incomplete)]
    return variants(incomplete) if given[0] in PICTURES else []


def _found(pattern: re.Pattern[str], files: str) -> Iterator[str]:
    for file in sorted(_PACKAGE.rglob(files)):
        yield from pattern.findall(file.read_text(encoding="utf-8"))


def _with_options(folder: str, typed: str) -> Iterator[str]:
    name, colon, options = typed.partition(":")
    if not colon:
        yield from _found(_REGISTERED, f"{folder}/**/*.py")
        return
    *given, _ = options.split(",")
    before = "".join(f"{option}," for option in given)
    taken = {option.partition("=")[0] for option in given}
    yield from (f"{name}:{before}{option}=" for option in _options(folder, name) if option not in taken)


def _options(folder: str, name: str) -> list[str]:
    """The keyword-only parameters of the class or function that is registered as ``name``, or of a base class."""
    for file in (_PACKAGE / folder).rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if name in _REGISTERED.findall(text):
            return _keywords(folder, text, lambda node: name in _registered_as(node))
    return []


def _keywords(folder: str, text: str, wanted: Callable[[Any], bool]) -> list[str]:
    import ast

    node: Any = next(filter(wanted, ast.parse(text).body))
    makers = [part for part in ast.walk(node) if isinstance(part, ast.FunctionDef)]
    for maker in makers:
        if maker.name in ("__init__", node.name):
            return [argument.arg for argument in maker.args.kwonlyargs]
    bases = [base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)]
    for file in (_PACKAGE / folder).rglob("*.py") if bases else ():
        text = file.read_text(encoding="utf-8")
        if f"\nclass {bases[0]}(" in text:
            return _keywords(folder, text, lambda node: getattr(node, "name", "") == bases[0])
    return []


def _registered_as(node: Any) -> list[str]:
    calls = [call for call in getattr(node, "decorator_list", ()) if getattr(call, "args", ())]
    return [getattr(call.args[0], "value", "") for call in calls]


def _rest(incomplete: str, whole: Callable[[str], Iterable[str]]) -> list[str]:
    """The completions that begin with the typed text, without the part that bash keeps."""
    kept = os.environ.get(_KEPT, "")
    found = [one[len(kept) :] for one in whole(kept + incomplete) if one.startswith(kept + incomplete)]
    if _KEPT in os.environ and len(found) == 1 and found[0].endswith("="):
        found.append(f"{found[0]}VALUE")  # bash puts a space after a word that it takes for whole
    return found


def join_words() -> None:
    """Remove the first two words of a split ``performer:fea``, and note that bash keeps them."""
    words = os.environ.get("COMP_WORDS", "").split()
    at = int(os.environ.get("COMP_CWORD") or 0)
    before, asked = words[:at], (words[at : at + 1] or [""])[0]
    kept, asked = (asked, "") if asked in _BREAKS else ("", asked)
    while before and (kept.startswith(_BREAKS) or before[-1].endswith(_BREAKS)):
        kept = before.pop() + kept
    os.environ |= {"COMP_WORDS": " ".join([*before, asked]), "COMP_CWORD": str(len(before)), _KEPT: kept}
