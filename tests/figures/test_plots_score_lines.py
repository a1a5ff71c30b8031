"""Learning curves, and scores over bytes of state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attnbench.errors import CorruptResults
from attnbench.figures import draw
from attnbench.figures.curves import draw_curves
from attnbench.figures.kit.page import NothingToDraw
from attnbench.figures.recall import draw_recall
from attnbench.measure.status import Status
from attnbench.results.read import read_curves, read_results
from tests.figures.training_rows import frame_of, run_of, step, suite_rows, training

LABELS = ["softmax", "linear", "performer:features=32", "performer:features=64", "identity"]
BYTES = {"softmax": 32768, "linear": 4096, "performer:features=32": 4096, "performer:features=64": 8192}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return run_of(suite_rows(LABELS), tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    rows = []
    for label, score in zip(LABELS, (0.97, 0.5, 0.6, 0.8, 0.13), strict=True):
        columns = {"state_bytes": BYTES.get(label)}
        rows += [training(label, score + 0.01 * seed, seed=seed, columns=columns) for seed in range(3)]
    return frame_of(rows, tmp_path_factory.mktemp("kept"))


def panels(figure: Any) -> list[Any]:
    return [ax for ax in figure.axes if ax.get_xlabel()]


def marked(ax: Any) -> list[Any]:
    return [line for line in ax.lines if line.get_marker() not in ("None", "", None)]


def test_each_task_has_its_curves_and_a_line_for_each_variant(trained: pd.DataFrame, words: Any) -> None:
    figure = draw(trained, figures=["curves"])["curves"]
    assert len(panels(figure)) == 3
    assert all(len(marked(ax)) == len(LABELS) for ax in panels(figure))
    assert {"recall", "copy", "digits", "linear", "performer:features=32"} <= set(words(figure).splitlines())


def test_a_curve_is_of_the_rate_that_counts_and_ends_at_the_mean_of_its_seeds(trained: pd.DataFrame) -> None:
    ok = trained[(trained["task"] == "digits") & (trained["label"] == "linear") & (trained["learning_rate"] == 2e-3)]
    figure = draw_curves(trained)
    ends = [line.get_ydata()[-1] for line in marked(panels(figure)[2])]
    assert any(end == pytest.approx(ok["val_score"].mean()) for end in ends)
    assert len(ok) == 3


def test_single_seeds_stand_thin_behind_their_mean(trained: pd.DataFrame) -> None:
    ax = panels(draw_curves(trained))[0]
    thin = [line for line in ax.lines if line.get_linewidth() == 0.7]
    assert len(thin) == 3 * len(LABELS)
    assert max(line.get_zorder() for line in thin) < min(line.get_zorder() for line in marked(ax))


def test_curves_are_found_beside_the_results_of_each_of_several_runs(tmp_path: Path) -> None:
    for name in ("monday", "tuesday"):
        run_of(suite_rows(["softmax", "linear"], ["digits"], seeds=2), tmp_path / name)
    frame = read_results([tmp_path / "monday", tmp_path / "tuesday"])
    assert {run for run, _ in read_curves(frame)} == {"monday", "tuesday"}
    figure = draw_curves(frame)
    assert [len(marked(ax)) for ax in panels(figure)] == [2, 2]


def test_a_table_away_from_its_run_has_no_curves_and_says_where_they_are(tmp_path: Path) -> None:
    frame = frame_of(suite_rows(["softmax"], ["digits"]), tmp_path)
    with pytest.raises(NothingToDraw, match="read the folder of a run"):
        draw_curves(frame)


def test_a_curve_that_was_edited_is_refused(tmp_path: Path) -> None:
    run_of(suite_rows(["softmax"], ["digits"], seeds=2), tmp_path / "run")
    file = tmp_path / "run" / "curves.jsonl"
    file.write_text(file.read_text().replace('"step": 400', '"step": 401'))
    with pytest.raises(CorruptResults, match="changed"):
        draw_curves(read_results(tmp_path / "run"))


def test_a_line_joins_the_options_of_a_variant_and_softmax_is_a_point(kept: pd.DataFrame, words: Any) -> None:
    figure = draw(kept, figures=["recall"])["recall"]
    (ax,) = panels(figure)
    x = sorted(tuple(float(value) for value in line.get_xdata()) for line in marked(ax))
    assert x == [(4096.0,), (4096.0, 8192.0), (32768.0,)]
    assert "Without measured bytes: identity." in words(figure)
    assert ax.get_xscale() == "log"


def test_fewer_than_three_labels_with_bytes_are_no_figure(tmp_path: Path) -> None:
    rows = [training(label, 0.5, columns={"state_bytes": BYTES[label]}) for label in ("softmax", "linear")]
    rows += [training("local:block=16", 0.4), step("sinkhorn:block=16", 0.1, 1e6)]
    frame = frame_of(rows, tmp_path)
    with pytest.raises(NothingToDraw, match="3 labels"):
        draw_recall(frame)


LONGER = {"softmax": (0.9, 0.5, 0.2), "stack:gla+sdpa": (0.95, 0.9, 0.6), "linear": (0.5, 0.4, 0.3)}


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Models that were trained at 64 tokens and tested at 64, 128 and 512, those of linear not at the last."""
    rows = []
    for label, scores in LONGER.items():
        for length, score in zip((None, 128, 512), scores, strict=True):
            for seed in range(3):
                how: dict[str, Any] = {"test_len": length, "protocol": "fixed", "seed": seed}
                if (label, length) == ("linear", 512):
                    rows.append(training(label, None, Status.UNSUPPORTED, "made for 64", **how))
                else:
                    rows.append(training(label, score + 0.01 * seed, **how))
    return run_of(rows, tmp_path_factory.mktemp("tested") / "run")


