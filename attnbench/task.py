"""What a variant can be trained on: the contract of a task and the table of all tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, runtime_checkable

from attnbench.registry import Entry, Registry
from attnbench.shape import Shape
from attnbench.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

NO_LABEL = -100
"""Label of a token of which nothing is asked; what ``cross_entropy`` ignores."""

Split = Literal["validation", "test"]


@dataclass(frozen=True, slots=True)
class Form:
    """What a model of a task reads and what it answers."""

    vocab: tuple[int, ...]
    """Number of ids of each part of a token: ``(256,)`` for bytes, ``(16, 9)`` for a key and a value apart."""
    classes: int
    per_token: bool = False
    """A label for each token, instead of one for the sequence."""
    towers: int = 1
    """Sequences that one answer is about: each is read alone, and what comes of them is joined."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Some sequences of one length with their answers."""

    tokens: Tensor
    """int64 ``(B, N)``; ``(B, N, P)`` where a token has P parts; ``(B, 2, N)`` with two towers."""
    labels: Tensor
    """int64 ``(B,)``, or ``(B, N)`` with :data:`NO_LABEL` where nothing is asked."""
    key_mask: Tensor | None = None
    """bool ``(B, N)`` or ``(B, 2, N)``, True where a token is real; None where all are."""


class Task(Protocol):
    """Examples to train and to test on, at one length. The same question is answered by the same examples for ever.

    Data that is not there is no error of the constructor's caller: it raises :class:`~attnbench.errors.Unsupported`
    with the place where to get it.
    """

    form: Form
    masked_share: float
    """Of the tokens that ``pretrain: masked`` hides."""

    @property
    def train_examples(self) -> int | None:
        """How many there are to train on; None where they are drawn anew without end."""
        ...

    @property
    def test_examples(self) -> int:
        """All of them are tested on."""
        ...

    @property
    def digest(self) -> str:
        """Of the bytes that it reads, or of its generator's version and settings: sixteen hex digits."""
        ...

    def batch(self, seed: int, step: int, size: int) -> Examples:
        """What step ``step`` (from 0) of a training with this seed sees: ``size`` examples."""
        ...

    def held_out(self, split: Split, size: int) -> Iterator[Examples]:
        """All examples of a split, none of which is ever trained on, at most ``size`` at a time."""
        ...

    def fresh(self, seed: int, size: int) -> Iterator[Examples] | None:
        """As many as the test has, like those, drawn from ``seed``; None where there are no more than are stored."""
        ...


@runtime_checkable
class HasFiles(Protocol):
    """A task that reads files of the user's: whether a run goes on with earlier rows depends on them."""

    def files(self) -> Iterable[Path]:
        """All that it reads, in an order that depends on nothing but their names."""
        ...


@dataclass(frozen=True)
class TaskEntry(Entry):
    """A registered task: what ``show`` prints."""

    source: str = ""
    licence: str = ""
    """Of its data; empty where it is generated."""


TASKS: Registry[TaskEntry] = Registry("task", home="attnbench.tasks", own="'attnbench list tasks' shows the names")

Make = TypeVar("Make", bound=Callable[..., Task])


def register_task(name: str, *, source: str, licence: str = "") -> Callable[[Make], Make]:
    """Decorator for a class or function ``make(shape, **options) -> Task``.

    It raises Unsupported where the task does not have this length, or its data is not there.
    """

    def add(make: Make) -> Make:
        summary = (make.__doc__ or "").strip().partition("\n")[0]
        TASKS.add(TaskEntry(name=name, make=make, summary=summary, source=source, licence=licence))
        return make

    return add


def make_task(spec: Spec, shape: Shape) -> Task:
    """The task at this length, causal or not.

    Raises:
        UsageError: unknown task or option.
        Unsupported: it does not have this length, or its data is not there.
    """
    entry = TASKS.get(spec.name)
    task: Task = entry.make(shape, **entry.check(dict(spec.options)))
    return task


def stream_seed(*names: object) -> int:
    """A seed for one stream of random numbers, different for each: ``("recall", "train", 0, 17)``."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, names)).encode()).digest()[:8]) >> 1
