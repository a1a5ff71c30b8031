"""``match --from RUN --score``: only models that a finished run trained, with the times of the same models."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest

from attnbench.answers.match.budget import Budget
from attnbench.answers.match.from_run import match_scores
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.errors import ResultsError, UsageError
from attnbench.measure.status import Status
from attnbench.results.record import COLUMNS, Record
from attnbench.suite.cell import Cell, ModelSize, Training

SCORES = {64: 0.7, 128: 0.85, 256: 0.95}
"""Features -> score, to which each seed adds a thousandth."""


def cell(label: str, n: int, task: str, **more: Any) -> Cell:
    shape = Shape(batch=4, heads=2, seq_len=n, head_dim=8)
    size = ModelSize(layers=1, ffn=16, positions="sinusoid")
    return Cell(
        "s", "w", parse_spec(label), shape, level="model", pass_="training", model=size, task=parse_spec(task), **more
    )


def trained(label: str, score: float, n: int = 64, task: str = "recall", rate: float = 0.01) -> list[dict[str, Any]]:
    rows = []
    for seed in range(3):
        rules = Training(steps=100, learning_rate=rate)
        one = score + 0.001 * seed
        columns = {"score": one, "score_low": one, "score_high": one, "val_score": one, "test_examples": 10_000}
        rows.append(
            Record.of(cell(label, n, task, training=rules, seed=seed, measure=("score",)), Status.OK, **columns)
        )
    return [row.to_json() for row in rows]


def timed(label: str, seconds: float, n: int = 64, task: str = "recall", **columns: Any) -> dict[str, Any]:
    times = {"time_median_s": seconds, "time_ci_low_s": 0.9 * seconds, "time_ci_high_s": 1.1 * seconds}
    return {**Record.of(cell(label, n, task), Status.OK, **times, peak_bytes=1000).to_json(), **columns}


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=[*COLUMNS])
    for name in ("time_median_s", "time_ci_low_s", "time_ci_high_s", "peak_bytes", "score"):
        frame[name] = frame[name].astype(float)
    return frame.assign(error_kind="", protocol=frame["protocol"].fillna(""), reason=frame["reason"].fillna(""))


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    found = trained("softmax", 0.99)
    for features, score in SCORES.items():
        label = f"performer:features={features}" if features != 256 else "performer"
        found += [*trained(label, score), timed(label, 1e-4 * features)]
    return found


def test_the_cheapest_trained_setting_that_reaches_the_score_is_chosen_with_the_time_of_its_model(
    rows: list[dict[str, Any]],
) -> None:
    found = match_scores(table(rows), ["performer", "softmax"], Budget("score", 0.8))
    performer, softmax = found.found
    assert performer.chosen is not None
    assert (performer.chosen.label, performer.chosen.value) == ("performer:features=128", 128)
    assert performer.chosen.score == pytest.approx(0.851)
    assert performer.chosen.time == pytest.approx(0.0128)
    assert [point.value for point in performer.tries] == [64, 128, 256]
    assert (softmax.chosen is not None, softmax.tries[0].time) == (True, None)
    assert found.sentences()[0].startswith("performer:features=128 reaches score 0.8: 0.851 (0.849 to 0.853)")
    row = found.to_rows()[0]
    assert (row["seq_len"], row["layers"], row["steps"], row["seeds"]) == (64, 1, 100, 3)
    json.dumps(found.to_json())


def test_a_score_that_no_trained_setting_reaches_is_an_answer(rows: list[dict[str, Any]]) -> None:
    found = match_scores(table(rows), [], Budget("score", 0.97))
    assert [one.variant for one in found.found] == ["softmax", "performer"]
    assert found.sentences()[1] == ("performer does not reach score 0.97: best 0.951 (0.949 to 0.953) at features=256")


def test_times_of_another_model_are_not_taken(rows: list[dict[str, Any]]) -> None:
    others = [row for row in rows if row["score"] is not None]
    others += [timed("performer", 1.0, layers=2), timed("performer", 1.0, n=128), timed("performer", 1.0, task="copy")]
    found = match_scores(table(others), ["performer"], Budget("score", 0.8))
    assert [point.time for point in found.found[0].tries] == [None] * 3
    (said,) = found.warnings
    assert said.startswith("no times of model training of these models; it has --level model --pass training")


def test_the_task_and_the_length_are_those_asked_for_else_those_with_the_most_settings(
    rows: list[dict[str, Any]],
) -> None:
    both = table([*trained("performer", 0.3, n=128), *trained("performer", 0.4, task="copy"), *rows])

    def best(**how: Any) -> float | None:
        (one,) = match_scores(both, ["performer"], Budget("score", 0.99), **how).found
        point = one.best(Budget("score", 0.99))
        return None if point is None else point.score

    assert best() == pytest.approx(0.951)
    assert best(n=128) == pytest.approx(0.301)
    assert best(task="copy") == pytest.approx(0.401)
    with pytest.raises(UsageError, match="no trainings at n = 77; there are: 64, 128"):
        best(n=77)
    with pytest.raises(UsageError, match="--task listops: nothing was trained on it; there are: copy, recall"):
        best(task="listops")


def test_a_run_without_a_training_is_refused() -> None:
    with pytest.raises(ResultsError, match="the run has no score; train first"):
        match_scores(table([timed("performer", 1.0)]), ["performer"], Budget("score", 0.9))
