"""How a figure in README.md and docs/ is made from a committed run, and which pages there are."""

from __future__ import annotations

import csv
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from attnbench.measure.machine import processor
from tests.committed import rows_of

HERE = Path(__file__).resolve().parents[2]
RUNS = HERE / "results/reference"
GENERATED = ("catalogue", "commands", "reference")
"""Folders below docs/ that ``make docs`` writes, and git ignores."""


def written_pages() -> list[Path]:
    """README.md and its like, and the pages of docs/ that somebody wrote."""
    docs = HERE / "docs"
    beside = [HERE / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
    return [*beside, *sorted(p for p in docs.rglob("*.md") if p.relative_to(docs).parts[0] not in GENERATED)]


PAGES = written_pages()
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def label(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def file(self) -> str:
        """The name of the file that it is; empty if it is none."""
        if self.text.startswith("# source: "):
            return "figure3.csv"
        if self.text.startswith("name,shape,"):
            return "shapes.csv"
        if self.language == "python":
            return found[1] if (found := re.match(r"# (\w+\.py)\n", self.text)) else ""
        named = re.search(r"^name: (\S+)", self.text, re.MULTILINE)
        return f"{named[1] if named else 'suite'}.yaml" if self.language == "yaml" else ""

    @property
    def commands(self) -> list[str]:
        """Its command lines, without a prompt and variables before them."""
        whole = self.text.replace("\\\n", " ")
        return re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*((?:attnbench|make|python|pip) .*)$", whole, re.MULTILINE)


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    found = FENCE.finditer(text)
    return [Block(page, text.count("\n", 0, one.start()) + 1, one[2], textwrap.dedent(one[3])) for one in found]


BLOCKS = [block for page in PAGES for block in blocks(page)]
MARK = re.compile(r"<!-- rows: ([\w-]+) -->\n(.*?)<!-- end of rows -->", re.DOTALL)
PRINTED = re.compile(r"<!-- printed: (\S+) -->\n+```\n(.*?)```", re.DOTALL)
ROWS: dict[str, Callable[[], str]] = {}

Maker = Callable[[], str]
Row = dict[str, str]
"""A row of ``docs/data``, which a script of this folder measures."""


def stored(file: Path) -> list[Row]:
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines())) if file.exists() else []


def store(file: Path, columns: Sequence[str], measured: Iterable[Row]) -> None:
    with file.open("w", encoding="utf-8", newline="") as target:
        writer = csv.DictWriter(target, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(measured)


def here() -> Row:
    """With what, on what and when a row is measured."""
    return {"torch": torch.__version__, "processor": processor(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}


def rows(maker: Maker) -> Maker:
    """A function whose result stands in the pages under its name."""
    ROWS[maker.__name__.replace("_", "-")] = maker
    return maker


@cache
def run(name: str) -> pd.DataFrame:
    """The rows of a committed run that have numbers."""
    frame = rows_of(name)
    return frame[frame["status"] == "ok"]


def made(name: str) -> str:
    """``2026-11-21, torch 2.13.0``: when and with what a run was made."""
    environment = json.loads((RUNS / name / "environment.json").read_text(encoding="utf-8"))
    torch = run(name)["torch_version"].iloc[0].partition("+")[0]
    return f"{environment['started_at'][:10]}, torch {torch}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines)) + "\n"


def points(*texts: str) -> str:
    """A Markdown list in lines of 120 characters."""
    how = {"initial_indent": "- ", "subsequent_indent": "  ", "break_on_hyphens": False}
    return "".join(textwrap.fill(text, 120, **how) + "\n" for text in texts)


def digits(value: float, count: int = 2) -> str:
    """``value`` to ``count`` digits, without an exponent and without zeros that say nothing."""
    if not math.isfinite(value):
        return "–"
    return f"{value:.{max(0, count - 1 - math.floor(math.log10(abs(value))))}f}" if value else "0"
