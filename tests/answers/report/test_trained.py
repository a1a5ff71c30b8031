"""A report on a trained model whose attention gave way has what it loses beside its speed."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from attnbench.answers.report.answer import answer
from attnbench.answers.report.table_rows import marked
from attnbench.answers.report.views import views
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
    return " ".join("".join(text for text, _ in one) for one in answer(rows, views(rows), [], {}))


def test_the_vertical_axis_is_the_loss_over_the_untouched_models(frame: pd.DataFrame) -> None:
    rows = marked(frame)
    (view,) = views(rows)
    found = view.at[128]()
    assert (found.agreed.column, found.log, found.down) == ("loss_delta", False, True)
    points = found.points.set_index("label")
    assert {*points.index} == LOSSES.keys()
    assert [*points.loc["local", ["kind", "y", "y_low", "y_high"]]] == [
        "measured",
        *map(pytest.approx, (0.14, 0.04, 0.24)),
    ]
    assert [*points.loc[["none", "sdpa"], "kind"]] == ["exact", "exact"], "up to rounding"
    assert [*rows.loc[points["row"], "label"]] == [*points.index]
    assert [*found.front["label"]] == ["better", "sdpa"]
    text = Read(page_of(frame)).text
    assert "loss over the untouched model's, nats" in text
    assert "answering mean(V): 0.8" in text


def test_a_model_without_a_loss_has_the_error_of_its_features(tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = read(table().assign(**NO_LOSS), tmp_path_factory)
    (view,) = views(marked(rows))
    found = view.at[128]()
    assert (found.agreed.column, found.log, found.down) == ("hidden_error", True, True)
    assert "relative error of the last features" in Read(page_of(rows)).text


def test_every_row_has_its_loss_and_its_features(frame: pd.DataFrame) -> None:
    rows = {row["label"]: row for row in Read(page_of(frame)).rows}
    assert (rows["linear"]["loss"], rows["linear"]["features"]) == ("3.900 (+1.900)", "1.9")
    assert rows["linear"]["loss title"] == "+1.800 to +2.000 over the untouched model's"
    assert rows["linformer"]["loss"] == ""


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
