"""Scores of trainings: what the figure says of them, and what it does not dare to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from attnbench.errors import UsageError
from attnbench.figures import draw
from attnbench.figures.kit.page import NothingToDraw
from attnbench.figures.kit.style import CAPTIONS
from attnbench.figures.published.lra import TASKS, read_published, read_rescored
from attnbench.figures.scores import draw_scores
from attnbench.measure.status import Status
from attnbench.results.frame.scored import means, problems, short_tasks
from attnbench.results.frame.settings import timed
from tests.figures.training_rows import CHANCE, TRUTH, frame_of, step, suite_rows, training


@pytest.fixture(scope="module")
def frame(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    rows = suite_rows()
    at = {"task": "digits", "rate": 2e-3}
    rows += [training("bigbird:block=2", None, Status.UNSUPPORTED, "blocks too small", task=t) for t in CHANCE]
    rows += [training("reformer", None, Status.NONFINITE, "loss is NaN at step 40", seed=s, **at) for s in (0, 1)]
    rows += [training("reformer", v, rate=8e-3, seed=s) for s, v in enumerate((0.7, 0.2))]
    return frame_of(rows, tmp_path_factory.mktemp("run"))


def panels(figure: Figure) -> list[Any]:
    return [ax for ax in figure.axes if ax.get_xlabel() == "score"]


def test_each_task_has_a_panel_and_the_mean_comes_last(frame: pd.DataFrame, words: Any) -> None:
    figure = draw_scores(frame)
    assert len(panels(figure)) == 4
    said = words(figure).splitlines()
    heads = [said.index(name) for name in ("recall", "copy", "digits", "mean of the tasks")]
    assert heads == sorted(heads)


def test_a_heading_has_only_the_options_that_tell_its_task_from_others_of_its_name() -> None:
    filler, long, copy = (
        "recall:form=filler,ids=1,pairs=16",
        "recall:form=long,ids=1,pairs=8",
        "copy:symbols=16,test=512",
    )
    assert short_tasks([filler, copy]) == {filler: "recall", copy: "copy"}
    assert short_tasks([filler, long]) == {filler: "recall:form=filler,pairs=16", long: "recall:form=long,pairs=8"}


def test_who_was_trained_on_one_task_only_is_not_said_to_lack_seeds(tmp_path: Path, words: Any) -> None:
    both, once = ["digits", "copy:symbols=16"], ["copy:symbols=16"]
    rows = suite_rows(["softmax", "linear"], both, seeds=2) + suite_rows(["local:block=16"], once, seeds=2)
    said = " ".join(words(draw_scores(frame_of(rows, tmp_path))).split())
    assert "Not in the mean, since trained on one task only: local" in said
    assert "for want of the same seeds" not in said


def test_there_is_no_mean_where_a_task_lacks_a_seed(tmp_path: Path, words: Any) -> None:
    rows = suite_rows(["softmax", "linear"], ["digits"], seeds=3) + suite_rows(["softmax", "linear"], seeds=2)[:6]
    figure = draw_scores(frame_of(rows, tmp_path))
    assert len(panels(figure)) == 2
    assert "No mean over tasks: no variant has the same seeds on each task of one model." in words(figure)


def test_variants_stand_from_the_best_mean_down(frame: pd.DataFrame) -> None:
    for one in problems(frame):
        scores = [part.over_seeds.mean for part in one.parts]
        assert scores == sorted(scores, reverse=True)
        assert one.parts[0].label == "softmax"


def test_a_verdict_stands_only_where_the_interval_excludes_zero(tmp_path: Path, words: Any) -> None:
    values = {"softmax": (0.50, 0.52, 0.54), "linear": (0.80, 0.81, 0.85), "local": (0.40, 0.60, 0.55)}
    rows = [training(name, v, seed=s, protocol="fixed") for name, three in values.items() for s, v in enumerate(three)]
    said = words(draw_scores(frame_of(rows, tmp_path))).splitlines()
    assert "+0.300 better" in said
    assert "−0.003" in said
    assert not any("−0.003 " in line for line in said)


def test_one_seed_allows_no_verdict_and_says_so(tmp_path: Path, words: Any) -> None:
    rows = [training(name, v, protocol="fixed") for name, v in (("softmax", 0.5), ("linear", 0.9))]
    figure = draw_scores(frame_of(rows, tmp_path))
    assert "+0.400" in words(figure).splitlines()
    assert "excludes 0, never with one seed" in CAPTIONS[figure].notes[0]
    assert "+0.400 better" not in words(figure)
    assert "interval over test examples" in words(figure)
    said = words(figure).replace("\n", " ")
    assert "Nothing could be compared with softmax" in said
    assert "worse" not in said.partition("Nothing")[2].partition("Right")[0]


def test_who_is_not_above_identity_is_hollow(frame: pd.DataFrame) -> None:
    figure = draw_scores(frame)
    (recall,) = [one for one in problems(frame) if one.task.startswith("recall")]
    faces = {
        line.get_ydata()[0]: line.get_markerfacecolor() for line in panels(figure)[0].lines if line.get_marker() == "o"
    }
    places = {part.label.partition(":")[0].rstrip("†"): place for place, part in enumerate(recall.parts)}
    assert {name for name, place in places.items() if faces[place] == "#ffffff"} == {
        "identity", "local", "longformer", "sinkhorn", "synthesizer", "reformer",
    }  # fmt: skip


def test_bands_and_lines_are_softmax_chance_and_identity(frame: pd.DataFrame) -> None:
    digits = panels(draw_scores(frame))[2]
    (one,) = [one for one in problems(frame) if one.task == "digits"]
    assert one.reference is not None
    assert one.no_mixing is not None
    (band,) = digits.patches
    assert (band.get_x(), band.get_x() + band.get_width()) == pytest.approx(one.reference.ends)
    upright = {
        line.get_linestyle(): line.get_xdata()[0] for line in digits.lines if line.get_linestyle() in (":", "--")
    }
    assert upright == {":": pytest.approx(0.1), "--": pytest.approx(one.no_mixing.over_seeds.mean)}


def test_what_failed_is_named_with_its_reason(frame: pd.DataFrame, words: Any) -> None:
    said = words(draw_scores(frame)).replace("\n", " ")
    assert "No score — unsupported: bigbird:block=2 — blocks too small" in said
    assert "No score on digits — nonfinite: reformer — loss is NaN at step 40" in said
    assert "reformer on recall: at 0.008 unstable: 0.20 to 0.70 over seeds" in said


def test_the_subtitle_names_model_budget_protocol_and_seeds(frame: pd.DataFrame, words: Any) -> None:
    said = words(draw_scores(frame)).replace("\n", " ")
    assert "2 layers · 2 heads × 32 · FFN 128 · n = 64" in said
    assert "400 steps · of the rates 0.002, 0.008 the best by mean validation score" in said
    assert "protocol sweep · 2 to 3 seeds" in said


def test_two_models_never_share_a_panel(tmp_path: Path, words: Any) -> None:
    rows = suite_rows(["softmax", "linear"], ["digits"]) + suite_rows(["softmax", "linear"], ["digits"], layers=4)
    figure = draw_scores(frame_of(rows, tmp_path))
    assert len(panels(figure)) == 2
    assert {"digits · 2 layers", "digits · 4 layers"} <= set(words(figure).splitlines())


def test_the_mean_of_a_label_is_of_its_tasks(frame: pd.DataFrame) -> None:
    (mean,) = means(problems(frame))
    (softmax,) = [part for part in mean.parts if part.label == "softmax"]
    each = [part.over_seeds.mean for one in problems(frame) for part in one.parts if part.label == "softmax"]
    assert softmax.over_seeds.mean == pytest.approx(sum(each) / 3)
    assert "reformer" not in {part.label for part in mean.parts}


@pytest.mark.parametrize("width", ["page", "column"])
def test_nothing_written_lies_on_anything_else(frame: pd.DataFrame, width: str, faults: Any) -> None:
    assert faults(draw(frame, figures=["scores"], width=width)["scores"]) == []


def test_published_scores_stand_in_panels_of_their_own(frame: pd.DataFrame, words: Any, faults: Any) -> None:
    alone, beside = draw_scores(frame), draw_scores(frame, overlay="published")
    assert [ax.get_xlim() for ax in panels(alone)] == [ax.get_xlim() for ax in panels(beside)]
    assert all(ax.get_xlim()[1] < 2 for ax in panels(beside))  # theirs are in %
    assert {"Nyströmformer (64, conv 35)", "Sparse Transformer"} <= set(words(beside).splitlines())
    assert faults(beside) == []


def test_a_column_is_too_narrow_for_what_was_published(frame: pd.DataFrame) -> None:
    with pytest.raises(UsageError, match="too wide for one column"):
        draw(frame, figures=["scores"], width="column", overlay="published")
    with pytest.raises(UsageError, match="overlay must be published"):
        draw_scores(frame, overlay="theirs")


def test_each_average_of_the_repeated_tables_is_the_mean_of_its_tasks() -> None:
    table = read_rescored()
    tasks = [name for name in TASKS if name != "average"]
    assert (table[tasks].mean(axis=1) - table["average"]).abs().max() < 0.006
    assert table.groupby("source", sort=False).size().tolist() == [5, 9]
    assert set(table["family"]) <= set(read_published()["family"])


def test_trainings_are_no_times_of_other_figures(tmp_path: Path) -> None:
    rows = [step("softmax", 0.1, 1e6)]
    rows += [training("softmax", 0.9, columns={"peak_bytes": 5}), training("local", None, Status.ERROR, "no", seed=1)]
    assert timed(frame_of(rows, tmp_path))["sweep"].tolist() == ["speed"]


def test_a_table_without_trainings_has_no_scores(tmp_path: Path) -> None:
    frame = frame_of([step("softmax", 0.1, 1e6)], tmp_path)
    with pytest.raises(NothingToDraw):
        draw_scores(frame)


def test_failed_trainings_alone_are_nothing_to_draw_and_the_reason_is_said(tmp_path: Path) -> None:
    frame = frame_of([training("softmax", None, Status.UNSUPPORTED, "data not here")], tmp_path)
    with pytest.raises(NothingToDraw, match="data not here"):
        draw_scores(frame)


def test_every_label_of_the_suite_is_in_each_panel(frame: pd.DataFrame) -> None:
    for one in problems(frame):
        assert {part.label.rstrip("†") for part in one.parts} >= TRUTH.keys()
