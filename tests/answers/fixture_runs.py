"""Runs made up for tests: written as attnbench run writes them, with samples of a known distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.measure.status import Status
from attnbench.measure.time import Sample, summarise
from attnbench.results.record import Record
from attnbench.results.store import RunFolder
from attnbench.suite.cell import METHOD_VERSION, Cell, Level, Pass

MACHINE = {
    "device": "cpu",
    "processor": "Some Processor",
    "cores": 2,
    "memory_bytes": 25_276_502_016,
    "system": "Linux x86_64",
    "instructions": "AVX512 avx512f",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
}


@dataclass
class Row:
    """One cell of such a run. ``seconds`` is its true time; each visit is ``drift`` off, each sample ``noise``."""

    variant: str = "softmax"
    n: int = 64
    seconds: float | None = 1e-3
    noise: float = 0.01
    drift: float = 0.005
    visits: tuple[float, ...] = ()
    """True time of each visit, with neither drift nor noise, instead of ``seconds``."""
    felt: float = 1.0
    """How much of a slow-down of the machine its time follows, on the log scale."""
    peak: int | None = 4096
    error: float | None = None
    error_std: float = 0.0
    status: Status = Status.OK
    reason: str = ""
    sweep: str = "w"
    level: Level = "operator"
    pass_: Pass = "forward"
    causal: bool = False
    columns: dict[str, Any] = field(default_factory=dict)

    def cell(self, suite: str) -> Cell:
        shape = Shape(seq_len=self.n, heads=2, head_dim=8, causal=self.causal)
        variant = parse_spec(self.variant)
        return Cell(suite, self.sweep, variant, shape, level=self.level, pass_=self.pass_)


def environment(*, method: int = METHOD_VERSION, threads: int = 1, **machine: Any) -> dict[str, Any]:
    """``environment.json`` of a run on :data:`MACHINE`, with other facts where they are given."""
    products = {name: machine.pop(name, "default") for name in ("float32_products", "window_products")}
    return {
        "method_version": method,
        "machine_id": "cafe0001",
        "threads": threads,
        "process": machine.pop("process", "tuned"),
        "environment": {**MACHINE, **machine},
        **products,
    }


def write_run(
    path: Path,
    rows: Sequence[Row],
    *,
    rounds: int = 5,
    samples: int = 8,
    seed: int = 0,
    suite: str = "s",
    speeds: Sequence[float] | None = None,
    waited: float | None = None,
    about: dict[str, Any] | None = None,
) -> Path:
    """Write a run with these rows, ``samples`` samples in each of ``rounds`` visits.

    Args:
        waited: share of each sample for which its threads waited; None as in older versions.
        speeds: the machine has one of these shares of its full speed in each visit, by chance, and a yardstick is
            read beside each sample; None for full speed and no yardstick.
    """
    facts = about or environment()
    folder = RunFolder.create(path, environment=facts, suite_text=f"name: {suite}\n")
    chance = np.random.default_rng(seed)
    with folder.lock():
        written = [_add(folder, row, facts, _Visits(rounds, samples, chance, speeds, waited), suite) for row in rows]
        folder.write_csv(written)
    return path


@dataclass
class _Visits:
    """How each cell is visited."""

    rounds: int
    samples: int
    chance: np.random.Generator
    speeds: Sequence[float] | None
    waited: float | None


def _add(
    folder: RunFolder,
    row: Row,
    facts: dict[str, Any],
    visits: _Visits,
    suite: str,
) -> Record:
    cell = row.cell(suite)
    common = {
        "machine_id": facts["machine_id"],
        "torch_version": facts["environment"]["torch"],
        "threads": facts["threads"],
        "process": facts["process"],
        "method_version": facts["method_version"],
    }
    record = Record.of(cell, row.status, row.reason, **common)
    if row.status is Status.OK:
        record.peak_bytes, record.rel_error = row.peak, row.error
        if row.error is not None:
            record.error_kind, record.error_draws, record.rel_error_std = "approximation", 5, row.error_std
    if row.status is Status.OK and (row.visits or row.seconds is not None):
        _add_time(folder, record, row, visits)
    for name, value in row.columns.items():
        setattr(record, name, value)
    folder.add(record)
    return record


def _add_time(folder: RunFolder, record: Record, row: Row, how: _Visits) -> None:
    visits, chance, rounds = [], how.chance, len(row.visits) or how.rounds
    for round_ in range(rounds):
        share = float(chance.choice(how.speeds)) if how.speeds else 1.0
        drift, noise = (0.0, 0.0) if row.visits else (row.drift, row.noise)
        seconds = row.visits[round_] if row.visits else row.seconds or 0.0
        speed = seconds / share**row.felt * (1 + drift * chance.standard_normal())
        yardstick = (2e-4 / share, 5e-5 / share) if how.speeds else None
        lasted = [float(speed * (1 + noise * abs(chance.standard_normal()))) for _ in range(how.samples)]
        waits = [None if how.waited is None else how.waited * one for one in lasted]
        visits.append([Sample(one, 1, yardstick=yardstick, waited=w) for one, w in zip(lasted, waits, strict=True)])
        taken = [sample.to_json() for sample in visits[-1]]
        folder.append("samples.jsonl", [{"cell_id": record.cell_id, "round": round_, "samples": taken}])
    summary = summarise(visits)
    record.time_median_s, record.time_min_s, record.time_iqr_s = summary.median, summary.minimum, summary.iqr
    record.time_ci_low_s, record.time_ci_high_s = summary.interval or (None, None)
    record.time_samples, record.time_rounds = summary.used, rounds


def copy_with(old: Path, new: Path, variant: str, factor: float) -> Path:
    """A copy of the run ``old``, in which every call of ``variant`` took ``factor`` times as long."""
    before = RunFolder(old)
    folder = RunFolder.create(new, environment=before.environment, suite_text=(old / "suite.yaml").read_text())
    records = before.records()
    with folder.lock():
        for cell_id, rounds in before.samples().items():
            times = factor if records[cell_id].variant == variant else 1.0
            for round_, taken in rounds.items():
                changed = [{**sample, "seconds": sample["seconds"] * times} for sample in taken]
                folder.append("samples.jsonl", [{"cell_id": cell_id, "round": round_, "samples": changed}])
        for record in records.values():
            if record.variant == variant and record.time_median_s is not None:
                for name in ("time_median_s", "time_ci_low_s", "time_ci_high_s", "time_iqr_s", "time_min_s"):
                    setattr(record, name, getattr(record, name) * factor)
                for name in ("examples_per_s", "tokens_per_s", "flops_per_s", "bytes_per_s", "peak_fraction"):
                    if (rate := getattr(record, name)) is not None:
                        setattr(record, name, rate / factor)
            folder.add(record)
        folder.write_csv(list(records.values()))
    return new
