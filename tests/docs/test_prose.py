"""Docstrings name their subject, since a reader meets many of them far from what they describe."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.making import HERE

FOLDERS = ("attnbench", "docs/generators", "plugins", "tests")
BARE = re.compile(r'^[ ]*[rf]?"""Of [^\n]*', re.MULTILINE)


def test_no_docstring_begins_with_a_bare_of() -> None:
    files = [path for folder in FOLDERS for path in (HERE / folder).rglob("*.py")]
    bare = [f"{path}: {line}" for path in files for line in BARE.findall(path.read_text(encoding="utf-8"))]
    assert bare == []


def test_a_bare_of_is_found() -> None:
    assert BARE.findall('ROWS = 3\n""' + '"Of one head."""\n') == ['""' + '"Of one head."""']
    assert BARE.findall('"""Often."""') == []


CLAUSE = re.compile(r"\bwhat (is|was|are|were|came|comes|it|a|an|the|has|had|they|of)\b", re.IGNORECASE)
"""A clause in place of a noun: "what came of a visit" for the outcome."""
MOST = 0.3
"""Clauses in 1000 words of docstrings."""
QUESTION = re.compile(r"(What|Which|Whether|How|Where|Who|When)\b")


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for one in getattr(node, "body", None) or () if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                yield one.value.value


def test_a_thing_gets_its_noun() -> None:
    found = [text for path in (HERE / "attnbench").rglob("*.py") for text in docstrings(path)]
    clauses = sum(len(CLAUSE.findall(text)) for text in found)
    assert 1000 * clauses / sum(len(text.split()) for text in found) < MOST


def test_docstrings_begin_with_a_noun_or_an_imperative() -> None:
    """A task may ask its question."""
    files = [path for path in (HERE / "attnbench").rglob("*.py") if path.parent.name != "tasks"]
    assert [text for path in files for text in docstrings(path) if QUESTION.match(text.strip())] == []


def test_clauses_and_questions_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""How it ends."""\nA = 1\n"""What came of it, and what is left."""\n')
    found = list(docstrings(tmp_path / "a.py"))
    assert [bool(QUESTION.match(one)) for one in found] == [True, True]
    assert [len(CLAUSE.findall(one)) for one in found] == [0, 2]
