from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnbench.cell import Cell
from attnbench.record import Record
from attnbench.run import runner
from attnbench.run.isolation import CellFailed
from attnbench.status import Status

Answer = Callable[[Cell, int], Record | CellFailed | None]


class Instant:
    """Stands for the measuring process: answers at once, the same for the same cell, or what it is told to answer."""

    def __init__(self, answer: Answer = lambda cell, round_: None) -> None:
        self.answer = answer
        self.visits: list[tuple[str, int]] = []
        self.held_to = list[str]()
        """Variants that were held to their laws."""
        self.stops = 0
        self.traces = ""

    def __enter__(self) -> Instant:
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
        if request["do"] == "setting":
            self.held_to.append(request["cell"]["variant"]["name"])
            return {"tried": 1, "fault": None}
        cell, round_ = Cell.from_json(request["cell"]), request["round"]
        self.visits.append((cell.label, round_))
        answer = self.answer(cell, round_)
        if isinstance(answer, CellFailed):
            raise answer
        if answer is not None:
            return {"record": answer.to_json(), "samples": None}
        seconds = cell.shape.N / 7
        columns = {"time_median_s": seconds, "time_rounds": round_ + 1, "process": "tuned"}
        return {
            "record": Record.of(cell, Status.OK, **columns).to_json(),
            "samples": {"cell_id": cell.cell_id, "round": round_, "samples": [{"seconds": seconds, "calls": 1}]},
        }

    def said(self) -> list[str]:
        return ["the last line"]

    def stop(self) -> None:
        self.stops += 1


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> type[Instant]:
    monkeypatch.setattr(runner, "load_warning", lambda: None)
    return Instant


@pytest.fixture
def small_suite(tmp_path: Path) -> Path:
    path = tmp_path / "s.yaml"
    path.write_text("name: s\nsweeps: [{name: w, matrix: {variant: [softmax, linear], seq_len: [2, 4]}}]\n")
    return path
