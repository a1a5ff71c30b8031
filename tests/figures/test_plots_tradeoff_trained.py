from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from attnbench.figures.kit.page import NothingToDraw
from attnbench.figures.tradeoff import applies, draw_tradeoff
from tests.figures.conftest import row
from tests.figures.trained_rows import LOSSES, table

pytestmark = pytest.mark.filterwarnings("ignore:The behavior of DataFrame concatenation:FutureWarning")  # of pandas 2

Words = Callable[[Figure], str]


def circles(figure: Figure) -> dict[str, Any]:
    found = {circle.get_label(): circle for circle in figure.axes[0].collections}
    return {label: found[label] for label in LOSSES}


def test_speed_stands_over_the_loss_of_the_same_rows(words: Words) -> None:
    assert applies(table())
    figure = draw_tradeoff(table())
    found = circles(figure)
    heights = {label: circle.get_offsets()[0][1] for label, circle in found.items()}
    order = ["better", "local", "performer", "mean-value", "linear"]
    assert sorted(order, key=lambda label: -heights[label]) == order, "less loss is higher, below the untouched too"
    gaps = [heights["better"] - heights["performer"], heights["performer"] - heights["linear"]]
    assert gaps[0] / gaps[1] == pytest.approx(0.9 / 1.2), "the scale is linear"
    assert min(heights["none"], heights["sdpa"]) > heights["better"], "exact up to rounding has a band of its own"
    assert found["linear"].get_sizes()[0] / found["local"].get_sizes()[0] == pytest.approx(6 / 3), "the area is memory"
    said = words(figure)
    for part in (
        "Unbeaten in speed and loss of a trained model: better, sdpa",
        "loss over the untouched model's",
        "folder",
        "16 windows",
    ):
        assert part in said
    assert "none: the model as it is." in said
    assert "linformer" in said
    assert "no causal form" in said


def test_what_harms_the_model_as_much_as_attending_to_nothing_does_not_compete(words: Words) -> None:
    said = words(draw_tradeoff(table()))
    assert "answering mean(V): 0.8" in said
    assert "compete: 5 of 7 methods." in said  # linear is worse, mean-value the reference, linformer failed
    assert "no other method is both faster and harms the model less" in said


def test_a_model_without_a_loss_has_the_error_of_its_features(words: Words) -> None:
    nothing = dict.fromkeys(("loss", "loss_base", "loss_delta", "loss_delta_low", "loss_delta_high"))
    frame = table().assign(**nothing)
    assert applies(frame)
    assert "relative error of the last features" in words(draw_tradeoff(frame))
    assert not applies(frame.assign(hidden_error=None))


def test_other_rows_of_the_table_are_drawn_by_their_errors_unless_the_loss_is_asked_for(words: Words) -> None:
    plain = pd.DataFrame(
        [row(label, time_median_s=0.1, peak_bytes=1e6) for label in ("sdpa", "local")]
        + [
            row(label, sweep="error", rel_error=0.1, rel_error_std=0.01, error_kind="approximation")
            for label in ("sdpa", "local")
        ]
    )
    frame = pd.concat([plain, table()], ignore_index=True)
    said = words(draw_tradeoff(frame))
    assert "relative error" in said
    assert "Timed, without an error: 8 rows of trained models; --y loss_delta draws them." in said
    assert "performer" not in said
    assert "loss over the untouched model's" in words(draw_tradeoff(frame, y="loss_delta"))
    with pytest.raises(NothingToDraw):
        draw_tradeoff(plain, y="loss_delta")


def test_two_models_have_a_panel_each() -> None:
    both = pd.concat([table(), table(model="another/model")], ignore_index=True)
    panels = [axes for axes in draw_tradeoff(both).axes if axes.get_xlabel()]
    assert len(panels) == 2
