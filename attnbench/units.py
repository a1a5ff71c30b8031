"""Convert seconds, bytes and counts to text and back. This is the only place where a number meets its unit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([kmgt])i?)?b?\s*", re.IGNORECASE)
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "\u03bcs": 1e-6, "ns": 1e-9}
_DURATION = re.compile(rf"\s*([0-9]{{1,18}}(?:\.[0-9]{{1,18}})?)\s*({'|'.join(_SECONDS)})\s*", re.IGNORECASE | re.ASCII)


def _three_digits(value: float) -> str:
    """``value`` with three significant digits and no exponent below 10000."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")  # 9.996 becomes 10.0, which has one decimal fewer
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:.{digits}f}"


def _with_prefix(value: float, step: int, prefixes: tuple[str, ...]) -> tuple[str, str]:
    """Number and prefix; a number that would be rounded up to ``step`` gets the next prefix."""
    power = 0
    while abs(value) >= step - 0.5 and power < len(prefixes) - 1:
        value /= step
        power += 1
    whole = power == 0 and value == int(value)
    return str(int(value)) if whole else _three_digits(value), prefixes[power]


def format_seconds(seconds: float | None) -> str:
    """``0.0123`` -> ``12.3 ms``; None and NaN -> ``-``."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    for scale, unit in _TIME:
        if abs(seconds) >= 0.9995 * scale:  # rounds up to 1
            return f"{_three_digits(seconds / scale)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds:.2g} s"


def format_bytes(count: float | None) -> str:
    """``13_328_448`` -> ``12.7 MiB``; None and NaN -> ``-``."""
    if count is None or not math.isfinite(count):
        return "-"
    return " ".join(_with_prefix(count, 1024, _BINARY))


def format_count(count: float | None) -> str:
    """``7.0e13`` -> ``70.0T``; None and NaN -> ``-``."""
    if count is None or not math.isfinite(count):
        return "-"
    return "".join(_with_prefix(count, 1000, _DECIMAL))


def format_number(value: float, digits: int = 3) -> str:
    """``0.86``, ``64.2``, ``4008``: so many significant digits, and all that stand before the point."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:.0f}"


_NEAR = 0.2
"""Distance from a value, over that value, up to which an interval may be told by one number."""


def format_interval(
    value: float | None,
    low: float | None,
    high: float | None,
    text: Callable[[float | None], str] = format_seconds,
) -> str:
    """``±4%`` if both ends are about as far from the value, else the ends: ``0.9 to 2.6 ms``; empty for no interval.

    The percentage is the distance of the farther end over the value, 1 at least and 20 at most. Everything that prints
    an interval in this way prints it by this function.
    """
    if not value or low is None or high is None or not all(map(math.isfinite, (value, low, high))):
        return ""
    down, up = ((value - low) / abs(value), (high - value) / abs(value))
    if -0.005 <= min(down, up) <= max(down, up) <= _NEAR and abs(round(100 * down) - round(100 * up)) <= 1:
        return f"±{max(1, round(100 * max(down, up)))}%"
    first, last = text(low), text(high)
    unit = last.partition(" ")[2]
    return f"{first.removesuffix(f' {unit}') if unit else first} to {last}"


def with_interval(
    value: float | None,
    low: float | None,
    high: float | None,
    text: Callable[[float | None], str] = format_seconds,
) -> str:
    """``12.3 ms ±4%`` or ``1.2 ms (0.9 to 2.6 ms)``."""
    said = format_interval(value, low, high, text)
    return f"{text(value)} {said if said.startswith('±') else f'({said})'}" if said else text(value)


def parse_bytes(text: str) -> int:
    """``8GiB``, ``8G`` (both binary) or ``1000000`` -> bytes.

    Raises:
        ValueError: not a positive size.
    """
    match = _SIZE.fullmatch(text)
    size = int(float(match[1]) * 1024 ** (" kmgt".index((match[2] or " ").lower()))) if match else 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a size such as 8GiB or 500MiB")
    return size


def parse_seconds(text: str) -> float:
    """``10ms``, ``250 us``, ``250µs`` or ``1.5s`` -> seconds.

    Raises:
        ValueError: not a positive time with a unit.
    """
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2].lower()] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"{text!r} is not a time such as 10ms, 250us or 1.5s")
    return seconds


def format_share(share: float | None) -> str:
    """``88 %``; a dash if it is not known."""
    return "-" if share is None else f"{100 * share:.0f} %"
