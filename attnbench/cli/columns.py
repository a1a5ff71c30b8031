"""Widths of a table's columns when not all of it fits."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_WORD = 10
"""Words up to this many characters stay whole: ``bfloat16`` does, a label with its options may be broken."""
GAPS = (2, 1)
"""Spaces between two columns: the second number is used if the first leaves too little room."""


def fit(columns: Sequence[Sequence[str]], numbers: Sequence[bool], space: int) -> tuple[list[int], int] | None:
    """Widths of the columns, and the gap between them, so that words stay whole.

    The widest column of text is narrowed again and again; columns of numbers keep their width. If there is too little
    room for all words, those of more than :data:`LONGEST_WORD` characters are broken, and at last the longest.

    Args:
        columns: the cells of each column, including its head.
        numbers: which columns hold numbers.
        space: characters in a line.

    Returns:
        The widths and the gap; None if there is no room for the numbers.
    """
    from rich.cells import cell_len

    widths = [max(1, *(cell_len(line) for cell in cells for line in cell.split("\n"))) for cells in columns]
    words = [[cell_len(word) for cell in cells for word in cell.split()] for cells in columns]
    whole = max(LONGEST_WORD, *(n for of in words for n in of), 0)
    tries = [(longest, gap) for longest in (whole, LONGEST_WORD) for gap in GAPS]
    for longest, gap in tries + [(n, GAPS[-1]) for n in range(LONGEST_WORD - 1, 0, -1)]:
        least = [
            width if fixed else max((n for n in of if n <= longest), default=1)
            for of, width, fixed in zip(words, widths, numbers, strict=True)
        ]
        room = space - gap * (len(widths) - 1)
        if sum(least) <= room:
            while sum(widths) > room:
                widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i])
                widths[widest] -= 1
            return widths, gap
    return None
