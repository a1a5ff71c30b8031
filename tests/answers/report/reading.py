"""What stands in a report, read as a browser would."""

from __future__ import annotations

import functools
from html.parser import HTMLParser
from typing import Any

import pandas as pd

from attnbench.answers.report.html_page import make_page
from attnbench.answers.report.table_rows import COLUMNS
from tests import committed

REFERENCE = committed.REFERENCE


class Read(HTMLParser):
    """Elements, text outside scripts and styles, and the rows of each section's table."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.sections: list[list[dict[str, str]]] = []
        self._heads: list[str | None] | None = None
        self._cell = self._part = ""
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.elements.append((tag, given))
        self._inside = tag if tag in ("script", "style") else self._inside
        if tag == "script":
            self.scripts.append("")
        if tag == "table" and str(given.get("id")).startswith("table-"):
            self.sections.append([])
            self._heads = []
        if self._heads is not None and tag in ("td", "th"):
            if not self.sections[-1]:
                self._heads.append(given.get("data-key"))
            else:
                row = self.sections[-1][-1]
                self._cell = self._heads[int(row["cells"])] or "bar"
                row["cells"] = str(int(row["cells"]) + 1)
                row[f"{self._cell} title"] = given.get("title") or ""
        if self._heads and tag == "tr":
            self.sections[-1].append({"cells": "0", "class": str(given.get("class"))})
        self._part = {"small": " small", "td": "", "th": ""}.get(tag, self._part)

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside
        self._part = "" if tag == "small" else self._part
        self._heads = None if tag == "table" else self._heads

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.texts.append(data)
            if self._heads is not None and self.sections[-1]:
                row, key = self.sections[-1][-1], self._cell + self._part
                row[key] = (row.get(key, "") + data).strip()

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def rows(self) -> list[dict[str, str]]:
        """Every row of every section: a column's text, ``KEY small`` and ``KEY title``; empty for none."""
        keys = [f"{key}{part}" for key in COLUMNS for part in ("", " small", " title")]
        return [dict.fromkeys(keys, "") | row for section in self.sections for row in section]


def page_of(frame: Any, **how: Any) -> str:
    return make_page(frame, **how)


@functools.cache
def rows_of(name: str) -> pd.DataFrame:
    """The rows of a committed run, not to be changed."""
    return committed.rows_of(name)


@functools.cache
def page_of_run(name: str) -> str:
    return page_of(rows_of(name))
