"""What the founding documents ask for, and the command that shows each thing today."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from generators.markdown import code, page, table, text

RECORD = Path(__file__).resolve().parents[1] / "data/founding-run.json"
"""What ``python -m tests.docs.founding_run`` wrote when it ran the commands."""
STATUSES = ("full", "part", "not yet", "outside")


class Row(NamedTuple):
    """One thing that a document asks for."""

    asks: str
    status: str
    command: str = ""
    """Shows the thing, or a part of it; empty where nothing does."""
    missing: str = ""
    """What lacks, or why it cannot be measured; empty where the status is full."""
    note: str = ""
    """What a reader must know of what is shown."""


def documents() -> dict[str, list[Row]]:
    """Title of a document -> its rows."""
    read = yaml.safe_load(Path(__file__).with_name("founding.yaml").read_text(encoding="utf-8"))
    return {one["title"]: [Row(**row) for row in one["rows"]] for one in read}


def pages() -> Iterator[tuple[str, str]]:
    """One page."""
    found = documents()
    parts = [
        "# The founding documents",
        f"attnbench was made from {len(found)} documents. This page goes through them, claim by claim and picture by "
        "picture, in our words. Each row has the command that shows the thing today.",
        counts([row for rows in found.values() for row in rows]),
        ran(),
        "*part*: the command shows a part of it. *not yet*: nothing shows it. *outside*: a benchmark of attention "
        "cannot measure it. [Published claims](claims.md) has the verdicts on what the documents claim.",
    ]
    for title, rows in found.items():
        lines = [
            [str(number), text(row.asks), row.status, code(row.command), text(row.missing or row.note)]
            for number, row in enumerate(rows, start=1)
        ]
        parts += [
            f"## {title}",
            table(["", "what it asks for", "status", "command", "what is missing, or to be known"], lines),
        ]
    yield "reference/founding.md", page(*parts)


def ran() -> str:
    """When the commands were run, and how many of them as they stand."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    typed = {command: one for command, one in record.items() if "runs" not in one}
    dates = sorted({one["date"] for one in typed.values()})
    slowest = max(typed, key=lambda command: typed[command]["seconds"])
    return (
        f"{len(typed)} commands were typed as they stand here and ended as they should, between {dates[0]} and "
        f"{dates[-1]}, on two busy cores. {code(slowest)} took longest: {typed[slowest]['seconds'] / 60:.0f} minutes. "
        f"The rows of the other {len(record) - len(typed)} are those of [reference runs](runs.md), which were measured "
        "by the same suites."
    )


def counts(rows: list[Row]) -> str:
    """``79 rows: 40 full, ...``."""
    by_status = Counter(row.status for row in rows)
    told = ", ".join(f"{by_status[status]} {status}" for status in STATUSES)
    return f"{len(rows)} rows: {told}."
