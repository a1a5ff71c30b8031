"""Stand-ins for the measuring process, which answers at once, and for who watches a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from attnbench.harness.runner import Watcher
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.cell import Cell


class Instant:
    """Gives the same answer whenever it is asked the same. A test that asks for more overrides ``answer``."""

    traces = ""
    served = 0
    compiled = 0.0
    state: ClassVar[dict[str, Any]] = {}
    python: object = None

    def __init__(self, settings: object = None, python: object = None) -> None:
        self.python = python

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self) -> None:
        pass

    def start(self) -> dict[str, Any]:
        return {"machine_id": "m", "process": "tuned", "process_notes": [], "environment": {"torch": "2"}}

    def ask(
        self,
        request: dict[str, Any],
        timeout: float,
        *,
        meanwhile: Callable[[], None] = lambda: None,
        told: Callable[[dict[str, Any]], None] = lambda progress: None,
    ) -> dict[str, Any]:
        meanwhile()
        return self.answer(request)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        cell = Cell.from_json(request["cell"])
        return timed(cell, request["round"], [cell.shape.N / 7])

    def said(self) -> list[str]:
        return ["the last line"]

    def stop(self) -> None:
        pass


class Listening(Watcher):
    """Keeps all messages."""

    def __init__(self) -> None:
        self.numbers: tuple[int, ...] = ()
        """Cells, visits ahead, and cells that were measured before."""
        self.parts: list[str] = []
        self.rows: list[Record] = []
        self.warnings: list[str] = []

    def begun(self, folder: Path, *, cells: int, visits: int, resumed: int) -> None:
        self.numbers = cells, visits, resumed

    def doing(self, cell: Cell, part: str) -> None:
        self.parts.append(part)

    def visited(self, record: Record) -> None:
        self.rows.append(record)

    def warned(self, message: str) -> None:
        self.warnings.append(message)


def timed(cell: Cell, round_: int, seconds: Sequence[float], **columns: Any) -> dict[str, Any]:
    """What a visit answers: a row of status ok, and the samples ``seconds`` of which the middle one is the median."""
    known = {"time_median_s": sorted(seconds)[len(seconds) // 2], "time_rounds": round_ + 1, "process": "tuned"}
    samples = [{"seconds": one, "calls": 1, "switches": 0} for one in seconds]
    return {
        "record": Record.of(cell, Status.OK, **known | columns).to_json(),
        "samples": {"cell_id": cell.cell_id, "round": round_, "samples": samples},
    }
