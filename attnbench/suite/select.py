"""``-k EXPRESSION``: choose cells in the words of ``pytest -k``."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import get_args

from attnbench.errors import UsageError, did_you_mean
from attnbench.suite.axes import DTYPES
from attnbench.suite.cell import Cell, Level, Pass
from attnbench.suite.describe import address

_TOKEN = re.compile(r"[()]|[^\s()]+")
_SIGNS = ("and", "or", "not", "(", ")")
_DEEPEST = 200
"""Most signs that may nest, so that no stack runs over."""
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
    words = [word for word in _TOKEN.findall(expression) if word.lower() not in _SIGNS]
    unknown = [word for word in words if not any(_finds(word.lower())(where.lower()) for where in addresses)]
    parts = {part for where in addresses for whole in where.split("/") for part in (whole, whole.partition(":")[0])}
    nearest = did_you_mean(unknown[0], parts, cutoff=0.75).removeprefix("; ") if unknown else ""
    what = f"no cell has {unknown[0]!r}" if unknown else "no cell matches"
    return _error(expression, what, nearest or f"a cell is called {addresses[0]}")


def matches(expression: str, label: str) -> bool:
    """True if ``label`` is chosen: words are looked for in it, in either case; and, or, not, parentheses.

    ``not`` binds tighter than ``and``, and ``and`` tighter than ``or``. A word may be a part of another one, but
    ``n1024`` does not match ``n10240``, nor a dtype, level or pass anything longer. Raises UsageError.
    """
    return _compile(expression)(label.lower())


@lru_cache(maxsize=16)
def _compile(expression: str) -> Predicate:
    words: list[str] = []
    parts: list[str] = []
    for token in map(str.lower, _TOKEN.findall(expression)):
        words += [] if token in _SIGNS else [token]
        parts.append(token if token in _SIGNS else f"w{len(words) - 1}")
    try:  # Python has the same grammar once each word is a name
        if parts.count("not") + parts.count("(") > _DEEPEST:
            raise SyntaxError
        return _predicate(ast.parse(" ".join(parts), mode="eval").body, words)
    except (SyntaxError, RecursionError, MemoryError):
        raise _error(expression, "not words with and, or, not and parentheses", _EXAMPLE) from None


def _predicate(part: ast.expr, words: Sequence[str]) -> Predicate:
    match part:
        case ast.Name(name):
            return _finds(words[int(name[1:])])
        case ast.UnaryOp(ast.Not(), operand):
            inner = _predicate(operand, words)
            return lambda label: not inner(label)
        case ast.BoolOp(joined, values):
            parts = [_predicate(one, words) for one in values]
            among = all if isinstance(joined, ast.And) else any
            return lambda label: among(one(label) for one in parts)
    raise SyntaxError


def _error(expression: str, what: str, remedy: str) -> UsageError:
    shown, said = (one if len(one) <= most else one[: most - 1] + "…" for one, most in ((expression, 60), (what, 100)))
    return UsageError(f"-k {shown!r}: {said}; {remedy}")


def _finds(word: str) -> Predicate:
    if word in _WHOLE:
        return lambda label: word in label.split("/")
    pattern = re.compile(re.escape(word) + (r"(?![0-9])" if word[-1].isdigit() else ""))
    return lambda label: pattern.search(label) is not None
