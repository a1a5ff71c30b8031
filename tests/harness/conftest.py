from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnbench.harness import runner
from attnbench.harness.outside.isolation import CellFailed
from attnbench.results.record import Record
from attnbench.suite.cell import Cell
from tests.forked import Forked, load
from tests.instant import Instant

Answer = Callable[[Cell, int], Record | CellFailed | None]


class Told(Instant):
    """Answers what it is told to, and counts what it is asked."""

    def __init__(self, answer: Answer = lambda cell, round_: None) -> None:
        self.told = answer
        self.visits: list[tuple[str, int]] = []
        self.held_to = list[str]()
        """Variants that were held to their laws."""
        self.stops = 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"].endswith("HoldSetting"):
            self.held_to.append(request["cell"]["variant"]["name"])
            return {"found": {"tried": 1, "fault": None}}
        cell, round_ = Cell.from_json(request["cell"]), request["round"]
        self.visits.append((cell.label, round_))
        answer = self.told(cell, round_)
        if isinstance(answer, CellFailed):
            raise answer
        return super().answer(request) if answer is None else {"record": answer.to_json(), "samples": None}

    def stop(self) -> None:
        self.stops += 1


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> type[Told]:
    monkeypatch.setattr(runner, "load_warning", lambda: None)
    return Told


@pytest.fixture
def small_suite(tmp_path: Path) -> Path:
    path = tmp_path / "s.yaml"
    path.write_text("name: s\nsweeps: [{name: w, matrix: {variant: [softmax, linear], seq_len: [2, 4]}}]\n")
    return path


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring processes of one thread are forks of this one. Unlike those of ``forks`` they measure the machine."""
    load()
    monkeypatch.setattr(subprocess, "Popen", Forked)
