"""The laws that a variant is held to, with the number that each measured and its bound."""

from __future__ import annotations

import csv
from functools import cache

from attnbench.contract.variant import Variant
from attnbench.laws import LAWS, laws_of
from generators.laws import anchor
from generators.markdown import ROOT, table, text

FILE = ROOT / "docs/data/laws.csv"
"""Written by ``python -m tests.docs.laws``, which names the columns."""


@cache
def measured() -> dict[tuple[str, str], dict[str, str]]:
    """Variant and law -> the row of the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return {(row["variant"], row["law"]): row for row in csv.DictReader(file)}


def of_variant(entry: Variant) -> str:
    """A table of its laws, and where the numbers come from."""
    rows = {law: measured().get((entry.name, law), {}) for law in laws_of(entry)}
    lines = [
        [_link(law), _says(law, row), row.get("number") or "-", row.get("bound") or "-"] for law, row in rows.items()
    ]
    known = next((row for row in rows.values() if row), None)
    parts = [table(["law", "what it says", "number", "bound"], lines)]
    if known is not None:
        dates = " and ".join(sorted({row["date"] for row in rows.values() if row}))
        parts.append(
            f"The numbers are those of `attnbench check {entry.name}` on {text(known['processor'])} with torch "
            f"{text(known['torch'])}, {dates}. Of all settings, each number is the one that came nearest to "
            "its bound. A law holds where the number is not above the bound.\n"
        )
    return "\n".join(parts)


def _link(law: str) -> str:
    return f"[{law}](../reference/laws.md#{anchor(law)})"


def _says(law: str, row: dict[str, str]) -> str:
    note = row.get("note", "")
    return text(LAWS[law].sentence + (f" (Not measured: {note.rstrip('.')}.)" if note else ""))
