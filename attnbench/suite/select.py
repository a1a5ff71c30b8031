"""``-k EXPRESSION``: choose cells in the words of ``pytest -k``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import get_args

from attnbench.errors import UsageError, did_you_mean
from attnbench.suite.axes import DTYPES
from attnbench.suite.cell import Cell, Level, Pass
from attnbench.suite.describe import address

_TOKEN = re.compile(r"[()]|[^\s()]+")
_MAX_DEPTH = 50
_EXAMPLE = "write for instance 'performer and not n4096'"
_WHOLE = {*DTYPES, *get_args(Level), *get_args(Pass)}
"""Words that are never a part of another one: float16 does not mean bfloat16."""

Predicate = Callable[[str], bool]


def choose(expression: str, cells: Sequence[Cell]) -> list[Cell]:
    """The cells whose :func:`~attnbench.suite.describe.address` matches, in their order. Raises UsageError: the
    expression cannot be read, or no cell matches; the message helps to find one that does."""
    addresses = [address(cell) for cell in cells]
    chosen = [cell for cell, where in zip(cells, addresses, strict=True) if matches(expression, where)]
    if not chosen:
        raise _nothing(expression, addresses)
    return chosen


def _nothing(expression: str, addresses: Sequence[str]) -> UsageError:
    words = [word for word in _TOKEN.findall(expression) if word.lower() not in ("and", "or", "not", "(", ")")]
    unknown = [word for word in words if not any(_finds(word.lower())(where.lower()) for where in addresses)]
    parts = {part for where in addresses for whole in where.split("/") for part in (whole, whole.partition(":")[0])}
    nearest = did_you_mean(unknown[0], parts, cutoff=0.75).removeprefix("; ") if unknown else ""
    what = f"no cell has {unknown[0]!r}" if unknown else "no cell matches"
    return _Parser(expression).error(what, nearest or f"a cell is called {addresses[0]}")


def matches(expression: str, label: str) -> bool:
    """True if ``label`` is chosen: words are looked for in it, in either case; and, or, not, parentheses.

    ``not`` binds tighter than ``and``, and ``and`` tighter than ``or``. A word may be a part of another one, but
    ``n1024`` does not match ``n10240``, nor a dtype, level or pass anything longer. Raises UsageError.
    """
    return _compile(expression)(label.lower())


@lru_cache(maxsize=16)
def _compile(expression: str) -> Predicate:
    parser = _Parser(expression)
    chosen = parser.any_of(0)
    if parser.tokens:
        raise parser.error(f"'and' or 'or' is missing before {parser.tokens[-1]!r}")
    return chosen


class _Parser:
    """Recursive descent; ``tokens`` are the remaining ones, the next one last."""

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self.tokens = _TOKEN.findall(expression)[::-1]

    def error(self, what: str, remedy: str = _EXAMPLE) -> UsageError:
        shown = self.expression if len(self.expression) <= 60 else self.expression[:59] + "…"
        return UsageError(f"-k {shown!r}: {what if len(what) <= 100 else what[:99] + '…'}; {remedy}")

    def takes(self, word: str) -> bool:
        if self.tokens and self.tokens[-1].lower() == word:
            self.tokens.pop()
            return True
        return False

    def any_of(self, depth: int) -> Predicate:
        parts = [self.all_of(depth)]
        while self.takes("or"):
            parts.append(self.all_of(depth))
        return parts[0] if len(parts) == 1 else lambda label: any(part(label) for part in parts)

    def all_of(self, depth: int) -> Predicate:
        parts = [self.one(depth)]
        while self.takes("and"):
            parts.append(self.one(depth))
        return parts[0] if len(parts) == 1 else lambda label: all(part(label) for part in parts)

    def one(self, depth: int) -> Predicate:
        if depth > _MAX_DEPTH:
            raise self.error(f"more than {_MAX_DEPTH} levels of not and parentheses")
        if self.takes("not"):
            inner = self.one(depth + 1)
            return lambda label: not inner(label)
        if self.takes("("):
            inner = self.any_of(depth + 1)
            if not self.takes(")"):
                raise self.error("')' is missing")
            return inner
        if not self.tokens:
            raise self.error("a word is missing at the end")
        word = self.tokens.pop().lower()
        if word in ("and", "or", ")"):
            raise self.error(f"a word is missing before {word!r}")
        return _finds(word)


def _finds(word: str) -> Predicate:
    if word in _WHOLE:
        return lambda label: word in label.split("/")
    pattern = re.compile(re.escape(word) + (r"(?![0-9])" if word[-1].isdigit() else ""))
    return lambda label: pattern.search(label) is not None
