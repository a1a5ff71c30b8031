"""Which lines of a journal are not as they were written: changed, added, moved or lost, line by line.

Reading a journal stops at the first such line. Here each line is also held to the seals of the other lines: one
whose seal fits no predecessor was changed (or its predecessor is lost), one that its successor skips was added, and one
whose predecessor stands elsewhere was moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnbench.journal import next_seal, split_seal

_CHANGED = "changed, or lines before it are lost"
_MOST = 20
"""Most lines for which a predecessor is looked for in the whole file."""

Line = tuple[bytes, str] | None
"""What the seal is made of, and the seal; None for a line without one."""


def damage(data: bytes, first: str | None, end: Mapping[str, Any] | None) -> dict[int, str]:
    """Number of each line that is not as it was written -> what happened to it; empty for a whole file.

    Args:
        data: the file.
        first: the seal before the first line (:func:`attnbench.journal.first_seal`); None where it is not known.
        end: where the file ended when its run was complete, as :attr:`attnbench.journal.Journal.end`; None where the
            run never was.
    """
    whole, newline, torn = data.rpartition(b"\n")
    lines = [split_seal(line) for line in whole.split(b"\n")] if newline else []
    found = _broken(lines, first) if any(lines) else {}
    if end is not None:
        _judge(lines, found, end)
    if torn:
        found[len(lines) + 1] = "cut short"
    return dict(sorted(found.items()))


def _broken(lines: Sequence[Line], first: str | None) -> dict[int, str]:
    """Lines that do not follow the line before them."""
    places = {line[1]: number for number, line in reversed(list(enumerate(lines, start=1))) if line}
    found: dict[int, str] = {}
    before = last_good = first
    for number, line in enumerate(lines, start=1):
        if line is None:
            found[number] = _CHANGED
            continue
        body, seal = line
        if places[seal] < number:
            found[number] = f"added: it repeats line {places[seal]}"
            continue
        follows = before is None or next_seal(before, body) == seal
        skips = last_good is not None and next_seal(last_good, body) == seal
        if skips:  # as if the lines between were not there
            between = range(places.get(last_good or "", 0) + 1, number)
            found |= {place: "added" for place in between if found.get(place) == _CHANGED}
        if follows or skips:
            last_good = seal
        else:
            found[number] = _elsewhere(body, seal, first, places) if len(found) < _MOST else _CHANGED
        before = seal
    return found


def _elsewhere(body: bytes, seal: str, first: str | None, places: Mapping[str, int]) -> str:
    """What happened to a line, by where its predecessor stands now."""
    if first is not None and next_seal(first, body) == seal:
        return "moved: it was the first line"
    was = next((place for other, place in places.items() if next_seal(other, body) == seal), None)
    return _CHANGED if was is None else f"moved: it was written after what is line {was}"


def _judge(lines: Sequence[Line], found: dict[int, str], end: Mapping[str, Any]) -> None:
    """Say more about the lines of a complete run, whose number and last seal are known."""
    seals = [line[1] if line else "" for line in lines]
    if is_there := end["seal"] in seals:
        after = range(seals.index(end["seal"]) + 2, len(lines) + 1)
        found |= dict.fromkeys(after, "added after the run was complete")
    lost = int(end["lines"]) - len(lines) + sum(what.startswith("added") for what in found.values())
    doubtful = [number for number, what in found.items() if what == _CHANGED]
    count = f"{lost} line{'s are' if lost > 1 else ' is'} lost"
    if lost <= 0:
        found |= dict.fromkeys(doubtful, "changed, or the line before it was, and sealed anew")
    elif len(doubtful) == 1 and is_there:
        found[doubtful[0]] = f"{count} before it"
    elif not doubtful and not is_there:
        found[len(lines) + 1] = f"{count} from here on"
