"""The words and rooms of the engines, and the contract of a variant, from the docstrings that define them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attnbench.catalogue import engines
from attnbench.contract import variant
from generators.markdown import first_line, page, prose, table, words

_RULE = re.compile(r"^=+( =+)+$")


def pages() -> Iterator[tuple[str, str]]:
    """One page for each of the two."""
    first, rest = first_line(engines.__doc__)
    yield (
        "reference/engines.md",
        page("# The engines", words(first), *(_table(block) or prose(block) for block in rest.split("\n\n"))),
    )
    first, rest = first_line(variant.__doc__)
    yield "reference/contract.md", page("# The contract of a variant", words(first), prose(rest))


def _table(block: str) -> str:
    """A table of columns under rules of ``=``; empty where the block is none."""
    lines = block.strip("\n").splitlines()
    if not _RULE.match(lines[0]):
        return ""
    starts = [match.start() for match in re.finditer("=+", lines[0])]
    ends = [*(start - 1 for start in starts[1:]), None]
    cells = [
        [words(line[start:end].strip()) for start, end in zip(starts, ends, strict=True)]
        for line in lines
        if not _RULE.match(line)
    ]
    return table(cells[0], cells[1:])
