"""The time of a variant beside that of its formula, as its page says it."""

from __future__ import annotations

import csv
from functools import cache

from generators.markdown import ROOT, text

FILE = ROOT / "docs/data/naive.csv"
"""Written by ``python -m tests.docs.naive``, which names the columns."""


@cache
def measured() -> dict[str, dict[str, str]]:
    """Variant -> the row of the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return {row["variant"].partition(":")[0]: row for row in csv.DictReader(file)}


def of_variant(name: str) -> str:
    """One sentence with the ratio, its interval and where it was measured; empty without a row."""
    row = measured().get(name)
    if row is None:
        return ""
    ratio, low, high = (float(row[end]) for end in ("ratio", "low", "high"))
    causal = "causal, " * (row["causal"] == "true")
    options = row["variant"].partition(":")[2]
    return text(
        f"{options and f'with {options}: '}takes {ratio:.2g} ({low:.2g} to {high:.2g}) of the time of its formula "
        f"written out in plain torch: forward, n = {int(row['n'])}, {row['heads']} heads of {row['head_dim']}, "
        f"{causal}float32, {row['threads']} threads, {row['processor']}, torch {row['torch']}, {row['date']}"
    )
