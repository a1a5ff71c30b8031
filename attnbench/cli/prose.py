"""Docstrings as text for a terminal: paragraphs rewrapped, bullets and sections kept, markup removed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import fill

_ROLE = re.compile(r":\w+:`~?(?:[^`]*\.)?([^`.]+)`")
_CODE = re.compile(r"``([^`]+)``")
_TOGETHER = 24
"""Code of up to this many characters, such as a shape, stays on one line."""
_HARD = "\N{NO-BREAK SPACE}"
_SECTION = re.compile(r"(Args|Returns|Raises):$")


def prose(text: str, width: int) -> str:
    """``text``, as ``inspect.getdoc`` gives it, in lines of at most ``width`` characters if its words allow that."""
    plain = _CODE.sub(_unmarked, _ROLE.sub(r"\1", text))
    blocks = re.split(r"\n\s*\n", plain.strip("\n"))
    return "\n\n".join("\n".join(_filled(block, width)) for block in blocks).replace(_HARD, " ")


def _unmarked(code: re.Match[str]) -> str:
    return code[1].replace(" ", _HARD) if len(code[1]) <= _TOGETHER else code[1]


def _filled(block: str, width: int) -> Iterator[str]:
    for first, later, line in _items(block):
        yield fill(
            line,
            width,
            initial_indent=" " * first,
            subsequent_indent=" " * later,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _items(block: str) -> list[tuple[int, int, str]]:
    """Each part that begins a new line: its indentation, that of its further lines, and its words."""
    items: list[tuple[int, int, str]] = []
    in_section = False
    for raw in block.splitlines():
        line = raw.strip()
        indent = len(raw) - len(raw.lstrip())
        if not items or line.startswith("- ") or (in_section and indent == 4) or indent < items[-1][0]:
            hanging = 2 if line.startswith("- ") else 4 if in_section else 0
            items.append((indent, indent + hanging, line))
        elif items[-1][2].startswith("- ") and indent <= items[-1][0]:
            items.append((indent, indent, line))
        else:
            first, later, begun = items[-1]
            items[-1] = (first, later, f"{begun} {line}")
        in_section = in_section or bool(_SECTION.match(line))
    return items
