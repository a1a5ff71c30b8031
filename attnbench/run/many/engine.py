"""What is needed of an engine: which machines there are, who owns one, calls, and news of deaths.

An engine knows nothing of cells. It may deliver an answer late, or after it has told of a machine's death; whoever
calls numbers the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, Any]
"""Plain dicts, lists, strings and numbers, as JSON has them: two versions of attnbench never share a class."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call gave."""

    machine: int
    value: Message


@dataclass(frozen=True, slots=True)
class Died:
    """A machine that will not answer any more: it ended, was ended, or is not reached."""

    machine: int
    reason: str


Event = Answer | Died


class Engine(Protocol):
    """Owns machines, each as a whole, and asks each of them one thing at a time."""

    name: str
    """The engine's name after ``--on``."""

    def places(self) -> int:
        """How many machines there are, busy or free. A death may be noticed late here."""

    def start(self) -> int:
        """Own one more machine, wherever one is free, and return its number at once.

        What it is called with waits until there is one.
        """

    def call(self, machine: int, method: str, message: Message) -> None:
        """Call a method of :class:`~attnbench.run.many.machine.Machine` and return at once."""

    def wait(self, seconds: float) -> Sequence[Event]:
        """What happened since; waits for something to happen, but no longer than ``seconds``."""

    def end(self, machine: int) -> None:
        """Give a machine back; what it is doing ends with it. No news of it follows."""

    def close(self) -> None:
        """Give all machines back, and let go of the engine."""
