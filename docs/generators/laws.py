"""The laws: what each says, how far a variant may be off, and the variants wrong on purpose that it catches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from attnbench.contract.variant import VARIANTS
from attnbench.laws import LAWS, examine
from attnbench.laws.laws import Finding
from generators.markdown import ROOT, code, page, table, text

_FAULTS = "tests/laws/test_wrong_variants.py"
_WRONG = "tests/laws/wrong_variants.py"


def anchor(name: str) -> str:
    """The anchor of a law's heading, as MyST makes it."""
    return re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-")


def faults() -> list[tuple[str, str, str, str]]:
    """Class, the variant that it says it is, the law that catches it, and words of what the law says."""
    for node in ast.parse((ROOT / _FAULTS).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FAULTS":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{_FAULTS} has no FAULTS")


def wrong() -> dict[str, str]:
    """Class -> what is wrong with it, in its docstring; empty where the name says it."""
    tree = ast.parse((ROOT / _WRONG).read_text(encoding="utf-8"))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {node.name: " ".join((ast.get_docstring(node) or "").split()) for node in classes}


def pages() -> Iterator[tuple[str, str]]:
    """One page for all laws."""
    meaning, caught = wrong(), faults()
    parts = [
        "# The laws",
        f"There are {len(LAWS)} laws. A law is something that is true of every variant that claims it. It measures a "
        "number and compares it with a bound. `attnbench check NAME` shows both. Each law has been seen to fail: "
        f"{len({one[0] for one in caught})} variants are wrong on purpose, most of them in the way in which published "
        "code was wrong. A test makes sure that the law that names its fault catches each of them.",
        "A law holds if the number is at or below the bound. The bounds here are those of one variant, at the first "
        "setting at which it is checked. Another variant may have another element type, and with it another bound. "
        "The page of each variant in [the catalogue](../catalogue/index.md) has its own numbers and bounds.",
        table(
            ["law", "what it says", "bound"],
            [
                [f"[{law.name}](#{anchor(law.name)})", text(law.sentence), _bound(law.name, caught)]
                for law in LAWS.values()
            ],
        ),
    ]
    for law in LAWS.values():
        parts += [f"## {law.name}", text(law.sentence)]
        if law.needs_time:
            parts.append("It measures time, and needs a quiet machine. `--no-time` leaves it out.")
        if law.vital:
            parts.append("If it is broken, no other law is tried.")
        rows = [
            [code(name), text(meaning[name] or _spoken(name)), code(label), text(words)]
            for name, label, one, words in caught
            if one == law.name
        ]
        parts.append(table(["wrong variant", "what is wrong with it", "it says it is", "words of the message"], rows))
    yield "reference/laws.md", page(*parts)


def _spoken(name: str) -> str:
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+", name)).capitalize() + "."


def _bound(law: str, caught: list[tuple[str, str, str, str]]) -> str:
    """The bound for the true variant that the wrong one imitates, in the first case that the law measures."""
    if LAWS[law].needs_time:
        return "the claimed power of n, with room for noise"
    label = next(label for _, label, one, _ in caught if one == law)
    bounds = list(dict.fromkeys(one.bound for one in _first(law, label.partition(":")[0]) if one.bound is not None))
    return ", ".join(f"{bound:.3g}" for bound in bounds) or "-"


def _first(law: str, name: str) -> list[Finding]:
    found: list[Finding] = []
    for finding in examine(law, VARIANTS.get(name)):
        if found and finding.case != found[0].case:
            break
        found.append(finding)
    return found
