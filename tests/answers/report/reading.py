"""What stands in a report, read as a browser would."""

from __future__ import annotations

import functools
import json
from html.parser import HTMLParser
from typing import Any

import pandas as pd

from attnbench.answers.report.page import make_page
from attnbench.answers.report.sources import of_frame
from tests import committed

REFERENCE = committed.REFERENCE


class Read(HTMLParser):
    """Elements, text outside scripts and styles, and the JSON of the rows."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else self._inside
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def data(self) -> dict[str, Any]:
        (found,) = [text for text in self.scripts if text.startswith('{"families"')]
        return dict(json.loads(found))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every row of every section, with all columns."""
        return [
            {name: row[k] if k < len(row) else None for k, name in enumerate(section["columns"])}
            | {"about": section["abouts"][row[section["columns"].index("about")]]}
            for section in self.data["sections"]
            for row in section["rows"]
        ]


def page_of(frame: Any, **how: Any) -> str:
    return make_page(of_frame(frame), **how)


@functools.cache
def rows_of(name: str) -> pd.DataFrame:
    """The rows of a committed run, not to be changed."""
    return committed.rows_of(name)


@functools.cache
def page_of_run(name: str) -> str:
    return page_of(rows_of(name))
