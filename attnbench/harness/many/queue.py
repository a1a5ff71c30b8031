"""The shares of the work: comparison groups, each on one host from its first round to its last.

A machine takes a lot, some groups at once, and visits all their cells round by round, minutes apart as on one machine.
Lots become smaller towards the end, so that machines end together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from attnbench.harness.many.kinds import Kind
from attnbench.suite.cell import Cell
from attnbench.suite.shard import groups, weight

_MOST = 600.0
"""Most seconds of one round of a lot, about: a death costs its unfinished groups."""


@dataclass(eq=False, slots=True)
class Group:
    """Cells that differ by the variant alone. Once one has a row, the others go where it was measured."""

    cells: list[Cell]
    weight: float
    kind: Kind | None = None
    """The kind of machines in whose folder it has rows; None for none."""
    host: str = ""


class Queue:
    """Groups that wait, in order, and those that machines have taken."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        """All groups of these cells, short sequences first: their failures stand for longer ones."""
        found = [Group(group, sum(map(weight, group))) for group in groups(cells)]
        self.waiting = sorted(found, key=lambda group: max(cell.shape.N for cell in group.cells))
        self._taken: dict[int, list[Group]] = {}

    @property
    def is_empty(self) -> bool:
        """True if nothing waits and no machine works."""
        return not self.waiting and not self.is_worked_on

    @property
    def is_worked_on(self) -> bool:
        """True if a machine has unfinished work."""
        return any(self._taken.values())

    def finish(self, machine: int, group: Group) -> None:
        """A group is complete."""
        self._taken[machine].remove(group)

    def take(self, machine: int, *, kind: Kind, host: str, keeps: Callable[[str], bool], machines: int) -> list[Group]:
        """The next lot for a machine; empty if no waiting group may be measured there now.

        ``keeps``: true for a host that keeps its own groups, being at work or expected. ``machines`` share what waits.
        """
        mine = [group for group in self.waiting if self._may(group, kind, host, keeps)]
        mine.sort(key=lambda group: group.kind is None)  # first the groups that were begun, in their order
        most = min(_MOST, sum(group.weight for group in mine) / (2 * max(1, machines)))
        lot, load = list[Group](), 0.0
        for group in mine:
            if lot and load + group.weight > most:
                break
            lot.append(group)
            load += group.weight
        chosen = set(map(id, lot))
        self.waiting = [group for group in self.waiting if id(group) not in chosen]
        self._taken.setdefault(machine, []).extend(lot)
        for group in lot:
            group.kind, group.host = kind, host
        return lot

    def _may(self, group: Group, kind: Kind, host: str, keeps: Callable[[str], bool]) -> bool:
        if group.kind is None:
            return True
        return group.kind is kind and (group.host == host or not keeps(group.host))

    def give_back(self, machine: int) -> Sequence[Group]:
        """Put a machine's unfinished groups at the head of the queue."""
        left = self._taken.pop(machine, [])
        self.waiting = [*left, *self.waiting]
        return left
