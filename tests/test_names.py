"""One meaning a name: of each class, and of each file."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import attnbench

ROOT = Path(attnbench.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
COMMANDS = ["best", "capture", "claims", "compare", "history", "match", "merge", "run", "schema", "score", "swap"]
"""A command's name is also that of its function in Python, its figure, its screen and the code that answers it."""
FIGURES = ["own_error", "recall"]
"""A figure's name is that of the column or the task that it shows."""


def used_twice(named: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for name, place in named:
        places.setdefault(name, []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def classes_of(source: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def file_names() -> dict[str, list[str]]:
    files = (path.relative_to(ROOT) for path in FILES if path.name != "__init__.py")
    return used_twice((path.stem, str(path)) for path in files)


def test_no_class_name_means_two_things() -> None:
    classes = (
        (name.lstrip("_"), f"{path.relative_to(ROOT)}: {name}")
        for path in FILES
        for name in classes_of(path.read_text(encoding="utf-8"))
    )
    assert not used_twice(classes)


def test_a_nested_class_counts() -> None:
    assert classes_of("class A:\n    class B: ...\ndef f():\n    class _C: ...\n") == ["A", "B", "_C"]


def test_no_file_name_means_two_things() -> None:
    assert {name: places for name, places in file_names().items() if name not in COMMANDS + FIGURES} == {}


def test_each_exception_is_in_use() -> None:
    assert set(COMMANDS + FIGURES) <= file_names().keys()
    assert all((ROOT / "cli" / f"{name}.py").is_file() for name in COMMANDS)
    assert all((ROOT / "figures" / f"{name}.py").is_file() for name in FIGURES)
