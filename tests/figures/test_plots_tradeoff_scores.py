"""Speed and score of one model in one figure: which rows meet, and which do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from attnbench.figures import draw
from attnbench.figures.kit.bubbles import FRONT
from attnbench.figures.tradeoff import applies, draw_tradeoff
from attnbench.measure.status import Status
from attnbench.results.frame.agreement import agreement
from attnbench.results.frame.scored import problems
from attnbench.results.frame.settings import settings, timed
from attnbench.results.record import Record
from tests.figures.training_rows import frame_of, step, suite_rows, training

RECALL = "recall:pairs=16"
SECONDS = {
    "softmax": 0.30, "identity": 0.02, "performer:features=32": 0.10, "performer:features=64": 0.12, "linear": 0.05,
    "linformer:rank=16": 0.06, "local:block=16": 0.04, "synthesizer": 0.20,
}  # fmt: skip


def rows_of(task: str | None = RECALL, **how: Any) -> list[Record]:
    steps = [step(label, seconds, 1e7 * seconds, task=task, **how) for label, seconds in SECONDS.items()]
    return [*suite_rows(SECONDS, [RECALL]), *steps]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., pd.DataFrame]:
    return lambda rows: frame_of(rows, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def frame(make: Any) -> pd.DataFrame:
    return make(rows_of())


def places(figure: Figure) -> dict[str, tuple[float, float]]:
    circles = [one for one in figure.axes[0].collections if isinstance(one, PathCollection)]
    return {str(one.get_label()): tuple(one.get_offsets()[0]) for one in circles}


def test_where_a_task_was_timed_and_trained_on_the_score_is_the_vertical_axis(frame: pd.DataFrame, words: Any) -> None:
    assert applies(frame)
    figure = draw(frame)["tradeoff"]
    assert figure.axes[0].get_ylabel() == "score"
    assert "the model that was timed" in words(figure).replace("\n", " ")
    at = places(figure)
    assert at["softmax"][1] > at["performer:features=64"][1] > at["linear"][1] > at["local:block=16"][1]


def test_the_scale_is_linear_and_up_is_better(frame: pd.DataFrame) -> None:
    (one,) = problems(frame)
    y = {part.label: part.over_seeds.mean for part in one.parts}
    at = {label: place[1] for label, place in places(draw_tradeoff(frame)).items()}
    assert at.keys() == y.keys()
    low, high = min(y, key=y.__getitem__), max(y, key=y.__getitem__)
    for label, value in y.items():
        share = (value - y[low]) / (y[high] - y[low])
        assert at[label] == pytest.approx(at[low] + share * (at[high] - at[low]))


def test_only_who_is_above_identity_may_stand_on_the_front(frame: pd.DataFrame, words: Any) -> None:
    figure = draw_tradeoff(frame)
    (front,) = [line for line in figure.axes[0].lines if line.get_label() == FRONT]
    at = places(figure)
    on = {label for label, (x, _) in at.items() if any(math.isclose(x, float(one)) for one in front.get_xdata())}
    # local is the fastest, and has learnt no more than identity; linformer and synthesizer are beaten.
    assert on == {"softmax", "performer:features=64", "performer:features=32", "linear"}
    assert "compete: 5 of 7 methods" in words(figure).replace("\n", " ")


def test_chance_and_identity_are_lines_and_softmax_is_a_band(frame: pd.DataFrame, words: Any) -> None:
    figure = draw_tradeoff(frame)
    said = words(figure)
    assert "chance: 0.15" in said
    assert "identity trained on the same task: 0.1" in said
    (band,) = [one for one in figure.axes[0].patches if one.get_alpha() == 0.09]
    assert band.get_y() < places(figure)["softmax"][1] < band.get_y() + band.get_height()


def test_error_bars_are_intervals_over_seeds(frame: pd.DataFrame) -> None:
    agreed = agreement(frame, "score", None, settings(timed(frame))[0])(64)
    (one,) = problems(frame)
    ends = {part.label: part.ends for part in one.parts}
    for label, low, high in agreed.rows[["label", "y_low", "y_high"]].itertuples(index=False):
        assert (low, high) == ends[label]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"layers": 4}, "timed: 4 layers; scored: 2 layers"),
        ({"n": 128}, "timed: n = 128; scored: n = 64"),
        ({"task": None}, "timed: no task; scored: recall"),
        ({"task": "copy:symbols=16"}, "timed: copy:symbols=16"),
    ],
)
def test_speed_and_score_of_two_models_are_not_joined_in_silence(
    make: Any, how: dict[str, Any], said: str, words: Any
) -> None:
    figure = draw_tradeoff(make(rows_of(**how)), y="score")
    told = words(figure).replace("\n", " ")
    assert "NOT ONE MODEL" in told
    assert said in told


def test_options_that_scaled_with_the_length_do_not_meet(make: Any, words: Any) -> None:
    rows = [*suite_rows(["softmax", "local:block=16"], [RECALL]), step("softmax", 0.3, 1e6, task=RECALL)]
    rows += [step("local:block=50", 0.1, 1e6, task=RECALL)]
    figure = draw_tradeoff(make(rows))
    assert "not measured" in [tick.get_text().replace("\n", " ") for tick in figure.axes[0].get_yticklabels()]
    assert "Scored, not timed alike: local:block=16." in words(figure)


def test_rows_timed_on_random_bytes_stay_errors_by_default(make: Any) -> None:
    frame = make(rows_of(task=None))
    assert not applies(frame)


def test_a_label_without_a_score_is_named_with_its_reason(make: Any, words: Any) -> None:
    failed = [training("bigbird:block=2", None, Status.UNSUPPORTED, "too few blocks", task=RECALL)]
    figure = draw_tradeoff(make([*rows_of(), *failed, step("bigbird:block=2", 0.2, 1e6, task=RECALL)]))
    assert "No score — unsupported: bigbird:block=2 — too few blocks" in words(figure)


def test_without_a_task_of_its_own_a_speed_stands_beside_the_mean_over_tasks(make: Any, words: Any) -> None:
    labels = ["softmax", "linear"]
    rows = [*suite_rows(labels), *(step(label, 0.1, 1e6, task=None) for label in labels)]
    frame = make(rows)
    agreed = agreement(frame, "score", None, settings(timed(frame))[0])(64)
    scores = {label: [] for label in labels}
    for one in problems(frame):
        for part in one.parts:
            scores[part.label].append(part.over_seeds.mean)
    y = dict(zip(agreed.rows["label"], agreed.rows["y"], strict=True))
    assert y == pytest.approx({label: sum(three) / 3 for label, three in scores.items()})
    assert "timed: no task; scored: mean of the tasks" in agreed.said


def test_a_table_without_scores_says_so(run: Any) -> None:
    frame = run.table([run.row("softmax", time_median_s=0.1, peak_bytes=1e6)])
    assert agreement(frame, "score", None, settings(timed(frame))[0])(1024).said == "no score measured"


@pytest.mark.parametrize("task", [RECALL, None])
@pytest.mark.parametrize("width", ["page", "column"])
def test_nothing_written_lies_on_anything_else(make: Any, width: str, task: str | None, faults: Any) -> None:
    figure = draw(make(rows_of(task=task)), figures=["tradeoff"], width=width, y="score")["tradeoff"]
    assert faults(figure) == []


def test_published_points_keep_their_own_panel_beside_scores(frame: pd.DataFrame) -> None:
    alone, beside = draw_tradeoff(frame), draw_tradeoff(frame, overlay="published")
    assert places(alone).keys() == places(beside).keys()
    assert [ax.get_ylabel() for ax in beside.axes if ax.get_ylabel()] == [
        "score",
        "average score on the five tasks (%)",
    ]


def test_each_task_that_was_timed_has_a_panel_that_names_it_once(make: Any, words: Any, faults: Any) -> None:
    labels, tasks = ["softmax", "linear", "identity"], [RECALL, "digits"]
    steps = [step(label, SECONDS[label], 1e6, task=task) for task in tasks for label in labels]
    others = [step(label, SECONDS[label], 1e6, task=None, n=128) for label in labels]
    figure = draw_tradeoff(make([*suite_rows([*labels, "local:block=16"], tasks), *steps, *others]))
    assert len([ax for ax in figure.axes if ax.get_ylabel() == "score"]) == 2
    said = words(figure)
    assert said.replace("\n", " ").count("digits") == 1
    assert said.count("Scored, not timed alike: local:block=16.") == 1
    assert "Timed, not scored: 3 rows of other inputs; --y rel_error draws them." in said
    assert faults(figure) == []
