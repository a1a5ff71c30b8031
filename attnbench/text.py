"""Clean other people's text for a terminal and a table: control, bidirectional and invisible characters mislead."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import compress

_LIVE = re.compile(r"@|\b(?:https?|ftp):|\bwww(?=\.)", re.IGNORECASE)
"""Text that mentions a person or becomes a link in comments."""


def printable(text: str, *, keep: str = "") -> str:
    """``text`` with U+FFFD for each character that is not printable, except those in ``keep``.

    As in :meth:`str.isprintable`, ends of lines and paragraphs are not printable, nor are spaces but the ordinary one.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)


def quantity(count: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{count} {noun}{'s' * (count != 1)}"


_SECRETS = {
    r"\b(?:hf_|gh[pousr]_|AKIA)[A-Za-z0-9]{12,}\b(?!\.\w)": "***",
    r"\b(?:github_pat_|glpat-|sk-|xox[a-z]-)(?=[\w-]*\d)[\w-]{12,}": "***",
    r"(?<=://)[^/\\\s@\"]+(?=@)": "***",
    r"(?i)((?:token|secret|password|api.?key)\s*[=:]\s*)[^\s,;\"'\\]{8,}": r"\1***",
}
"""Text that lets others in -> what takes its place."""


def without_secrets(text: str) -> str:
    """``text`` with ``~`` for the user's home folder, which may hold a name, and without passwords and tokens."""
    home = os.path.expanduser("~")  # noqa: PTH111  # it never raises, also where there is no home
    text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text) if len(home) > 1 else text
    for secret, instead in _SECRETS.items():
        text = re.sub(secret, instead, text)
    return text


def not_live(text: str) -> str:
    """``text`` for a comment, with a character of no width in each mention or link."""
    return _LIVE.sub(lambda found: f"{found[0]}\N{ZERO WIDTH SPACE}", text)


def without_empty(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """A table without its empty columns."""
    used = [any(row[place] not in ("", "-") for row in rows) for place in range(len(columns))]
    return list(compress(columns, used)), [list(compress(row, used)) for row in rows]


def one_line(text: str, limit: int = 200) -> str:
    """``text`` on one line, printable, at most ``limit`` characters, without the user's home: fit for a CSV cell."""
    flat = printable(" ".join(without_secrets(text).split()))
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