def test_a_line_joins_the_tests_of_each_training_by_their_lengths(tested: pd.DataFrame, words: Any) -> None:
    figure = draw(tested, figures=["lengths"])["lengths"]
    (ax,) = panels(figure)
    found = [[(float(x), round(float(y), 2)) for x, y in line.get_xydata()] for line in marked(ax)]
    assert found == [
        [(64, 0.96), (128, 0.91), (512, 0.61)],
        [(64, 0.91), (128, 0.51), (512, 0.21)],
        [(64, 0.51), (128, 0.41)],
    ]
    said = words(figure)
    assert "Highest score at the longest test: stack:gla+sdpa" in said
    assert {"stack:gla+sdpa†", "softmax", "linear"} <= set(said.splitlines())
    assert "No score on recall · tested at n = 512 — unsupported: linear — made for 64" in " ".join(said.split())
    (upright,) = [line for line in ax.lines if line.get_linestyle() == ":" and list(line.get_xdata()) == [64, 64]]
    assert upright.get_linewidth() == 0.9


def test_figures_say_at_which_length_a_score_was_tested_and_a_curve_is_drawn_once(
    tested: pd.DataFrame, words: Any
) -> None:
    scores = words(draw(tested, figures=["scores"])["scores"])
    assert [f"tested at n = {n}" in scores for n in (64, 128, 512)] == [True] * 3
    curves = draw_curves(tested)
    assert len(panels(curves)) == 1
    assert "tested at" not in words(curves)
    at_128 = tested[tested["test_len"] == 128]
    assert "tested at n = 128" in words(draw(at_128, figures=["scores"])["scores"])
    with pytest.raises(NothingToDraw, match="several test_len"):
        draw(at_128, figures=["lengths"])


@pytest.mark.parametrize("width", ["page", "column"])
@pytest.mark.parametrize("name", ["curves", "recall", "lengths"])
def test_nothing_written_lies_on_anything_else(
    trained: pd.DataFrame, kept: pd.DataFrame, tested: pd.DataFrame, name: str, width: str, faults: Any
) -> None:
    frame = {"curves": trained, "recall": kept, "lengths": tested}[name]
    assert faults(draw(frame, figures=[name], width=width)[name]) == []


def test_a_score_at_a_shorter_test_does_not_win_the_longest(tmp_path: Path, words: Any) -> None:
    scores = {"softmax": (0.9, 0.2), "linear": (1.0, None)}
    rows = []
    for label, (near, far) in scores.items():
        for length, score in ((None, near), (128, near), (512, far)):
            how: dict[str, Any] = {"test_len": length, "protocol": "fixed"}
            status = (Status.OK,) if score is not None else (Status.UNSUPPORTED, "made for 64")
            rows.append(training(label, score, *status, **how))
    said = words(draw(run_of(rows, tmp_path / "run"), figures=["lengths"])["lengths"])
    assert "Highest score at the longest test: softmax\n" in said
