"""Whole numbers as people write them for an axis: ``512,1024``, ``16k``, ``1024..16384``, ``1024..4096+1024``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attnbench.contract.spec import comma_separated
from attnbench.errors import UsageError

MAX_VALUES = 10_000
"""More than this on one axis is a slip of the keyboard."""

FORMS = "write 1024 or 1k or 512,1024 or 1024..16384 (doubling) or 1024..4096+1024 (steps)"

_NUMBER = r"([0-9]{1,18}k?)"
_PART = re.compile(rf"{_NUMBER}(?:\.\.{_NUMBER}(?:\+{_NUMBER})?)?")


def parse_range(value: str | int | Sequence[str | int]) -> list[int]:
    """The numbers that ``value`` stands for, in the order written.

    ``16k`` is 16,384, as figures write it. ``a..b`` doubles from a and holds b where doubling meets it: ``1000..5000``
    is 1000, 2000, 4000. ``a..b+s`` goes up by s and holds b where the steps meet it. Text may join several with commas;
    a list may mix text and numbers. Raises UsageError: not such a text, a range that runs downwards, nothing, more than
    10,000 values, or what may be one number with a comma in it.
    """
    items = [value] if isinstance(value, str | int) else list(value)
    numbers: list[int] = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, str | int):
            raise UsageError(f"{item!r} is not a whole number; {FORMS}")
        if isinstance(item, int):
            if item < 0:
                raise UsageError(f"{item} is below 0; {FORMS}")
            numbers.append(item)
        else:
            for part in comma_separated(item):
                numbers += _parse_part(part, item)
                _check_count(len(numbers))
        _check_count(len(numbers))
    if not numbers:
        raise UsageError(f"no numbers; {FORMS}")
    return numbers


def _parse_part(part: str, whole: str) -> Sequence[int]:
    match = _PART.fullmatch(part)
    if not match:
        raise UsageError(f"{_short(part or whole)} is not a number or a range; {FORMS}")
    start = _number(match[1])
    if match[2] is None:
        return [start]
    end = _number(match[2])
    if end < start:
        backwards = f"{match[2]}..{match[1]}" + (f"+{match[3]}" if match[3] else "")
        raise UsageError(f"{part!r} runs downwards; write {backwards}")
    if match[3] is not None:
        step = _number(match[3])
        if step == 0:
            raise UsageError(f"{part!r} has a step of 0; write a step of at least 1")
        _check_count((end - start) // step + 1)
        return range(start, end + 1, step)
    if start == 0:
        raise UsageError(f"{part!r} doubles from 0; write 1..{max(end, 1)} or steps such as 0..{end}+1")
    return [start << power for power in range((end // start).bit_length())]


def is_number(text: str) -> bool:
    """True if ``text`` is one number of a range: ``1024`` or ``1k``."""
    return re.fullmatch(_NUMBER, text) is not None


def _number(text: str) -> int:
    return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)


def _check_count(count: int) -> None:
    if count > MAX_VALUES:
        raise UsageError(f"{count} values on one axis, at most {MAX_VALUES}; use a larger step")


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")
