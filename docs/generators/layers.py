"""The layers: which part of the package may import which, from the test that enforces it, and what each file is for."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from generators.markdown import ROOT, code, first_line, page, table, words

WHAT = {
    9: "the commands as functions, and python -m attnbench",
    8: "the commands",
    7: "from finished runs to a verdict, a figure and a report",
    6: "the processes that measure; figures",
    5: "rows on disk and as a table; laws; models",
    4: "instruments and the machine",
    3: "suites; algorithms, inputs and tasks",
    2: "the contract of a variant, an input and a task; files",
    1: "errors, units and text",
}
_WIDTH, _ROW, _GAP, _LEFT, _PER_LINE = 760, 22, 14, 44, 88


def layers() -> dict[int, str]:
    """``LAYERS`` of tests/test_layers.py."""
    for node in ast.parse((ROOT / "tests/test_layers.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LAYERS":
            return dict(ast.literal_eval(node.value))
    raise LookupError("tests/test_layers.py has no LAYERS")


def pages() -> Iterator[tuple[str, str]]:
    """A drawing, which the page on the architecture includes, and the list of files."""
    yield "reference/layers.svg.html", drawing()
    parts = [
        "# What each file is for",
        "The files of the package by layer, each with the first line of its docstring. A file imports from lower "
        "layers only. [Architecture](../internals/architecture.md) shows the layers in a picture.",
    ]
    every = " ".join(layers().values()).split()
    for layer, homes in sorted(layers().items(), reverse=True):
        rows = [[code(_name(file)), words(_says(file))] for home in homes.split() for file in _files(home, every)]
        parts += [f"## Layer {layer}: {WHAT[layer]}", table(["file", "what it is for"], rows)]
    yield "reference/modules.md", page(*parts)


def _files(home: str, apart: Iterable[str]) -> list[Path]:
    """The files of a home, without those that are homes of their own."""
    package = ROOT / "attnbench"
    place = package / home.replace(".", "/")
    if not place.is_dir():
        return [place.with_suffix(".py")]
    own = {file for one in apart for file in _files(one, ()) if one.startswith(f"{home}.")}
    return sorted({*place.rglob("*.py")} - own)


def _name(file: Path) -> str:
    return file.relative_to(ROOT / "attnbench").as_posix().replace("/__init__.py", "/")


def _says(file: Path) -> str:
    return first_line(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))))[0]


def drawing() -> str:
    """The highest layer on top; an arrow down beside them."""
    boxes, y = [], 4
    for layer, homes in sorted(layers().items(), reverse=True):
        lines = _lines(homes.split())
        height = _ROW * (len(lines) + 1) + 8
        boxes.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - 4}" height="{height}" rx="6"/>')
        boxes.append(f'<text class="number" x="{_LEFT + 12}" y="{y + _ROW}">{layer}</text>')
        boxes.append(f'<text class="what" x="{_LEFT + 34}" y="{y + _ROW}">{escape(WHAT[layer])}</text>')
        boxes += [
            f'<text class="homes" x="{_LEFT + 34}" y="{y + _ROW * (at + 2)}">{escape(line)}</text>'
            for at, line in enumerate(lines)
        ]
        y += height + _GAP
    arrow = f'<path class="arrow" d="M20 8V{y - 30}m-7 -12l7 12l7 -12"/>'
    return (
        f'<svg class="layers" viewBox="0 0 {_WIDTH} {y - _GAP + 4}" role="img" '
        f'aria-label="The layers of attnbench; imports point down">{arrow}{"".join(boxes)}</svg>\n'
    )


def _lines(homes: list[str]) -> list[str]:
    lines = [""]
    for home in homes:
        if len(lines[-1]) + len(home) > _PER_LINE:
            lines.append("")
        lines[-1] = f"{lines[-1]}  {home}".strip() if lines[-1] else home
    return lines
