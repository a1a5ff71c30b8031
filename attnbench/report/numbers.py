"""Numbers as a report holds them: few digits, and null where there is none."""

from __future__ import annotations

import math

DIGITS = 5
"""Significant digits; three are shown."""


def compact(value: float | None) -> float | int | None:
    """``0.118965486`` -> ``0.11897``; None, NaN and infinity -> None."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


def times(ratio: float) -> str:
    """A positive ratio in two digits, near 1 in three: ``3.6``, ``0.91``, ``1.03``, ``140``."""
    if 0.9 <= ratio < 1.1:
        return f"{ratio:.2f}"
    rounded = float(f"{ratio:.2g}")
    return f"{rounded:.{max(0, 1 - math.floor(math.log10(rounded)))}f}"


def tokens(n: int) -> str:
    """A length: ``4096``, ``65,536``."""
    return f"{n:,}" if n >= 10_000 else str(n)
