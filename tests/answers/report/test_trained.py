"""A report on a trained model whose attention gave way has what it loses beside its speed."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from attnbench.answers.report.answer import answer
from attnbench.answers.report.rows import marked
from attnbench.answers.report.views import as_data, views
from attnbench.results.read import read_results
from tests.answers.report.reading import Read, page_of
from tests.figures.trained_rows import LOSSES, table

NO_LOSS = dict.fromkeys(("loss", "loss_base", "loss_delta", "loss_delta_low", "loss_delta_high"))


@pytest.fixture(scope="module")
def frame(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return read(table(), tmp_path_factory)


def read(rows: pd.DataFrame, folders: pytest.TempPathFactory) -> pd.DataFrame:
    file = folders.mktemp("table") / "rows.csv"
    rows.to_csv(file, index=False)
    return read_results(file)


def said(frame: pd.DataFrame) -> str:
    rows = marked(frame)
    return " ".join("".join(text for text, _ in one) for one in answer(rows, views(rows), []))


def test_the_vertical_axis_is_the_loss_over_the_untouched_models(frame: pd.DataFrame) -> None:
    (view,) = views(marked(frame))
    data = as_data(view)
    assert (data["value"], data["y"], data["log"], data["down"]) == ("loss_delta", "loss", False, True)
    assert data["axis"] == "loss over the untouched model's, nats"
    rows = dict(enumerate(frame["label"]))
    points = {rows[place]: (kind, value, low, high) for place, kind, value, low, high in data["at"]["128"]["points"]}
    assert points.keys() == LOSSES.keys()
    assert points["local"] == (1, 0.14, pytest.approx(0.04), pytest.approx(0.24))
    assert points["none"][0] == points["sdpa"][0] == 0, "exact up to rounding"
    assert data["at"]["128"]["trivial"] == 0.8
    assert [rows[place] for place in data["at"]["128"]["front"]] == ["better", "sdpa"]


def test_a_model_without_a_loss_has_the_error_of_its_features(tmp_path_factory: pytest.TempPathFactory) -> None:
    (view,) = views(marked(read(table().assign(**NO_LOSS), tmp_path_factory)))
    data = as_data(view)
    assert (data["value"], data["y"], data["log"], data["down"]) == ("features", "error", True, True)
    assert data["axis"] == "relative error of the last features"


def test_every_row_has_its_loss_and_its_features(frame: pd.DataFrame) -> None:
    rows = {row["label"]: row for row in Read(page_of(frame)).rows}
    assert (rows["linear"]["loss"], rows["linear"]["loss_delta"], rows["linear"]["features"]) == (3.9, 1.9, 1.9)
    assert (rows["linear"]["loss_low"], rows["linear"]["loss_high"]) == (1.8, 2.0)
    assert rows["linformer"]["loss"] is None


def test_the_answer_counts_nats(frame: pd.DataFrame) -> None:
    assert (
        "Within 0.1 nats of the untouched model's loss, the fastest approximation is better, -0.2 nats from it"
        in said(frame)
    )
    far = frame[~frame["label"].isin(["better"])].reset_index(drop=True)
    assert "No approximation comes within 0.1 nats of the untouched model's loss; nearest is local with 0.14" in said(
        far
    )


def test_two_models_have_a_view_each(tmp_path_factory: pytest.TempPathFactory) -> None:
    both = pd.concat([table(), table(model="another/model")], ignore_index=True)
    assert [view.setting.rows["model"].nunique() for view in views(marked(read(both, tmp_path_factory)))] == [1, 1]


def opening(frame: pd.DataFrame) -> str:
    """What the page shows first."""
    return views(marked(frame))[0].what


def test_the_page_opens_on_the_forward_pass(tmp_path_factory: pytest.TempPathFactory) -> None:
    step, forward = table(**{"pass": "training"}), table()
    assert opening(read(pd.concat([step, forward], ignore_index=True), tmp_path_factory)).startswith("a forward pass")
    few = forward[forward["label"].isin(["none", "sdpa", "local"])]
    assert opening(read(pd.concat([step, few], ignore_index=True), tmp_path_factory)).startswith("a training step")


def test_the_page_on_the_committed_run_opens_on_the_forward_pass() -> None:
    run = Path(__file__).parents[3] / "results" / "reference" / "pretrained-cpu"
    assert opening(read_results(run)).startswith("a forward pass")
