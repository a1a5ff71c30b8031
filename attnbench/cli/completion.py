"""Names for the shell to complete, read from the index of the catalogue and from source files, without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import typer

from attnbench.contract.index import read
from attnbench.errors import shell_word
from attnbench.figures.pictures import PICTURES
from attnbench.suite.shipped import shipped_suites

_PACKAGE = Path(__file__).parent.parent
_LAW = re.compile(r"\n@law\(\s*\"([^\"]+)\"")  # ten times as fast as ^ on every line
_BREAKS = (":", "=")
"""Characters at which bash splits a word; it replaces the last part only."""
_KEPT = "_ATTNBENCH_KEPT"
"""Environment variable with the beginning of the completed word, which bash keeps."""


def variants(incomplete: str) -> list[str]:
    """Shipped variants with this beginning, and options after a variant's name: ``performer:features=``."""
    return _rest(incomplete, lambda typed: _with_options("variant", typed))


def inputs(incomplete: str) -> list[str]:
    """Shipped inputs with this beginning, and their options."""
    return _rest(incomplete, lambda typed: _with_options("input", typed))


def tasks(incomplete: str) -> list[str]:
    """Shipped tasks with this beginning, and their options."""
    return _rest(incomplete, lambda typed: _with_options("task", typed))


def axes(incomplete: str) -> list[str]:
    """A suite's axes as ``AXIS=``, and after that variants, inputs or tasks."""
    from attnbench.suite.axes import AXES, Specs

    def whole(typed: str) -> Iterable[str]:
        axis, equals, value = typed.partition("=")
        if not equals:
            return [f"{name}=" for name in AXES]
        values = AXES[axis].values if axis in AXES else None
        if not isinstance(values, Specs):
            return []
        return [f"{axis}={spec}" for spec in _with_options(values.kind, value)]

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
    every = (name for kind in ("variant", "input", "task") for name in _with_options(kind, ""))
    return [name for name in dict.fromkeys(every) if name.startswith(incomplete)]


def laws(incomplete: str) -> list[str]:
    """The laws that ``check`` can test a variant against, each as one word of a command line."""
    texts = (file.read_text(encoding="utf-8") for file in sorted((_PACKAGE / "laws").glob("*.py")))
    words = (shell_word(name) for text in texts for name in _LAW.findall(text))
    return [word for word in words if word.startswith(incomplete)]


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


def _with_options(kind: str, typed: str) -> Iterator[str]:
    known = read().get(kind, {})
    name, colon, options = typed.partition(":")
    if not colon:
        yield from (one for one, facts in known.items() if "hidden" not in facts)
        return
    *given, _ = options.split(",")
    before = "".join(f"{option}," for option in given)
    taken = {option.partition("=")[0] for option in given}
    there = [one["name"] for one in known[name]["options"]] if name in known else []
    yield from (f"{name}:{before}{option}=" for option in there if option not in taken)


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
