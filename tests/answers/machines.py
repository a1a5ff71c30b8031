"""Runs of a small suite on machines that answer at once, so that what comes after measuring can be tested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnbench.harness import runner
from attnbench.harness.outside.isolation import CellFailed
from attnbench.harness.outside.visit import HoldSetting, Verdict
from attnbench.harness.plan import Options, make_plan
from attnbench.measure.machine import id_of
from attnbench.measure.status import Status
from attnbench.results.record import HELD, Record
from attnbench.suite.cell import Cell

SUITE = """\
name: s
sweeps: [{name: w, matrix: {variant: [softmax, linear], seq_len: [2, 4, 8, 16]}}]
"""


def facts(index: int = 0, **changes: Any) -> dict[str, Any]:
    """What machine ``index`` of one class says of itself; they differ by kilobytes of memory."""
    return {
        "device": "cpu",
        "processor": "AMD EPYC",
        "cores": 2,
        "memory_bytes": 25_276_502_016 + 4096 * index,
        "system": "Linux x86_64",
        "instructions": "AVX512 avx512f",
        "python": "3.11.7",
        "torch": "2.13.0",
        **changes,
    }


def state(index: int = 0, described: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """What the measuring process on that machine says."""
    described = described or facts(index)
    return {
        "machine_id": id_of(described),
        "process": "tuned",
        "process_notes": [],
        "environment": described,
        "float32_products": "oneDNN",
        "matmul_rate": {"float32": 2e11},
        "copy_rates": [[262_144, 5e10]],
        "noise_floor": 0.01,
        **changes,
    }


class Machine:
    """Answers at once as a machine with this state would."""

    traces = ""
    served = 0

    def __init__(self, state: dict[str, Any], fails: Callable[[Cell], bool]) -> None:
        self.state, self.fails = state, fails

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self) -> dict[str, Any]:
        return self.state

    def stop(self) -> None: ...

    def said(self) -> list[str]:
        return ["the last line"]

    def ask(
        self, request: dict[str, Any], timeout: float, *, meanwhile: Callable[[], None] = lambda: None, **_: object
    ) -> dict[str, Any]:
        meanwhile()
        cell, round_ = Cell.from_json(request["cell"]), request["round"]
        if self.fails(cell):
            raise CellFailed(Status.CRASH, "it ended", ["the last line"])
        seconds = cell.shape.N / 7
        columns = {"time_median_s": seconds, "time_rounds": round_ + 1, "process": "tuned"}
        return {
            "record": Record.of(cell, Status.OK, **columns).to_json(),
            "samples": {"cell_id": cell.cell_id, "round": round_, "samples": [{"seconds": seconds, "calls": 1}]},
        }


def measuring(folder: Path, patch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that runs the suite, or a part of it, on a machine and gives the run's folder below ``folder``."""
    patch.setattr(runner, "load_warning", lambda: None)
    patch.setattr(HoldSetting, "ask", lambda *_, **__: Verdict(HELD))
    file = folder / "s.yaml"
    file.write_text(SUITE)
    count = iter(range(1000))

    def measure(
        on: dict[str, Any] | None = None,
        *,
        suite: str | Path = file,
        fails: Callable[[Cell], bool] = lambda cell: False,
        **options: Any,
    ) -> Path:
        machine = on or state()
        patch.setattr(runner, "machine_id", lambda device: machine["machine_id"])
        out = folder / "runs" / str(next(count))
        plan = make_plan(suite, Options(**{"device": "cpu", "out": out, "threads": 2, "rounds": 2, **options}))
        return runner.execute(plan, worker=Machine(machine, fails))[0].path  # type: ignore[arg-type]

    return measure


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
