"""The contract of a task to train on, and the table of all tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, runtime_checkable

from attnbench.contract.problem.shape import Shape
from attnbench.contract.registry import Entry, Registry
from attnbench.contract.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

NO_LABEL = -100
"""Label of a token that needs no answer; ``cross_entropy`` ignores it."""

Split = Literal["validation", "test"]


@dataclass(frozen=True, slots=True)
class Form:
    """The inputs and answers of a task's model."""

    vocab: tuple[int, ...]
    """Number of ids for each part of a token: ``(256,)`` for bytes, ``(16, 9)`` for a separate key and value."""
    classes: int
    per_token: bool = False
    """True if each token has a label, instead of the whole sequence."""
    towers: int = 1
    """Number of sequences per answer: each is read alone, and the results are joined."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Several sequences of one length with their answers."""

    tokens: Tensor
    """int64 ``(B, N)``; ``(B, N, P)`` where a token has P parts; ``(B, 2, N)`` with two towers."""
    labels: Tensor
    """int64 ``(B,)``, or ``(B, N)`` with :data:`NO_LABEL` for tokens without an answer."""
    key_mask: Tensor | None = None
    """bool ``(B, N)`` or ``(B, 2, N)``, True where a token is real; None where all are."""


class Task(Protocol):
    """Examples to train and to test on, at one length. The same call always gives the same examples.

    Missing data is not the caller's mistake: the constructor raises :class:`~attnbench.errors.Unsupported` and says
    where to get the data.
    """

    form: Form
    masked_share: float
    """Share of the tokens that ``pretrain: masked`` hides."""

    @property
    def train_examples(self) -> int | None:
        """Number of examples to train on; None where new ones are drawn without end."""

    @property
    def test_examples(self) -> int:
        """Number of test examples; all of them are used."""

    @property
    def digest(self) -> str:
        """Sixteen hex digits that identify the bytes it reads, or its generator's version and settings."""

    def batch(self, seed: int, step: int, size: int) -> Examples:
        """The ``size`` examples that step ``step`` (from 0) of a training with this seed sees."""

    def held_out(self, split: Split, size: int) -> Iterator[Examples]:
        """All examples of a split, at most ``size`` at a time; none of them is ever trained on."""

    def fresh(self, seed: int, size: int) -> Iterator[Examples] | None:
        """New examples like the test's and as many, drawn from ``seed``; None where only stored ones exist."""


@runtime_checkable
class HasFiles(Protocol):
    """A task that reads the user's files; they decide whether a run may go on with earlier rows."""

    def files(self) -> Iterable[Path]:
        """All files that it reads, in an order that depends only on their names."""


@dataclass(frozen=True)
class TaskEntry(Entry):
    """A registered task: what ``show`` prints."""

    source: str = ""
    licence: str = ""


TASKS: Registry[TaskEntry] = Registry(
    "task", home="attnbench.catalogue.tasks", own="'attnbench list tasks' shows the names"
)

Make = TypeVar("Make", bound=Callable[..., Task])


def register_task(name: str, *, source: str, licence: str = "") -> Callable[[Make], Make]:
    """Decorator for a class or function ``make(shape, **options) -> Task``.

    ``make`` raises Unsupported where the task does not have this length, or its data is missing.
    """

    def add(make: Make) -> Make:
        summary = (make.__doc__ or "").strip().partition("\n")[0]
        TASKS.add(TaskEntry(name=name, make=make, summary=summary, source=source, licence=licence))
        return make

    return add


def make_task(spec: Spec, shape: Shape) -> Task:
    """The task at this length, causal or not.

    Raises UsageError for an unknown task or option, and Unsupported if it lacks this length or its data.
    """
    entry = TASKS.get(spec.name)
    task: Task = entry.make(shape, **entry.check(dict(spec.options)))
    return task


def stream_seed(*names: object) -> int:
    """A seed for one stream of random numbers, different for each: ``("recall", "train", 0, 17)``."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, names)).encode()).digest()[:8]) >> 1
