"""Tables of trainings for a score, as ``run`` would write them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.measure.status import Status
from attnbench.results.read import read_results
from attnbench.results.record import Record
from attnbench.results.store import CURVES, RunFolder
from attnbench.results.table import csv_text
from attnbench.suite.cell import Cell, ModelSize, Training

TRUTH: dict[str, dict[str, float]] = {
    "softmax": {"recall:pairs=16": 0.97, "copy:symbols=16": 0.99, "digits": 0.88},
    "identity": {"recall:pairs=16": 0.13, "copy:symbols=16": 0.06, "digits": 0.38},
    "performer:features=32": {"recall:pairs=16": 0.72, "copy:symbols=16": 0.20, "digits": 0.80},
    "performer:features=64": {"recall:pairs=16": 0.82, "copy:symbols=16": 0.35, "digits": 0.82},
    "nystrom:landmarks=16": {"recall:pairs=16": 0.40, "copy:symbols=16": 0.36, "digits": 0.84},
    "linear": {"recall:pairs=16": 0.50, "copy:symbols=16": 0.54, "digits": 0.79},
    "linformer:rank=16": {"recall:pairs=16": 0.19, "copy:symbols=16": 0.14, "digits": 0.83},
    "local:block=16": {"recall:pairs=16": 0.13, "copy:symbols=16": 0.06, "digits": 0.87},
    "longformer:window=8": {"recall:pairs=16": 0.14, "copy:symbols=16": 0.07, "digits": 0.86},
    "synthesizer": {"recall:pairs=16": 0.13, "copy:symbols=16": 0.98, "digits": 0.86},
    "sinkhorn:block=16": {"recall:pairs=16": 0.13, "copy:symbols=16": 0.10, "digits": 0.85},
}
CHANCE = {"recall:pairs=16": 0.15, "copy:symbols=16": 0.0625, "digits": 0.1}


def cell(
    label: str, task: str | None = "recall:pairs=16", *, seed: int = 0, rate: float = 2e-3, n: int = 64, **how: Any
) -> Cell:
    """What is trained; with ``measure=("time", "memory")`` the timed training step of the same model."""
    layers, protocol, steps = how.pop("layers", 2), how.pop("protocol", "sweep"), how.pop("steps", 400)
    measure = how.pop("measure", ("score",))
    return Cell(
        how.pop("suite", "score-small"), "score" if "score" in measure else "speed", parse_spec(label),
        Shape(seq_len=n, heads=2, head_dim=32, batch=32), level="model", pass_="training", measure=measure,
        model=ModelSize(layers, 128, positions="sinusoid"), task=parse_spec(task) if task else None, seed=seed,
        training=Training(steps=steps, learning_rate=rate, protocol=protocol) if "score" in measure else None, **how,
    )  # fmt: skip


def training(label: str, score: float | None, status: Status = Status.OK, reason: str = "", **how: Any) -> Record:
    """The row of one training."""
    columns = how.pop("columns", {})
    made = cell(label, **how)
    if score is not None:
        task = str(made.task and made.task.label)
        columns = {
            "val_score": score, "score_low": max(score - 0.02, 0.0), "score_high": min(score + 0.02, 1.0),
            "chance_score": CHANCE.get(task, 0.1), "score_kind": "accuracy", "test_examples": 497, **columns,
        }  # fmt: skip
    return Record.of(
        made, status, reason, score=score, params_ratio=1.0, machine_id="3f9c2a71", torch_version="2.13.0", threads=1,
        started_at="2026-11-20T09:40:00", **columns,
    )  # fmt: skip


def step(label: str, seconds: float, peak: float, **how: Any) -> Record:
    """The row of a timed training step."""
    made = cell(label, measure=("time", "memory"), **how)
    return Record.of(
        made, Status.OK, time_median_s=seconds, time_ci_low_s=0.97 * seconds, time_ci_high_s=1.04 * seconds,
        examples_per_s=made.shape.B / seconds, tokens_per_s=made.shape.B * made.shape.N / seconds, peak_bytes=int(peak),
        machine_id="3f9c2a71", torch_version="2.13.0", threads=1, started_at="2026-11-20T09:40:00",
    )  # fmt: skip


def suite_rows(
    labels: Iterable[str] = tuple(TRUTH),
    tasks: Iterable[str] = tuple(CHANCE),
    seeds: int = 3,
    truth: Mapping[str, Mapping[str, float]] = TRUTH,
    **how: Any,
) -> list[Record]:
    """A sweep of two rates with two seeds each, the better one with all of them."""
    rng = random.Random(0)
    rows = []
    for task in tasks:
        for label in labels:
            for rate, worse in ((2e-3, 0.0), (8e-3, 0.05)):
                for seed in range(seeds if not worse else min(seeds, 2)):
                    value = truth[label][task] - worse + rng.gauss(0, 0.012)
                    rows.append(
                        training(label, min(max(round(value, 3), 0.0), 1.0), task=task, seed=seed, rate=rate, **how)
                    )
    return rows


def frame_of(rows: Iterable[Record], folder: Path) -> pd.DataFrame:
    """The table as it comes from a file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.csv").write_text(csv_text(list(rows)), encoding="utf-8")
    return read_results(folder / "results.csv")


def curve(record: Record, evaluations: int = 6) -> dict[str, Any]:
    """A line of ``curves.jsonl``: the score rises towards that of the row."""
    steps, last = record.steps or 400, record.val_score or 0.0
    shares = [(turn + 1) / evaluations for turn in range(evaluations)]
    points = [
        {
            "step": round(steps * share), "train_loss": 2 - share, "val_score": 0.1 + (last - 0.1) * share**0.5,
            "val_loss": 2.1 - share, "learning_rate": 0.002 * (1 - share), "cpu_s": 10 * share,
        }
        for share in shares
    ]  # fmt: skip
    return {"cell_id": record.cell_id, "points": points}


def run_of(rows: Iterable[Record], path: Path) -> pd.DataFrame:
    """The table of a run's folder, with a learning curve for each row with a score."""
    folder = RunFolder.create(path, environment={"run_key": "k"}, suite_text="name: s\n")
    rows = list(rows)
    for one in rows:
        folder.add(one)
    folder.append(CURVES, [curve(one) for one in rows if one.score is not None])
    (path / "results.csv").write_text(csv_text(list(folder.records().values())), encoding="utf-8")
    return read_results(path, warn=lambda line: None)  # times without samples
