"""The numbers of the laws that the pages of the catalogue show: one row for each law of each shipped variant.

``python -m tests.docs.laws`` checks the variants of which the file lacks a law. With names it checks those anew, and
with ``all`` every one; words after ``--law`` are the only laws that are looked at. It keeps the worst that
``attnbench check --json`` finds over all settings.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from attnbench.cli.check import _worst
from attnbench.contract.variant import VARIANTS
from attnbench.laws import LAWS, Finding, laws_of
from tests.docs.making import HERE, Row, here, store, stored

FILE = HERE / "docs/data/laws.csv"
COLUMNS = ("variant", "law", "number", "bound", "setting", "note", "torch", "processor", "date")
AT_ONCE = 8
"""Variants in one process."""
NOTHING = "its small shapes leave nothing to measure"
"""Note of a law that applies, and found nothing in any setting: shapes that cannot be traced, say."""


def shipped() -> list[str]:
    return [entry.name for entry in VARIANTS if entry.make.__module__.startswith("attnbench.")]


def read() -> list[Row]:
    """The rows of the file; none where there is no file."""
    return stored(FILE)


def lacking(rows: Iterable[Row]) -> list[str]:
    """Shipped variants whose laws are not those of the rows."""
    known: dict[str, list[str]] = {}
    for row in rows:
        known.setdefault(row["variant"], []).append(row["law"])
    return [name for name in shipped() if known.get(name) != laws_of(VARIANTS.get(name))]


def rows_of(report: Mapping[str, Any], only: Collection[str] = ()) -> list[Row]:
    """A row for each law that applies to the variant of a report: the finding that is nearest to its bound.

    Args:
        only: the laws that were looked at; all where there are none.

    Raises:
        ValueError: the variant was not checked, or breaks a law.
    """
    name = str(report["variant"])
    if not report.get("held"):
        raise ValueError(f"{name}: {report.get('unsupported', 'it breaks a law; attnbench check says which')}")
    findings = [Finding(**one) for one in report["findings"]]
    rows = []
    for law in laws_of(VARIANTS.get(name)):
        if only and law not in only:
            continue
        found = [one for one in findings if one.law == law]
        worst = _worst(found) if found else Finding(law, "", True, skipped=NOTHING)
        rows.append(
            {
                "variant": name,
                "law": law,
                "number": _digits(worst.number),
                "bound": _digits(worst.bound),
                "setting": worst.case if worst.number is not None else "",
                "note": worst.skipped,
            }
        )
    return rows


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def check(names: Iterable[str], only: Collection[str] = ()) -> tuple[list[Row], list[str]]:
    """What ``attnbench check`` finds for these variants here and now, and what keeps others from having rows."""
    command = [sys.executable, "-m", "attnbench", "check", *names, "--json", "--threads", "1"]
    command += [word for law in only for word in ("--law", law)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: a law is broken, and rows_of says of which variant
        raise SystemExit(done.returncode)
    rows, refused = [], []
    for report in json.loads(done.stdout):
        try:
            rows += [row | here() for row in rows_of(report, only)]
        except ValueError as error:
            refused.append(str(error))
    return rows, refused


def write(rows: Iterable[Row]) -> None:
    """The rows, variants and laws in the order shown to users."""
    order = {(name, law): (i, j) for i, name in enumerate(shipped()) for j, law in enumerate(LAWS)}
    store(FILE, COLUMNS, sorted((row for row in rows if _place(row) in order), key=lambda row: order[_place(row)]))


def _place(row: Row) -> tuple[str, str]:
    return row["variant"], row["law"]


def main(words: list[str]) -> None:
    """Check and write a few variants at a time, so that a stop loses little."""
    end = words.index("--law") if "--law" in words else len(words)
    names, only = words[:end], words[end + 1 :]
    wanted = shipped() if names == ["all"] else names or lacking(read())
    broken = []
    for start in range(0, len(wanted), AT_ONCE):
        few = wanted[start : start + AT_ONCE]
        rows, refused = check(few, only)
        measured = {(row["variant"], row["law"] if only else "") for row in rows}
        write([*(row for row in read() if (row["variant"], row["law"] if only else "") not in measured), *rows])
        broken += refused
    if broken:
        raise SystemExit("\n".join(broken))


if __name__ == "__main__":
    main(sys.argv[1:])
