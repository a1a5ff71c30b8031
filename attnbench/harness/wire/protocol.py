"""The requests of the parent and the answers of the worker: one class for each, with its JSON both ways.

A request is sent as ``{"do": its class, ...}``. :meth:`Request.answered` validates the answer, since a worker runs
foreign code, which can write anything.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, NotRequired, Self, TypedDict, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter

from attnbench.contract.problem.shape import Shape
from attnbench.errors import AttnbenchError
from attnbench.measure.status import Status
from attnbench.measure.time import Sample, TimingRules
from attnbench.results.manifest import digest as digits_of
from attnbench.results.record import SCHEMA_VERSION, Record
from attnbench.results.validation import are_points, are_samples, checked, foreign_to_cell, foreign_to_samples
from attnbench.suite.cell import METHOD_VERSION, Cell

if TYPE_CHECKING:
    from attnbench.harness.outside.isolation import Worker

Answer = TypeVar("Answer")


class Ready(TypedDict):
    """A worker's facts once it is set up, as JSON."""

    environment: dict[str, Any]
    machine_id: str
    machine_class: str
    process: str
    process_notes: list[str]
    memory_limit_bytes: int | None
    float32_products: str
    window_products: str
    matmul_rate: dict[str, float]
    """FLOP/s by dtype; empty if no rates were wanted. Likewise ``exp_rate`` (1/s) and ``copy_rates``."""
    exp_rate: dict[str, float]
    copy_rates: list[Any]
    timer_cost_s: float
    noise_floor: float | None
    sources: dict[str, list[str]]
    """Code and data used so far (:data:`attnbench.results.sources.Seen`)."""
    libraries: dict[str, str]
    """Versions of what plug-ins import."""
    card: NotRequired[dict[str, Any]]
    """NVML's facts of the card, with its speed so far (:mod:`attnbench.measure.card`)."""


