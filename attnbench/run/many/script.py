"""What a machine does one after the other: a generator, which yields calls and is sent their answers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnbench.cell import Cell
from attnbench.record import one_line
from attnbench.run.many.engine import Message
from attnbench.run.many.kinds import Kind
from attnbench.run.protocol import Outcome, Ready, VisitCell
from attnbench.run.trainings import threads_of


@dataclass(slots=True)
class Call:
    """Something that a machine is asked."""

    method: str
    message: dict[str, Any] = field(default_factory=dict)
    most_s: float = 0.0
    """Seconds that it may take."""
    cells: Sequence[Cell] = ()
    """What the machine measures meanwhile, and may die of."""
    started_at: str = ""
    """When it was made, UTC."""
    attempt: int = 0
    """Its number, by which its answer is known."""
    since: float = 0.0
    """When it was made, in seconds of the engine."""


Script = Generator[Call | None, Message, None]
"""It yields None to wait for a second."""


@dataclass(eq=False, slots=True)
class Member:
    """A machine that takes part."""

    machine: int
    """Its number, as the engine has it."""
    name: str
    """Name of its host, for people."""
    host: str
    """Digest of its host."""
    kind: Kind
    state: Ready
    """What its process says of itself."""


class Lost(Exception):  # the machine's own failure, not an error of the run
    """A machine cannot go on; carries the reason."""


def failure(answer: Message) -> str:
    """Why a call failed; empty where it did not."""
    return one_line(str(answer.get("failed", "")))


def outcome_of(answer: Message, cell: Cell, member: Member, request: VisitCell | None = None) -> Outcome:
    """What came of a visit, or without a ``request`` of a training.

    Raises:
        Lost: the machine could not make one, or sent something else.
    """
    if why := failure(answer):
        raise Lost(why)
    try:
        threads = threads_of(cell, member.kind.plan.settings)
        return Outcome.from_json(answer["outcome"], cell, threads=threads, request=request)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Lost("it sent garbage") from None
