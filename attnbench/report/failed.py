"""Which cells have no number, and why: one line for each reason."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from attnbench.plots.captions import in_words
from attnbench.report.numbers import tokens
from attnbench.status import Status


@dataclass(frozen=True)
class Failure:
    """Cells that ended alike for the same reason."""

    status: str
    meaning: str
    reason: str
    labels: tuple[str, ...]
    where: str
    """Lengths and what was asked for: ``n = 4096, 8192 · forward pass``."""
    cells: int


def failed(rows: pd.DataFrame) -> list[Failure]:
    """What failed first, then what the mathematics of a variant does not allow."""
    bad = rows[rows["status"] != Status.OK]
    found = [
        Failure(
            str(status),
            Status(str(status)).meaning,
            str(reason),
            tuple(dict.fromkeys(part["label"])),
            f"n = {', '.join(tokens(n) for n in sorted(set(part['seq_len'])))}; {level}, {in_words('pass', pass_)}",
            len(part),
        )
        for (status, reason, level, pass_), part in bad.groupby(["status", "reason", "level", "pass"], sort=False)
    ]
    return sorted(found, key=lambda one: one.status == Status.UNSUPPORTED)