class Request(Generic[Answer]):
    """A request to a worker; the class whose request it is has ``found``, its answer, unless the worker has it."""

    refusals: ClassVar[tuple[type[AttnbenchError], ...]] = ()
    """Errors of the worker's side that :meth:`ask` raises again; any other is CellFailed."""

    @property
    def do(self) -> str:
        """The module and the name of its class, by which the worker finds it."""
        return f"{type(self).__module__}.{type(self).__name__}"

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, by the names of the request's fields."""
        return _fields(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_json`, after a trip through JSON text."""
        readers = _readers(cast(Any, cls))
        one: Self = cast(Any, cls)(**{name: readers[name](value) for name, value in data.items()})
        return one

    def answered(self, answer: dict[str, Any]) -> Answer:
        """Read an answer; raise AttributeError, KeyError, TypeError or ValueError if it cannot be one."""
        return cast(Answer, _answer_of(cast(Any, type(self))).validate_python(answer["found"]))

    def ask(self, worker: Worker, timeout: float, **how: Any) -> Answer:
        """Send the request and wait for its answer; ``timeout`` is the most seconds between messages.

        ``how``: ``meanwhile`` and ``told`` of :meth:`attnbench.harness.outside.isolation.Worker.ask`. Raises CellFailed
        without an answer that makes sense; the worker is thrown away.
        """
        answer = worker.ask({"do": self.do, **self.to_json()}, timeout, **how)
        for kind in self.refusals:
            if answer.get("refused") == kind.__name__:
                raise kind(str(answer.get("why", "")))
        try:
            return self.answered(answer)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise worker.garbage() from None


_READ: dict[str, Callable[[Any], Any]] = {
    "cell": Cell.from_json,
    "cells": lambda cells: [Cell.from_json(one) for one in cells],
    "records": lambda rows: [Record.from_json(one) for one in rows],
    "previous": lambda row: Record.from_json(row) if row else None,
}
"""Fields of requests with a JSON of their own -> their reader."""


@cache
def _readers(kind: Any) -> dict[str, Callable[[Any], Any]]:
    hints = inspect.get_annotations(kind, eval_str=True)
    return {name: _READ.get(name) or TypeAdapter(hints[name]).validate_python for name in kind.__slots__}


@cache
def _answer_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind.__orig_bases__[0].__args__[0])


def _fields(one: Any) -> dict[str, Any]:
    return {name: _plain(getattr(one, name)) for name in type(one).__slots__}


def _plain(value: Any) -> Any:
    if isinstance(value, Cell | Record):
        return value.to_json()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


@dataclass(slots=True)
class Outcome:
    """One round of a cell, or its training, which becomes the cell's row."""

    record: Record
    samples: dict[str, Any] | None = None
    """The raw samples as a row of ``samples.jsonl``; None if none were taken."""
    failure: Record | None = None
    """The row that the visit alone would give; not :attr:`record` if an earlier round was ok."""
    stderr: Sequence[str] = ()
    killed: bool = False
    """True if it was killed from outside, as far as can be known."""
    points: Sequence[dict[str, Any]] = ()

    @property
    def taken(self) -> list[dict[str, Any]]:
        """The samples of this round."""
        return self.samples["samples"] if self.samples else []

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return _fields(self)

    @classmethod
    def from_json(
        cls, data: dict[str, Any], cell: Cell, *, threads: int | None = None, request: VisitCell | None = None
    ) -> Self:
        """Inverse of :meth:`to_json`, for an outcome of ``cell``, measured with ``threads`` if that is known.

        ``request`` is the visit's, None for a training. Raises as :meth:`Request.answered`.
        """
        record = row_of(cell, data["record"])
        failure = row_of(cell, data["failure"]) if data["failure"] else None
        samples, points = data["samples"], data["points"]
        found = cls(record, samples, failure, [str(line) for line in data["stderr"]], bool(data["killed"]), points)
        if not are_samples(found.taken) or not are_points(points):
            raise ValueError("no samples, or no learning curve")
        if record.threads not in (None, threads or record.threads):
            raise ValueError("other threads")
        if samples and samples["cell_id"] != cell.cell_id:
            raise ValueError("the samples of another cell")
        if request and samples and samples["round"] != request.round:
            raise ValueError("the samples of another round")
        if request and record.status is Status.OK and foreign_to_samples(record, [*request.earlier, found.taken]):
            raise ValueError("a time that is not that of its samples")
        return found


@dataclass(frozen=True, slots=True)
class VisitCell(Request[Outcome]):
    """Measure one round of a cell (:func:`attnbench.harness.inside.execute.run_cell`)."""

    cell: Cell
    rules: TimingRules
    round: int = 0
    earlier: Sequence[list[dict[str, Any]]] = ()
    previous: Record | None = None
    """The record of the round before, which later rounds refine."""
    unchecked: bool = False
    """Measure a variant that claims to be exact and is not all the same, with a warning."""

    def earlier_samples(self) -> list[list[Sample]]:
        """The samples of each earlier round."""
        return [[Sample(**sample) for sample in samples] for samples in self.earlier]

    def answered(self, answer: dict[str, Any]) -> Outcome:
        visited = Outcome(row_of(self.cell, answer["record"]), answer.get("samples"))
        if not are_samples(visited.taken):
            raise ValueError("no samples")
        if visited.samples and foreign_to_samples(visited.record, [*self.earlier, visited.taken]):
            raise ValueError("a time that is not that of its samples")
        return visited


@dataclass(frozen=True, slots=True)
class Train(Request[Outcome]):
    """Train a cell's model and test it (:func:`attnbench.harness.score.score.score`)."""

    cell: Cell
    folder: Path
    quick: bool
    keep: bool = False
    """Leave the checkpoint of its end for the other tests of this training."""

    def answered(self, answer: dict[str, Any]) -> Outcome:
        if not are_points(answer["points"]):
            raise ValueError("no learning curve")
        return Outcome(row_of(self.cell, answer["record"]), points=answer["points"])


_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Times of several cells, as the worker's answer."""

    __pydantic_config__: ClassVar = ConfigDict(strict=True, extra="forbid")
    ran: list[int]
    """Positions of the cells with times."""
    blocks: list[list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]]
    """Seconds per call: one list for each block, in the order of ``ran``."""
    left_out: list[tuple[int, str, str]]
    """Position, status and reason of each cell that could not be built with the others, or did not always compute."""
    disturbed: _Count
    """Blocks in which another process took the core, of all ``taken``; while ``stopped``, this process stood still."""
    taken: _Count
    stopped: _Count
    others: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    """Cores that other programs kept busy meanwhile; None if the kernel does not say."""
    warnings: list[tuple[int, str]] = field(default_factory=list)
    """Position of a cell, and an impossible check of its calls."""
    slowed: str = ""
    prompts: list[tuple[int, Annotated[float, Field(ge=0, le=1)]]] = field(default_factory=list)
    """Position of a cell of pass ``generate``, and its prompt's share of a call."""


@dataclass(frozen=True, slots=True)
class TakeTurns(Request[Pairs]):
    """Time cells in turn (:func:`attnbench.harness.inside.pairs.measure_pairs`)."""

    cells: Sequence[Cell]
    rules: TimingRules
    fewest: int
    process: int = 0
    unchecked: bool = False
    led: bool = False
    """Another process asks for each sample (:func:`attnbench.harness.compare.length.lead`)."""

    def answered(self, answer: dict[str, Any]) -> Pairs:
        pairs, cells = TypeAdapter(Pairs).validate_json(json.dumps(answer)), range(len(self.cells))
        if sorted([*pairs.ran, *(place for place, _, _ in pairs.left_out)]) != list(cells):
            raise ValueError("not one outcome for each cell")
        if any(Status(status) is Status.OK for _, status, _ in pairs.left_out):
            raise ValueError("left out, though nothing failed")
        if bool(pairs.blocks) != bool(pairs.ran) or any(len(block) != len(pairs.ran) for block in pairs.blocks):
            raise ValueError("a block is not one time for each cell")
        if pairs.disturbed > pairs.taken or any(place not in cells for place, _ in (*pairs.warnings, *pairs.prompts)):
            raise ValueError("impossible counts of blocks, or a warning or a prompt of no cell")
        return pairs


@dataclass(frozen=True, slots=True)
class MeasureLimits(Request[tuple[dict[str, Any], list[Record]]]):
    """Measure the machine's limits once more, and hold these rows to them.

    The answer is ``matmul_rate``, ``exp_rate`` and ``copy_rates``, as in :class:`Ready`, and the rows.
    """

    cells: Sequence[Cell]
    records: Sequence[Record]

    def answered(self, answer: dict[str, Any]) -> tuple[dict[str, Any], list[Record]]:
        rows = zip(self.cells, answer["rows"], strict=True)
        return dict(answer["limits"]), [row_of(cell, row) for cell, row in rows]


def row_of(cell: Cell, data: dict[str, Any]) -> Record:
    """The row in an answer, for this cell; raises as :meth:`Request.answered` if a run with it could not be read
    again."""
    record = checked(Record.from_json(data))
    method = (record.method_version, record.schema_version)
    if (foreign := foreign_to_cell(record, cell)) or method != (METHOD_VERSION, SCHEMA_VERSION):
        raise ValueError(foreign or "of another version")
    return record


_FORM = 3
"""Incremented when messages change in another way than by their names."""


def digest() -> str:
    """Digits of the names in all messages, and of the versions of rows: equal for programs that understand each
    other."""
    kinds = (Ready, VisitCell, Train, TakeTurns, MeasureLimits, Pairs, TimingRules, Sample, Cell, Shape, Record)
    said = [
        _FORM,
        METHOD_VERSION,
        SCHEMA_VERSION,
        *(f"{kind.__name__}: {sorted(kind.__annotations__)}" for kind in kinds),
    ]
    return digits_of("\n".join(map(str, said)))
